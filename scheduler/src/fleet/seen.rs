//! What gateways ask about models and workers.

use std::sync::Arc;

use hotcell_ipc::blackbox::Pulse;
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
};

use super::Fleet;
use crate::vault::OpenModel;

impl Fleet {
    /// A model's open files.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] if it is not known, or not open.
    pub fn files(&self, model: &ModelName) -> Result<Arc<OpenModel>, Error> {
        let table = self.table();
        let known = table.models.get(model);
        let known = known.ok_or_else(|| table.unknown(model))?;
        known.files.clone().ok_or_else(|| {
            let what = format!("model {model} is not loaded; load it with `hotcell load {model}`");
            Error::new(Reason::ModelNotFound, what).with("model", model)
        })
    }

    /// The workers that serve, by name and epoch, and what the black box of each says, if it has one.
    pub fn pulses(&self) -> Vec<((String, u64), Option<Pulse>)> {
        let table = self.table();
        let links = table.workers.values().filter_map(|slot| slot.serving());
        let pulse = |link: &Arc<super::Link>| ((link.worker.clone(), link.epoch), link.pulse());
        links.map(pulse).collect()
    }
}
