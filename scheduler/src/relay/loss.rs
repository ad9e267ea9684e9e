//! Workers lost under a stream: where it goes on, and what its client is told of it.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{EventKind, Survived},
};
use tokio::time::Instant;

use super::{Had, Relayed};
use crate::{
    death::DeathKind,
    events::About,
    fleet::{Link, Lost, Placed},
    journal::Journal,
    onward::{self, Onward},
};

/// A worker that was lost under a stream, of which the client has not been told yet.
pub(super) struct Loss {
    pub link: Arc<Link>,
    pub at: Instant,
    pub generated: u64,
}

impl Loss {
    /// It goes on at `on`.
    fn tell(self, on: &str) -> Survived {
        let kind = self.link.fate.kind().map_or("", DeathKind::name);
        Survived {
            worker: self.link.worker.clone(),
            epoch: self.link.epoch,
            exit_kind: kind.to_owned(),
            generated: self.generated,
            pause_ms: self.at.elapsed().as_secs_f64() * 1e3,
            continued_on: on.to_owned(),
        }
    }
}

impl Relayed<'_> {
    /// A place for the rest of a stream whose worker was lost.
    pub(super) async fn next_place(
        &mut self,
        journal: &mut Journal,
        had: &Had,
    ) -> Result<Placed, Error> {
        journal.count_death();
        let Had { link, home, alone } = had;
        let (worker, epoch) = (link.worker.as_str(), link.epoch);
        let lost = Lost {
            request: journal.request_id(),
            link,
            home,
            alone: *alone,
            accepted: !journal.is_greeting(),
        };
        let next = self.fleet.witness(&mut self.record, &lost);
        self.out.suffered(journal.deaths(), self.record.blamed());
        let (wish, alone) =
            match onward::after_death(journal, worker, link.fate.death(), home, next) {
                Onward::Elsewhere(wish) => (wish, false),
                Onward::Alone(wish) => (wish, true),
                Onward::Nowhere(error) => {
                    let node = self.fleet.crashes.last_node(worker, epoch);
                    return Err(match node {
                        Some(node) => error.with("node", node),
                        None => error,
                    });
                }
            };
        let placed = self.place(journal, wish, alone);
        let placed = placed.await.map_err(|error| match error.reason() {
            Reason::NoWorker => onward::lost(worker, format!(
                "worker {worker} died after {} tokens, and no worker of its numerics class came up to go on",
                journal.generated()
            )),
            _ => error,
        })?;
        if let Some(class) = journal.class() {
            let caution = if class.id != placed.class.id {
                "; in another numerics class, so that the rest may differ"
            } else if !class.reproducible {
                "; its numerics class is not reproducible, so that the rest may differ"
            } else {
                ""
            };
            let how = if placed.is_alone() { " alone" } else { "" };
            let message = format!(
                "request {} goes on{how} after {} tokens; {worker} (epoch {epoch}) died{caution}",
                journal.request_id(),
                journal.generated(),
            );
            tracing::info!(worker = placed.link.worker, "{message}");
            let about = About {
                worker: &placed.link.worker,
                epoch: placed.link.epoch,
                model: self.model.as_str(),
            };
            self.fleet
                .events
                .tell(EventKind::StreamContinued, about, message);
        }
        Ok(placed)
    }

    /// The deaths to tell the client of.
    pub(super) fn tell_losses(&mut self, on: &Link) -> Vec<Survived> {
        self.tell_losses_at(&on.worker)
    }

    /// The same of a stream that goes on somewhere else than at a worker of this host.
    pub(super) fn tell_losses_at(&mut self, on: &str) -> Vec<Survived> {
        for loss in &self.losses {
            self.meter.continued(loss.at.elapsed());
        }
        self.losses.drain(..).map(|loss| loss.tell(on)).collect()
    }
}
