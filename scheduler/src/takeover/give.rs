//! Leaving everything to another program, and becoming it.

use std::{
    ffi::OsString,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::ffi::OsStringExt,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::{
    image::Image,
    memory::sealed_memory,
    socket::peer_credentials,
    spawn::{Command, Output, Spawner},
    takeover::{self as door, Asked, STATE_VARIABLE},
};
use hotcell_proto::{
    PROTOCOL_VERSION, limits,
    v1::{DoorKind, HeldDoor, TakeoverRequest, TakeoverResponse, TakeoverState},
};
use prost::Message;
use tokio::{io::AsyncReadExt, net::UnixStream, time::timeout};

use super::{STATE_VERSION, creed};
use crate::{discover::clip, fleet::Joined, service::Shared};

/// How long the new program may take to say what it understands.
const CHECK: Duration = Duration::from_secs(10);
/// How long a model may go on being loaded before the takeover is refused.
const LOADS: Duration = Duration::from_secs(10);
/// How long the spans of requests that have ended may take to be sent.
const TRACES: Duration = Duration::from_millis(500);
/// Longest drain.
const MAX_DRAIN: Duration = Duration::from_secs(86_400);

/// What the service manager said to this process, which the new program's caller does not know.
const MANAGERS: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "FDSTORE",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
];

/// A listening socket that can be handed on.
#[derive(Debug)]
pub struct OwnDoor {
    /// What is served there.
    pub kind: DoorKind,
    /// Path or address, as it was asked for.
    pub address: Vec<u8>,
    /// The socket.
    pub listener: OwnedFd,
    /// The lock of its path.
    pub lock: Option<OwnedFd>,
}

/// Becomes another program when asked. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Takeover(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    spawner: Spawner,
    device_choice: String,
    doors: Mutex<Vec<OwnDoor>>,
    one: tokio::sync::Mutex<()>,
}

impl Takeover {
    /// Of a scheduler with these doors.
    pub fn new(spawner: Spawner, device_choice: String, doors: Vec<OwnDoor>) -> Self {
        Self(Some(Arc::new(Inner {
            spawner,
            device_choice,
            doors: Mutex::new(doors),
            one: tokio::sync::Mutex::default(),
        })))
    }

    /// Closes its share of the doors: nobody is let in any more.
    pub fn close(&self) {
        if let Some(inner) = &self.0 {
            inner.doors().clear();
        }
    }

    /// Looks at the doors; there are none once they are closed.
    pub fn with_doors<T>(&self, look: impl FnOnce(&[OwnDoor]) -> T) -> T {
        match &self.0 {
            Some(inner) => look(&inner.doors()),
            None => look(&[]),
        }
    }

    /// Serves somebody who asks. Answers only if nothing comes of it.
    ///
    /// # Errors
    /// What reading and answering report.
    pub async fn serve(
        &self,
        mut stream: UnixStream,
        bytes: usize,
        shared: &Shared,
    ) -> std::io::Result<()> {
        let peer = peer_credentials(&stream)?;
        let own = peer.uid == rustix::process::geteuid().as_raw();
        // To its end, also from a stranger: what is not read when it is closed takes the answer with it.
        let asked = door::receive(&mut stream, bytes).await?;
        let asker = OwnedFd::from(stream.into_std()?);
        tracing::info!(
            pid = peer.pid,
            uid = peer.uid,
            "asked to become another program"
        );
        let Err(problem) = match &self.0 {
            _ if !own => Err("only the user that runs the scheduler may take it over".to_owned()),
            Some(inner) => inner.perform(asked, asker.try_clone()?, shared).await,
            None => Err("this scheduler cannot be taken over".to_owned()),
        };
        tracing::warn!(
            problem,
            "did not become another program; nothing has changed"
        );
        let answer = TakeoverResponse {
            problem: clip(&problem),
            ..TakeoverResponse::default()
        };
        let answer = answer.encode_to_vec();
        tokio::task::spawn_blocking(move || door::answer(asker, &answer)).await?
    }
}

