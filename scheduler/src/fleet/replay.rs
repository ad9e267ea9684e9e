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
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{
    Fleet, LoadFailure, Order,
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

/// A throw-away worker with one model. Dropping it ends the process.
pub struct Replayer {
    /// The conversation with it.
    pub link: Arc<Link>,
    _leash: Leash,
}

impl Fleet {
    /// Starts a worker beside one that has the model, on its device, and has it load the model's files, which are open.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`], [`Reason::NoWorker`], [`Reason::Overloaded`] when too many run already; why the model does not load.
    pub async fn replayer(
        self: &Arc<Self>,
        model: &ModelName,
        beside: &str,
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
        };
        let begun = async {
            let mut aside = self.begin_aside(order, REPLAY).await?;
            let patience = self.policy.start_timeout;
            let load = async {
                match self
                    .hand_over(&aside.link, model, &files, patience, |_| {})
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
        let link = Arc::new(link);
        let end = CancellationToken::new();
        let watched = Watched {
            link: Arc::clone(&link),
            process,
            end: end.clone(),
            _listed: listed,
            _permits: [Some(permit), None],
        };
        self.keepers.spawn(watch(Arc::clone(self), watched));
        Ok(Replayer {
            link,
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
