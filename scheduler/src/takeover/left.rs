//! What the program before this one left: read as a stranger's words, and gone on with.

use std::{
    collections::BTreeMap,
    os::{
        fd::{OwnedFd, RawFd},
        unix::ffi::OsStringExt,
    },
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::{inherit, memory::FileIdentity, spawn::Child, takeover as door};
use hotcell_proto::{
    PROTOCOL_VERSION,
    ids::ModelName,
    limits,
    v1::{
        Device, DoorKind, HeldDoor, HeldFile, HeldLink, HeldModel, HeldStream, HeldWorker,
        ModelState, TakeoverResponse, TakeoverState, WorkerState,
    },
};
use prost::Message;
use tokio::time::{Instant, timeout_at};

use super::{STATE_VERSION, give::descriptors};
use crate::{
    admission::wanted,
    config::ConfiguredModel,
    fleet::{Fleet, Heir, Inherited, Launched, Live, Processes},
    relay::{self, Call},
    room::Footprint,
    service::Shared,
    store,
    supervisor::Past,
    suspicion::Process,
    traces::{self, TAKEN_OVER, Value},
    vault::{self, Source},
};

/// Listening sockets at most.
const MAX_DOORS: usize = 8;
/// How long workers may take to serve before the caller is told that they do not.
const SETTLE: Duration = Duration::from_secs(30);

/// A listening socket, and the lock of its path.
#[derive(Debug)]
pub struct Door {
    /// The socket.
    pub listener: OwnedFd,
    /// The lock.
    pub lock: Option<OwnedFd>,
}

/// What was left, each part until it is taken. What nobody takes is closed, and ends, when this is dropped.
#[derive(Debug)]
pub struct Left {
    state: TakeoverState,
    fds: BTreeMap<RawFd, OwnedFd>,
    children: BTreeMap<u32, Child>,
}

/// Whom to tell, once this program serves.
#[derive(Debug)]
pub struct Asker {
    stream: Option<OwnedFd>,
    written_ms: u64,
    kept: Vec<(String, u64)>,
    streams: usize,
}

impl Left {
    /// Takes what was left, if this program was executed to go on with something. Whatever it inherited besides is
    /// closed, and children that nothing is known about end.
    ///
    /// # Errors
    /// Why it is of no use.
    pub fn take() -> Result<Option<Left>, String> {
        let Some(number) = door::state_descriptor() else {
            return Self::stored();
        };
        let left = Self::read(number);
        // Only now: what is known was taken, and the rest is of no use to anybody.
        let closed = inherit::close_others(&[]);
        let children = left.iter().flat_map(|l| l.children.keys().copied());
        let ended = door::end_strays(&children.collect::<Vec<_>>());
        for done in [closed, ended] {
            done.unwrap_or_else(|e| eprintln!("what was inherited cannot be looked through: {e}"));
        }
        left.map(Some)
    }

    /// What the service manager kept of a scheduler that was killed.
    fn stored() -> Result<Option<Left>, String> {
        let mut stored = inherit::stored(store::PREFIX);
        let Some(at) = stored.iter().position(|(name, _)| name == store::STATE) else {
            return Ok(Self::activated(stored));
        };
        let mut state = Self::decode(stored.swap_remove(at).1)?;
        (state.workers, state.streams, state.asker) = (Vec::new(), Vec::new(), -1);
        // The numbers in the state were those of the other process.
        let mut fds = BTreeMap::new();
        let mut number = 0;
        let mut claim = |fits: &dyn Fn(&str, &OwnedFd) -> bool| {
            number += 1;
            if let Some(at) = stored.iter().position(|(name, fd)| fits(name, fd)) {
                fds.insert(number, stored.swap_remove(at).1);
            }
            number
        };
        for door in &mut state.doors {
            let name = store::name_of(door.kind());
            door.listener = claim(&|stored, _| stored == name);
            door.lock = -1;
        }
        let mut find = |file: &mut HeldFile| {
            let (dev, ino) = (file.device, file.inode);
            file.descriptor = claim(&|name, fd| {
                let same = |found: FileIdentity| (found.dev, found.ino) == (dev, ino);
                name == store::FILE && FileIdentity::of(fd).is_ok_and(same)
            });
        };
        for model in &mut state.models {
            // It ended with the process that held it.
            model.kept.clear();
        }
        for file in state.models.iter_mut().flat_map(|m| &mut m.files) {
            find(file);
            let packed = file.packed.iter_mut();
            packed.filter_map(|p| p.file.as_mut()).for_each(&mut find);
        }
        Ok(Some(Left {
            state,
            fds,
            children: BTreeMap::new(),
        }))
    }

    /// The sockets that the service manager listens on for a scheduler that it starts for the first time.
    fn activated(sockets: Vec<(String, OwnedFd)>) -> Option<Left> {
        let mut left = Left {
            state: TakeoverState::default(),
            fds: BTreeMap::new(),
            children: BTreeMap::new(),
        };
        for (number, (name, socket)) in (1..).zip(sockets) {
            let Some((kind, address)) = store::activated(&name, &socket) else {
                continue;
            };
            left.state.doors.push(HeldDoor {
                kind: kind.into(),
                address,
                listener: number,
                lock: -1,
            });
            left.fds.insert(number, socket);
        }
        (!left.fds.is_empty()).then_some(left)
    }

    fn read(number: RawFd) -> Result<Left, String> {
        let memory = inherit::take(number).map_err(|e| e.to_string())?;
        let mut state = Self::decode(memory)?;
        let mut fds = BTreeMap::new();
        for number in descriptors(&state) {
            // One that is not there, or was named before, is missing where it is looked for.
            if let Ok(fd) = inherit::take(number) {
                fds.insert(number, fd);
            }
        }
        let mut children = BTreeMap::new();
        for link in state.workers.iter_mut().filter_map(|w| w.link.as_mut()) {
            let log = fds.remove(&link.log);
            // One that died meanwhile is nobody's child any more.
            if let Ok(child) = Child::adopt(link.pid, log) {
                children.insert(link.pid, child);
            }
        }
        Ok(Left {
            state,
            fds,
            children,
        })
    }

    fn decode(memory: OwnedFd) -> Result<TakeoverState, String> {
        let bytes = door::read_state(memory).map_err(|e| e.to_string())?;
        let state = TakeoverState::decode(&bytes[..]).map_err(|e| e.to_string())?;
        if state.version != STATE_VERSION {
            return Err(format!(
                "it is of version {}, and this program reads {STATE_VERSION}",
                state.version
            ));
        }
        for (what, count, most) in [
            ("doors", state.doors.len(), MAX_DOORS),
            ("models", state.models.len(), limits::MAX_MODELS),
            ("devices", state.devices.len(), limits::MAX_DEVICES),
            (
                "workers",
                state.workers.len(),
                limits::MAX_DEVICES + limits::MAX_GUESTS,
            ),
            ("streams", state.streams.len(), limits::MAX_STREAMS),
            ("graphs", state.graphs.len(), limits::MAX_SAVED_GRAPHS),
            ("crash reports", state.crashes.len(), limits::KEPT_CRASHES),
        ] {
            if count > most {
                return Err(format!("{count} {what} are more than {most}"));
            }
        }
        Ok(state)
    }

    /// The socket that listened for this.
    pub fn door(&mut self, kind: DoorKind, address: &[u8]) -> Option<Door> {
        let same = |d: &&hotcell_proto::v1::HeldDoor| d.kind() == kind && d.address == address;
        let held = self.state.doors.iter().find(same)?;
        Some(Door {
            listener: self.fds.remove(&held.listener)?,
            lock: self.fds.remove(&held.lock),
        })
    }

    /// The devices, if they were chosen in the same way.
    pub fn devices(&self, choice: &str) -> Option<Vec<Device>> {
        let same = self.state.device_choice == choice && !self.state.devices.is_empty();
        same.then(|| self.state.devices.clone())
    }

    /// Hands models and what is remembered of deaths to the fleet, but for models that lie elsewhere now. Returns those in
    /// memory that are to be served otherwise than they were.
    pub fn give_models(&mut self, fleet: &Fleet, wanted: &[ConfiguredModel]) -> Vec<ModelName> {
        let mut otherwise = Vec::new();
        for model in std::mem::take(&mut self.state.models) {
            let HeldModel {
                name,
                path,
                configured,
                state,
                summary,
                files,
                untrusted,
                serving,
                weights_bytes,
                each_bytes,
                configured_serving,
                kept,
            } = model;
            let state = ModelState::try_from(state).unwrap_or_default();
            let Ok(name) = ModelName::new(name) else {
                continue;
            };
            let path = path.map(|path| PathBuf::from(std::ffi::OsString::from_vec(path)));
            let known = wanted.iter().find(|model| model.name == name);
            if known.is_some_and(|model| Some(&model.path) != path.as_ref())
                || files.len() > limits::MAX_MODEL_FILES
            {
                continue;
            }
            let mut claim = |number| self.fds.remove(&number);
            // What comes without files sleeps.
            let files = (!files.is_empty() || path.is_none())
                .then(|| vault::inherit(files, path.is_none(), untrusted, &mut claim));
            if let Some(Ok(files)) = &files {
                files.kept().inherit(kept, claim);
            }
            let source = path.map_or(Source::Bundled, Source::Path);
            // What was said of it since the configuration was read stays, unless that says something else now.
            let said = known.map(|model| &model.serving);
            let news =
                said.filter(|said| configured_serving.as_ref().is_some_and(|was| was != *said));
            if let Some(said) = news {
                tracing::info!(model = %name, "it is served as the changed configuration says");
                if (said.pinned && state == ModelState::Asleep)
                    || matches!(state, ModelState::Loading | ModelState::Loaded)
                {
                    otherwise.push(name.clone());
                }
            }
            // The program before this one did not note what the configuration said, or it said nothing: what is served
            // now may be what somebody asked for.
            let differs = said.filter(|said| Some(*said) != serving.as_ref());
            let unknown = configured_serving.is_none() && differs.is_some();
            if unknown {
                tracing::warn!(model = %name, "it is served as before, and otherwise than the configuration says; `hotcell load` changes that");
            }
            let held = Inherited {
                configured: configured || known.is_some(),
                state,
                summary,
                serving: news.cloned().or(serving).unwrap_or_default(),
                configured_serving: match unknown {
                    true => None,
                    false => said.cloned().or(configured_serving),
                },
                footprint: Footprint {
                    weights: weights_bytes,
                    each: each_bytes,
                },
            };
            fleet.inherit_model(name, source, held, files);
        }
        let explained = std::mem::take(&mut self.state.explained);
        let explained: Vec<_> = explained.into_iter().map(Process::from).collect();
        fleet.inherit_past(&explained, self.state.solos);
        fleet
            .crashes
            .inherit(std::mem::take(&mut self.state.crashes));
        otherwise
    }

    /// The workers, with the processes that live on.
    pub fn workers(&mut self, processes: &Processes) -> Vec<Heir> {
        let speaks = self.state.protocol_version == PROTOCOL_VERSION;
        let workers = std::mem::take(&mut self.state.workers);
        let heir = |worker: HeldWorker| {
            let link = worker.link.filter(|_| speaks);
            let live = link.and_then(|link| self.live(processes, &worker.id, worker.epoch, link));
            Heir {
                live,
                guest: ModelName::new(worker.guest).ok(),
                drained: worker.drained,
                past: Past {
                    epoch: worker.epoch,
                    deaths: worker.deaths,
                    recent: worker
                        .recent_ms
                        .into_iter()
                        .map(Duration::from_millis)
                        .collect(),
                    corrupt: worker.corrupt,
                    quarantined: worker.quarantined,
                },
                device: worker.device.unwrap_or_default(),
                id: worker.id,
            }
        };
        workers.into_iter().map(heir).collect()
    }

    fn live(
        &mut self,
        processes: &Processes,
        id: &str,
        epoch: u64,
        link: HeldLink,
    ) -> Option<Live> {
        let child = self.children.remove(&link.pid)?;
        let mut claim = |number: RawFd| self.fds.remove(&number);
        let (control, tokens) = (claim(link.control)?, claim(link.tokens)?);
        let (tensors, descriptors) = (claim(link.tensors)?, claim(link.descriptors)?);
        let blackbox = claim(link.blackbox)?;
        let lines = link.log_lines.into_iter().take(limits::KEPT_LOG_LINES);
        let process = processes.adopt(child, (id, epoch), blackbox, lines.collect());
        let process = process
            .inspect_err(|error| tracing::warn!(worker = id, %error, "a worker cannot be kept"))
            .ok()?;
        let models = link
            .models
            .into_iter()
            .filter_map(|held| Some((ModelName::new(held.model).ok()?, held.loaded?)));
        Some(Live {
            launched: Launched {
                process,
                control: control.into(),
                tokens: tokens.into(),
                tensors: tensors.into(),
                descriptors,
            },
            next_tag: link.next_tag,
            uptime: Duration::from_millis(link.uptime_ms),
            models: models.collect(),
        })
    }

    /// Has the streams go on, and returns whom to tell. `kept` are the workers that live on.
    pub fn resume(mut self, shared: &Shared, kept: Vec<(String, u64)>) -> Asker {
        let mut streams = std::mem::take(&mut self.state.streams);
        // The order in which the oldest are forgotten.
        streams.sort_by_key(|held| held.ended);
        let count = streams.len();
        for held in std::mem::take(&mut self.state.graphs) {
            let memory = self.fds.remove(&held.memory);
            let restored = memory.map(|memory| shared.graphs.restore(shared, memory, held));
            if let Some(Err(error)) = restored {
                tracing::warn!(%error, "a saved graph is lost");
            }
        }
        for held in streams {
            if let Err(error) = resume(shared, held) {
                tracing::warn!(%error, "a stream does not go on");
            }
        }
        Asker {
            stream: self.fds.remove(&self.state.asker),
            written_ms: self.state.written_ms,
            kept,
            streams: count,
        }
    }
}

/// Has one stream go on, or wait for its client.
fn resume(shared: &Shared, held: HeldStream) -> Result<(), hotcell_proto::error::Error> {
    let (id, restored) = shared.streams.restore(held)?;
    let (streams, stream) = (shared.streams.clone(), restored.stream);
    let Some(running) = restored.running else {
        tokio::spawn(async move { streams.keep(&id, &stream).await });
        return Ok(());
    };
    let begun = shared
        .admission
        // Its prompt was let in before.
        .admit(0)
        .and_then(|permit| Ok((permit, ModelName::new(running.request.model.as_str())?)));
    let begun = begun.map(|(permit, model)| {
        let context = shared.fleet.bounds(&model).map(|b| b.context);
        // What its tenant has, though it may be more than it might have now.
        let want = wanted(&running.request, context);
        let held = shared.access.tenants.note(&running.request.tenant, want);
        (permit.with(held), model)
    });
    let (permit, model) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            streams.finish(&id, &stream, Err(error.clone().into()));
            tokio::spawn(async move { streams.keep(&id, &stream).await });
            return Err(error);
        }
    };
    let arrival = shared.traces.resume(running.trace);
    let mut trace = traces::of_generate(&arrival, &running.request);
    traces::filled_in(&mut trace, &running.request, &model);
    trace.set(&TAKEN_OVER, Value::Flag(true));
    let call = Box::new(Call {
        trace,
        using: shared.fleet.using(&model),
        request: running.request,
        id,
        model,
        deadline: running.deadline,
        permit,
        past: running.past,
    });
    let (fleet, abort) = (Arc::clone(&shared.fleet), shared.abort.clone());
    tokio::spawn(relay::run(fleet, call, stream, streams, abort));
    Ok(())
}