/// What cannot be.
type Never = std::convert::Infallible;

impl Inner {
    fn doors(&self) -> MutexGuard<'_, Vec<OwnDoor>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Becomes the program, or says why not.
    async fn perform(
        self: &Arc<Self>,
        asked: Asked,
        asker: OwnedFd,
        shared: &Shared,
    ) -> Result<Never, String> {
        let Ok(_one) = self.one.try_lock() else {
            return Err("another program is taking over just now".to_owned());
        };
        let closed = || match shared.admission.is_closed() {
            true => Err("the scheduler is ending".to_owned()),
            false => Ok(()),
        };
        closed()?;
        let request = TakeoverRequest::decode(&asked.message[..])
            .map_err(|e| format!("the request cannot be read: {e}"))?;
        if request.version != STATE_VERSION {
            return Err(format!(
                "the new program reads state {}, and this one writes {STATE_VERSION}; restart the scheduler instead",
                request.version
            ));
        }
        let args: Vec<_> = request.args.into_iter().map(OsString::from_vec).collect();
        let env = environment(request.env);
        let Asked {
            program, directory, ..
        } = asked;
        self.check(&program, &directory, &args, &env).await?;
        let drain = Duration::from_millis(request.drain_ms).min(MAX_DRAIN);
        if timeout(drain, shared.admission.empty()).await.is_err() && !drain.is_zero() {
            let left = shared.admission.count();
            tracing::info!(left, "streams go on in the new program");
        }
        let Ok(_loads) = timeout(LOADS, shared.fleet.hold_loads()).await else {
            return Err("a model is being loaded or unloaded; try again".to_owned());
        };
        closed()?;
        let image = Image {
            program,
            args,
            env,
            directory,
            keep: Vec::new(),
        };
        // Those of streams that end before the new program begins; the others end there.
        shared.traces.flush(TRACES).await;
        let joined = shared.fleet.join_workers().await;
        let (inner, shared) = (Arc::clone(self), shared.clone());
        // Not on a thread that others wait for: locks are held until this program has ended.
        let done = tokio::task::spawn_blocking(move || inner.go(image, &asker, &joined, &shared));
        done.await
            .unwrap_or_else(|e| Err(format!("it failed: {e}")))
    }

    /// Sees whether the program can be run, likes its settings and understands what it would be left.
    async fn check(
        &self,
        program: &OwnedFd,
        directory: &OwnedFd,
        args: &[OsString],
        env: &[OsString],
    ) -> Result<(), String> {
        let broken = |e: std::io::Error| format!("the new program cannot be tried: {e}");
        // As the child sees it, which has this process's descriptors until then.
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.args = args.iter().skip(1).cloned().collect();
        command.args.push("--takeover-check".into());
        for pair in env {
            let bytes = pair.as_encoded_bytes();
            if let Some(at) = bytes.iter().position(|b| *b == b'=') {
                let (name, value) = bytes.split_at(at);
                let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
                command = command.env(text(name), text(&value[1..]));
            }
        }
        command.directory = Some(directory.try_clone().map_err(broken)?);
        command.stdout = Output::Pipe;
        command.stderr = Output::Inherit;
        let mut child = self.spawner.spawn(command).await.map_err(broken)?;
        let said = async {
            let mut said = Vec::new();
            if let Some(stdout) = child.stdout.take() {
                let mut stdout = tokio::net::unix::pipe::Receiver::from_owned_fd(stdout)?;
                let most = limits::MAX_WORD as u64;
                (&mut stdout).take(most).read_to_end(&mut said).await?;
            }
            Ok((said, child.wait().await?))
        };
        let (said, status) = match timeout(CHECK, said).await {
            Ok(said) => said.map_err(broken)?,
            Err(_) => return Err(format!("the new program said nothing within {CHECK:?}")),
        };
        let said = String::from_utf8_lossy(&said);
        match said.trim_end() == creed() && status.success() {
            true => Ok(()),
            false => Err(format!(
                "the new program ends with {status} where it should say {:?}, and says {:?}",
                creed(),
                clip(&said)
            )),
        }
    }

