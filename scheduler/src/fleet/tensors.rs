//! Which worker gets a tensor session.

use std::sync::Arc;

use hotcell_proto::error::{Error, Reason};

use super::{Fleet, Link, slot::Slot};
use crate::discover::clip;

impl Fleet {
    /// A ready worker for a tensor session: the named one, one on the named device, else the one with the least to do; one
    /// that is drained only by its name.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] naming what is missing.
    pub fn for_tensors(
        &self,
        worker: Option<&str>,
        device: Option<&str>,
    ) -> Result<Arc<Link>, Error> {
        self.least_busy(worker, device, Slot::outstanding)
    }

    /// A ready worker for a call of a saved graph: the one with the least to do, what `busy` says of it included.
    ///
    /// # Errors
    /// [`Reason::NoWorker`].
    pub fn for_graphs(&self, busy: impl Fn(&Link) -> u64) -> Result<Arc<Link>, Error> {
        let load = |slot: &Slot| {
            let calls = slot.serving().map_or(0, |link| busy(link));
            slot.outstanding().saturating_add(calls)
        };
        self.least_busy(None, None, load)
    }

    fn least_busy(
        &self,
        worker: Option<&str>,
        device: Option<&str>,
        load: impl Fn(&Slot) -> u64,
    ) -> Result<Arc<Link>, Error> {
        let table = self.table();
        let fits = |(id, slot): &(&String, &Slot)| {
            // An untrusted model has its worker for itself.
            slot.guest.is_none()
                && worker.is_none_or(|w| w == id.as_str())
                && device.is_none_or(|d| d == slot.device.id)
        };
        let known: Vec<_> = table.workers.iter().filter(fits).collect();
        let ready = known.iter().filter_map(|(_, slot)| {
            let link = slot.serving()?;
            let open = worker.is_some() || !slot.is_drained();
            open.then(|| (load(slot), link))
        });
        if let Some((_, link)) = ready.min_by_key(|(load, link)| (*load, link.worker.clone())) {
            return Ok(Arc::clone(link));
        }
        let which = match (worker, device) {
            (Some(w), _) => format!("worker {}", clip(w)),
            (None, Some(d)) => format!("a worker on device {}", clip(d)),
            (None, None) => "a worker".to_owned(),
        };
        let what = match known.is_empty() {
            true => format!("there is no such thing as {which}; `hotcell ps` lists the workers"),
            false => format!("{which} is not ready; `hotcell ps` shows why"),
        };
        Err(Error::new(Reason::NoWorker, what))
    }
}
