//! Which blocks workers keep of prompts, for who asks them to tell.

use std::sync::Arc;

use hotcell_proto::{
    ids::ModelName,
    v1::{BlocksChanged, WatchBlocksRequest},
};
use tonic::{Status, Streaming};

use super::{Fleet, Link};

impl Link {
    /// Has the worker tell which whole blocks of prompts a model's cache keeps, and what changes. A stranger's words.
    ///
    /// # Errors
    /// Its own, or those about the broken connection.
    pub async fn watch_blocks(
        &self,
        model: &ModelName,
    ) -> Result<Streaming<BlocksChanged>, Status> {
        let request = WatchBlocksRequest {
            model: model.as_str().to_owned(),
        };
        let answer = self.control().watch_blocks(request).await?;
        Ok(answer.into_inner())
    }
}

impl Fleet {
    /// The workers that serve a model, and for how many tokens each says that its cache has room.
    pub fn holders(&self, model: &ModelName) -> Vec<(Arc<Link>, u64)> {
        let table = self.table();
        let holders = table.workers.values().filter_map(|slot| {
            let loaded = slot.models.get(model)?;
            Some((Arc::clone(slot.serving()?), loaded.cache_tokens))
        });
        holders.collect()
    }
}
