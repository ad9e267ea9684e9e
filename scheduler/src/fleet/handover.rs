//! Leaving models and workers to the program that takes this one's place.

use std::{
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    sync::Arc,
};

use hotcell_proto::{
    error::Reason,
    v1::{self, WorkerState},
};
use tokio::task::JoinSet;

use super::{
    Fleet, Table,
    catalog::{Model, Standing},
    slot::Slot,
};
use crate::{kept::Kept, vault::Source};

/// The ends of connections that a worker serves besides ours.
#[derive(Debug)]
pub struct Joined {
    id: String,
    epoch: u64,
    ends: [OwnedFd; 3],
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Fleet {
    /// Keeps models from being loaded and unloaded while the result is held.
    pub async fn hold_loads(&self) -> impl Send + '_ {
        self.loads.none().await
    }

    /// The models that are wanted, and their files once more.
    ///
    /// # Errors
    /// For want of descriptors.
    pub fn held_files(&self) -> std::io::Result<(Vec<v1::HeldModel>, Vec<OwnedFd>)> {
        let table = self.table();
        let wanted = table.models.values().filter(|m| m.is_wanted());
        let files = wanted.filter_map(|m| m.files.as_ref()).map(|f| f.share());
        let files = files.collect::<std::io::Result<Vec<_>>>()?;
        // What devices keep is left out where this is read.
        let models = models(&table, &mut Vec::new());
        Ok((models, files.into_iter().flatten().collect()))
    }

    /// Has every worker that serves open connections for who comes next. One that does not is left out: it will be
    /// started again.
    pub async fn join_workers(&self) -> Vec<Joined> {
        let links: Vec<_> = {
            let table = self.table();
            table
                .workers
                .values()
                .filter_map(|slot| slot.serving().cloned())
                .collect()
        };
        let mut joins = JoinSet::new();
        for link in links {
            joins.spawn(async move {
                match link.join().await {
                    Ok(ends) => Some(Joined {
                        id: link.worker.clone(),
                        epoch: link.epoch,
                        ends,
                    }),
                    Err(error) => {
                        tracing::warn!(worker = link.worker, %error, "a worker cannot be handed over");
                        None
                    }
                }
            });
        }
        let mut joined = Vec::new();
        while let Some(done) = joins.join_next().await {
            joined.extend(done.ok().flatten());
        }
        joined
    }

    /// Writes down what there is, and does `work` before anything can change.
    pub fn freeze<T>(
        self: &Arc<Self>,
        joined: &[Joined],
        state: &mut v1::TakeoverState,
        work: impl FnOnce(&mut v1::TakeoverState) -> T,
    ) -> T {
        let table = self.table();
        // Held until the end, so that none of their descriptors becomes another file's.
        let mut holding = Vec::new();
        state.models = models(&table, &mut holding);
        state.devices.clone_from(&table.devices);
        let workers = table.workers.iter();
        state.workers = workers
            .map(|(id, slot)| {
                let ends = joined.iter().find(|j| j.id == *id && j.epoch == slot.epoch);
                let past = slot.supervised.past(self.now());
                v1::HeldWorker {
                    id: id.clone(),
                    device: Some(slot.device.clone()),
                    epoch: past.epoch,
                    deaths: past.deaths,
                    recent_ms: past.recent.into_iter().map(millis).collect(),
                    corrupt: past.corrupt,
                    quarantined: past.quarantined,
                    link: ends.and_then(|joined| held(slot, joined)),
                    guest: match &slot.guest {
                        Some(guest) => guest.model.as_str().to_owned(),
                        None => String::new(),
                    },
                    drained: slot.is_drained(),
                }
            })
            .collect();
        state.crashes = self.crashes.all();
        state.explained = self.explained().all().map(v1::HeldProcess::from).collect();
        state.solos = self.solos_made.load(std::sync::atomic::Ordering::Relaxed);
        work(state)
    }
}

/// Whether a model is there, or the next request for it has it loaded.
fn outlives(model: &Model) -> bool {
    use v1::ModelState::{Asleep, Failed};
    let for_want_of_room = || {
        let problem = model.problem.as_ref();
        problem.is_some_and(|p| p.reason() == Reason::Overloaded)
    };
    match model.state {
        Asleep => true,
        Failed => for_want_of_room(),
        _ => model.is_wanted(),
    }
}

fn models(table: &Table, holding: &mut Vec<Arc<Kept>>) -> Vec<v1::HeldModel> {
    let held = table.models.iter();
    let held = held.filter(|(_, m)| m.standing != Standing::Coming && outlives(m));
    let held = held.filter_map(|(name, model)| {
        let footprint = model.footprint.unwrap_or_default();
        Some(v1::HeldModel {
            name: name.as_str().to_owned(),
            path: match &model.source {
                Source::Path(path) => Some(path.as_os_str().as_bytes().to_vec()),
                Source::Bundled => None,
            },
            configured: model.configured,
            state: match (model.standing, &model.files) {
                (Standing::Replaced, _) => v1::ModelState::Retiring.into(),
                // Its next request wakes it.
                (_, None) => v1::ModelState::Asleep.into(),
                (_, Some(_)) => model.state.into(),
            },
            summary: model.summary.clone(),
            files: match &model.files {
                Some(files) if model.is_wanted() => files.hold(),
                _ if model.source.can_be_read_again() => Vec::new(),
                _ => return None,
            },
            kept: match &model.files {
                Some(files) if model.is_wanted() => files.kept().hold(holding),
                _ => Vec::new(),
            },
            untrusted: model.files.as_ref().is_some_and(|f| f.alone().is_some()),
            serving: Some(v1::Serving {
                aliases: table.names_of(name),
                ..model.serving.clone()
            }),
            weights_bytes: footprint.weights,
            each_bytes: footprint.each,
            configured_serving: model.configured_serving.clone(),
        })
    });
    held.collect()
}

/// What of a worker's process is handed on, if it still serves.
fn held(slot: &Slot, joined: &Joined) -> Option<v1::HeldLink> {
    let link = slot
        .serving()
        .filter(|_| slot.state == WorkerState::Ready)?;
    let handover = slot.handover.as_ref()?;
    let [control, tokens, tensors] = joined.ends.each_ref().map(AsRawFd::as_raw_fd);
    let models = slot.models.iter().map(|(model, loaded)| v1::HeldLoaded {
        model: model.as_str().to_owned(),
        loaded: Some(loaded.clone()),
    });
    Some(v1::HeldLink {
        pid: slot.pid,
        uptime_ms: millis(slot.since.elapsed()),
        control,
        tokens,
        tensors,
        descriptors: link.descriptors().as_raw_fd(),
        blackbox: handover.blackbox.as_raw_fd(),
        log: handover.log.as_raw_fd(),
        next_tag: link.next_tag(),
        log_lines: handover.lines(),
        models: models.collect(),
    })
}
