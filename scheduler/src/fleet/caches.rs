//! What workers have in their caches and hold, as they say when they are asked.

use std::{collections::HashMap, sync::Arc, time::Duration};

use hotcell_proto::{
    limits,
    v1::{CacheStatus, MemoryUse, RequestMemory, WorkerInfo},
};
use tokio::{task::JoinSet, time::timeout};

use super::Fleet;
use crate::discover::clip;

/// How long a worker may take. One that computes a long step does not answer meanwhile, and is shown without.
const PATIENCE: Duration = Duration::from_millis(200);

/// Kinds of layers of one model, at most; there are two.
const MOST_KINDS: usize = 8;

/// Kinds of memory. What else a worker speaks of would be a new line of the metrics each time.
const KINDS: [&str; 9] = [
    "weights",
    "weights_kept",
    "packed",
    "cache",
    "plans",
    "tensors",
    "tensors_kept",
    "library",
    "library_kept",
];

/// A stranger's words, within bounds.
pub(super) fn believe(caches: Vec<CacheStatus>) -> Vec<CacheStatus> {
    let bounded = caches.into_iter().take(limits::MAX_MODELS);
    bounded
        .map(|cache| CacheStatus {
            model: clip(&cache.model),
            layers: cache.layers.into_iter().take(MOST_KINDS).collect(),
            requests: (cache.requests.into_iter())
                .take(limits::MAX_WORKER_REQUESTS)
                .map(|request| RequestMemory {
                    request_id: clip(&request.request_id),
                    ..request
                })
                .collect(),
            ..cache
        })
        .collect()
}

/// A stranger's words, within bounds.
pub(super) fn believe_memory(uses: Vec<MemoryUse>) -> Vec<MemoryUse> {
    let bounded = uses.into_iter().take(KINDS.len() * limits::MAX_MODELS);
    bounded
        .filter(|part| KINDS.contains(&part.kind.as_str()))
        .map(|part| MemoryUse {
            model: clip(&part.model),
            ..part
        })
        .collect()
}

impl Fleet {
    /// All workers, those that serve with what is in their caches and what they hold.
    pub async fn workers_and_caches(&self) -> Vec<WorkerInfo> {
        let links: Vec<_> = {
            let table = self.table();
            let serving = table.workers.iter();
            serving
                .filter_map(|(id, slot)| Some((id.clone(), Arc::clone(slot.serving()?))))
                .collect()
        };
        let mut asked = JoinSet::new();
        for (id, link) in links {
            asked.spawn(async move {
                let answer = timeout(PATIENCE, link.status()).await;
                let said = answer.ok().and_then(Result::ok).unwrap_or_default();
                (id, (believe(said.caches), believe_memory(said.memory)))
            });
        }
        let mut said: HashMap<_, _> = asked.join_all().await.into_iter().collect();
        let mut workers = self.workers();
        for worker in &mut workers {
            (worker.caches, worker.memory) = said.remove(worker.id.as_str()).unwrap_or_default();
        }
        workers
    }
}
