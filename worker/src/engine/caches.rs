//! Asking the engine what is in the caches of its models.

use std::sync::Arc;

use hotcell_proto::{
    error::Error,
    v1::{CacheStatus, MemoryUse},
};
use tokio::sync::oneshot;

use super::{Command, Engine};
use crate::generate::ledger::Changes;

impl Engine {
    /// What is in the caches of its models, by name, and what they and sessions hold.
    ///
    /// # Errors
    /// When the engine has ended or its queue is full.
    pub async fn status(&self) -> Result<(Vec<CacheStatus>, Vec<MemoryUse>), Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Status { reply })?;
        answer.await.map_err(Self::gone)
    }

    /// Which blocks of a model's cache changed since the same watcher last asked, once any have; all that there are when
    /// it begins. None: the model is gone, or another one watches it now.
    ///
    /// # Errors
    /// When the engine has ended or its queue is full.
    pub async fn blocks(
        &self,
        model: String,
        watcher: &Arc<()>,
        begins: bool,
    ) -> Result<Option<Changes>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Blocks {
            model,
            watcher: Arc::clone(watcher),
            begins,
            reply,
        })?;
        Ok(answer.await.ok())
    }
}