impl Asker {
    /// Tells it once every worker serves, or does not.
    pub async fn tell(self, fleet: Arc<Fleet>) {
        let Some(stream) = self.stream else { return };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = since.map_or(0, |s| u64::try_from(s.as_millis()).unwrap_or(0));
        let until = Instant::now() + SETTLE;
        let mut changed = fleet.changes();
        let workers = loop {
            changed.see();
            let workers = fleet.workers();
            let starting = |w: &hotcell_proto::v1::WorkerInfo| w.state() == WorkerState::Starting;
            let own = |w: &&hotcell_proto::v1::WorkerInfo| !w.id.contains('.');
            if !workers.iter().filter(own).any(starting)
                || timeout_at(until, changed.changed()).await.is_err()
            {
                break workers;
            }
        };
        let own: Vec<_> = workers.iter().filter(|w| !w.id.contains('.')).collect();
        let lives = |w: &&&hotcell_proto::v1::WorkerInfo| {
            let process = (w.id.clone(), w.epoch);
            w.state() == WorkerState::Ready && self.kept.contains(&process)
        };
        let kept = own.iter().filter(lives).count();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let answer = TakeoverResponse {
            problem: String::new(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            workers_kept: count(kept),
            workers_new: count(own.len() - kept),
            streams: count(self.streams),
            pause_ms: now.saturating_sub(self.written_ms),
        };
        tracing::info!(
            kept,
            new = own.len() - kept,
            streams = self.streams,
            pause_ms = answer.pause_ms,
            "took over from the program before this one"
        );
        let answer = answer.encode_to_vec();
        let told = tokio::task::spawn_blocking(move || door::answer(stream, &answer)).await;
        if let Ok(Err(error)) = told {
            tracing::debug!(%error, "who asked for the takeover did not hear of it");
        }
    }
}
