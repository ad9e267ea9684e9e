//! Throw-away workers that run a request again for somebody who looks into it, beside those that serve.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{Device, WorkerState},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    Fleet, LoadFailure, Order, Role,
    aside::{Aside, while_alive},
    link::Link,
    slot::REPLAY,
    solo::{Leash, Watched, watch},
};
use crate::{
    death::{Death, Ended},
    discover::clip,
};

/// How long one waits for a place.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between two looks whether a debugger is attached.
const LOOK: Duration = Duration::from_millis(50);
/// It computes on the time that others leave, and may take so many times as long as they before it counts as hung.
pub(super) const SLOWER: u32 = 4;

/// A throw-away worker with one model. Dropping it ends the process.
pub struct Replayer {
    /// The conversation with it.
    pub link: Arc<Link>,
    /// Its process.
    pub pid: u32,
    _leash: Leash,
}

impl Replayer {
    /// Waits until a debugger is attached to its process and has let it go on, or so long.
    pub async fn held(&self, patience: Duration) {
        let attached = async {
            // One that has just come stops it only a moment later, and reads symbols before it lets it go on.
            let mut goes_on = 0;
            while goes_on < 2 {
                let traced = tracing(self.pid);
                goes_on = match traced {
                    Some(Traced { stands: false }) => goes_on + 1,
                    _ => 0,
                };
                sleep(LOOK).await;
            }
        };
        // Nobody came: it runs without.
        let _ = timeout(patience, attached).await;
    }
}

/// What a debugger does with a process.
struct Traced {
    /// It has it stand still.
    stands: bool,
}

/// What a process' status in `/proc` says of a debugger; none: none is attached.
fn traced(status: &str) -> Option<Traced> {
    let said = |name: &str| {
        let mut lines = status.lines();
        lines
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    let attached = said("TracerPid:").is_some_and(|tracer| !matches!(tracer, "" | "0"));
    attached.then(|| Traced {
        stands: said("State:").is_some_and(|state| state.starts_with(['t', 'T'])),
    })
}

fn tracing(pid: u32) -> Option<Traced> {
    traced(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// Whether a debugger is attached to a process, by `/proc`.
pub(super) fn is_traced(pid: u32) -> bool {
    tracing(pid).is_some()
}

impl Fleet {
    /// Starts a worker beside one that has the model, on its device, and has it load the model's files, which are open. It
    /// runs on the time that others leave, or `hurries` and takes turns with them.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`], [`Reason::NoWorker`], [`Reason::Overloaded`] when too many run already; why the model does not load.
    pub async fn replayer(
        self: &Arc<Self>,
        model: &ModelName,
        beside: &str,
        hurries: bool,
    ) -> Result<Replayer, Error> {
        let place = timeout(PATIENCE, Arc::clone(&self.replays).acquire_owned()).await;
        let permit = place.ok().and_then(Result::ok).ok_or_else(|| {
            let most = limits::MAX_REPLAYS;
            let what = format!("{most} requests are being run again already; try again later");
            Error::new(Reason::Overloaded, what)
        })?;
        let (home, device) = self.replay_device(model, beside)?;
        let files = self.solo_files(model)?;
        let number = self.replays_made.fetch_add(1, Ordering::Relaxed) + 1;
        let id = format!("{home}.replay{number}");
        let order = Order {
            worker: &id,
            epoch: 1,
            device: &device,
            allowance: self.allowance_for(model),
            role: Role::Replays { hurries },
        };
        let begun = async {
            let mut aside = self.begin_aside(order, REPLAY).await?;
            let patience = self.policy.start_timeout.saturating_mul(SLOWER);
            let load = async {
                match self
                    .hand_over(&aside.link, model, &files, false, patience, |_| {})
                    .await
                {
                    Ok(got) => Ok(Ok(got)),
                    Err(LoadFailure::Refused(error)) => Ok(Err(error)),
                    Err(LoadFailure::Broken(kind, why)) => {
                        Err(Death::new(kind, format!("while loading {model}: {why}")))
                    }
                }
            };
            let got = while_alive(&mut aside.process, load).await?;
            Ok::<_, Death>((aside, got))
        };
        let (aside, got) = begun.await.map_err(|death| {
            self.mourn_aside(&id, 1, &death, &Ended::default(), None);
            let what = format!("no worker came up to run the request again: {death}");
            Error::new(Reason::NoWorker, what)
        })?;
        let got = got?;
        let Aside {
            listed,
            process,
            mut link,
        } = aside;
        link.worker.clone_from(&id);
        listed.edit(|slot| {
            slot.state = WorkerState::Ready;
            slot.models.extend([(model.clone(), got)]);
        });
        let (link, pid) = (Arc::new(link), process.pid());
        let end = CancellationToken::new();
        let watched = Watched {
            link: Arc::clone(&link),
            process,
            end: end.clone(),
            is_background: true,
            _listed: listed,
            _permits: [Some(permit), None],
        };
        self.keepers.spawn(watch(Arc::clone(self), watched));
        Ok(Replayer {
            link,
            pid,
            _leash: Leash {
                _end: end.drop_guard(),
            },
        })
    }

    /// Name and device of the worker that is meant, or of the one with the model that has the least to do.
    fn replay_device(&self, model: &ModelName, beside: &str) -> Result<(String, Device), Error> {
        let table = self.table();
        if !beside.is_empty() {
            let slot = table.workers.get(beside).ok_or_else(|| {
                let name = clip(beside);
                let what = format!("there is no worker {name:?}; `hotcell ps` lists them");
                Error::new(Reason::NoWorker, what)
            })?;
            return Ok((beside.to_owned(), slot.device.clone()));
        }
        let usable = table.workers.iter().filter(|(_, slot)| slot.hopeful);
        let best = usable.min_by_key(|(id, slot)| {
            (
                !slot.models.contains_key(model),
                slot.outstanding(),
                id.as_str(),
            )
        });
        let found = best.map(|(id, slot)| (id.clone(), slot.device.clone()));
        found.ok_or_else(|| {
            let what = "there is no device to run a request on; `hotcell ps` shows why";
            Error::new(Reason::NoWorker, what)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_traced_and_who_stands_still() {
        let stands = |state: &str, tracer: &str| {
            let status = format!("Name:\tworker\nState:\t{state}\nTracerPid:\t{tracer}\nUid:\t1\n");
            traced(&status).map(|traced| traced.stands)
        };
        assert_eq!(stands("S (sleeping)", "0"), None);
        assert_eq!(stands("T (stopped)", "0"), None);
        assert_eq!(stands("S (sleeping)", "7"), Some(false));
        assert_eq!(stands("t (tracing stop)", "7"), Some(true));
        assert!(traced("").is_none());
    }
}