    /// Writes everything down, and becomes the program.
    fn go(
        &self,
        mut image: Image,
        asker: &OwnedFd,
        joined: &[Joined],
        shared: &Shared,
    ) -> Result<Never, String> {
        let doors = self.doors();
        if doors.is_empty() {
            return Err("the scheduler is ending".to_owned());
        }
        // Held until the end, so that none of their descriptors becomes another file's.
        let graphs = shared.graphs.all();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut state = TakeoverState {
            version: STATE_VERSION,
            protocol_version: PROTOCOL_VERSION,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            asker: asker.as_raw_fd(),
            written_ms: since.map_or(0, |s| u64::try_from(s.as_millis()).unwrap_or(0)),
            doors: doors.iter().map(held).collect(),
            device_choice: self.device_choice.clone(),
            graphs: graphs.iter().map(|saved| saved.hold()).collect(),
            ..TakeoverState::default()
        };
        shared.fleet.freeze(joined, &mut state, |state| {
            shared.streams.freeze(|streams| {
                state.streams = streams;
                let bytes = state.encode_to_vec();
                if bytes.len() > limits::MAX_TAKEOVER_STATE {
                    return Err(format!("{} bytes are too much to hand over", bytes.len()));
                }
                let memory = sealed_memory("hotcell-takeover", &bytes)
                    .map_err(|e| format!("no memory for {} bytes: {e}", bytes.len()))?;
                drop(bytes);
                let number = memory.as_raw_fd();
                image.env.push(format!("{STATE_VARIABLE}={number}").into());
                image.keep = descriptors(state);
                image.keep.push(number);
                let error = self.spawner.become_program(image);
                Err(format!("the new program cannot be executed: {error}"))
            })
        })
    }
}

/// A door as a state has it.
pub fn held(door: &OwnDoor) -> HeldDoor {
    HeldDoor {
        kind: door.kind.into(),
        address: door.address.clone(),
        listener: door.listener.as_raw_fd(),
        lock: door.lock.as_ref().map_or(-1, AsRawFd::as_raw_fd),
    }
}

/// Every descriptor that a state names.
pub(super) fn descriptors(state: &TakeoverState) -> Vec<RawFd> {
    let doors = state.doors.iter().flat_map(|d| [d.listener, d.lock]);
    let files = state.models.iter().flat_map(|m| &m.files);
    let packed = files.clone().flat_map(|f| &f.packed);
    let files = files.chain(packed.filter_map(|p| p.file.as_ref()));
    let kept = state.models.iter().flat_map(|m| &m.kept);
    let kept = kept.flat_map(|kept| kept.descriptors.iter().copied());
    let links = state.workers.iter().filter_map(|w| w.link.as_ref());
    let links = links.flat_map(|l| {
        [
            l.control,
            l.tokens,
            l.tensors,
            l.descriptors,
            l.blackbox,
            l.log,
        ]
    });
    let graphs = state.graphs.iter().map(|graph| graph.memory);
    let all = doors.chain(files.map(|f| f.descriptor)).chain(links);
    let all = all.chain(graphs).chain(kept);
    all.chain([state.asker]).filter(|fd| *fd > 2).collect()
}

/// The environment that the caller wants, and what the service manager said to this process.
fn environment(wanted: Vec<Vec<u8>>) -> Vec<OsString> {
    let ours = |pair: &[u8]| {
        let name = pair.split(|b| *b == b'=').next().unwrap_or_default();
        let named = |own: &&str| own.as_bytes() == name;
        MANAGERS.iter().any(named) || named(&STATE_VARIABLE)
    };
    let wanted = wanted.into_iter().filter(|pair| !ours(pair));
    let kept = MANAGERS.iter().filter_map(|name| {
        let mut pair = OsString::from(format!("{name}="));
        pair.push(std::env::var_os(name)?);
        Some(pair)
    });
    wanted.map(OsString::from_vec).chain(kept).collect()
}
