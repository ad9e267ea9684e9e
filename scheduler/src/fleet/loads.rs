//! Who waits for whom while models are loaded and unloaded: what concerns one model is done one after the other, workers are
//! given one model at a time, and how long it takes to look into a model is no other model's concern.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex as Short, PoisonError},
};

use hotcell_proto::{ids::ModelName, limits};
use tokio::sync::{
    Mutex, MutexGuard, OwnedMutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, Semaphore,
    SemaphorePermit,
};

/// Models that are opened and looked into at once: some are known by their bytes, and need not wait for a place to be looked
/// into. A bound, for a model that nobody trusts is copied when it is opened.
const MAX_PREPARED: usize = 2 * limits::MAX_INSPECTIONS;

/// Loads and unloads that are under way.
#[derive(Debug)]
pub(super) struct Loads {
    all: RwLock<()>,
    names: Short<HashMap<ModelName, Arc<Mutex<()>>>>,
    preparing: Semaphore,
    spreading: Mutex<()>,
    replacing: Mutex<()>,
}

impl Default for Loads {
    fn default() -> Self {
        Self {
            all: RwLock::default(),
            names: Short::default(),
            preparing: Semaphore::new(MAX_PREPARED),
            spreading: Mutex::default(),
            replacing: Mutex::default(),
        }
    }
}

/// Nobody else loads or unloads this model until it is dropped.
#[derive(Debug)]
pub(super) struct One<'a> {
    _name: OwnedMutexGuard<()>,
    _all: RwLockReadGuard<'a, ()>,
}

impl Loads {
    /// Waits for those that load or unload this model.
    pub(super) async fn one(&self, name: &ModelName) -> One<'_> {
        let all = self.all.read().await;
        let lock = {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that nobody holds or waits for.
            names.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(names.entry(name.clone()).or_default())
        };
        One {
            _name: lock.lock_owned().await,
            _all: all,
        }
    }

    /// A place to open a model and look into it. `None` never happens: nobody closes the semaphore.
    pub(super) async fn prepare(&self) -> Option<SemaphorePermit<'_>> {
        self.preparing.acquire().await.ok()
    }

    /// Waits for those that give other models to workers, or take them away.
    pub(super) async fn spread(&self) -> MutexGuard<'_, ()> {
        self.spreading.lock().await
    }

    /// Waits for those that put a model into the place of another one.
    pub(super) async fn replace(&self) -> MutexGuard<'_, ()> {
        self.replacing.lock().await
    }

    /// Waits until no model is loaded or unloaded, and lets none begin while the result is held.
    pub(super) async fn none(&self) -> RwLockWriteGuard<'_, ()> {
        self.all.write().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_model_waits_for_itself_only_and_who_hands_over_for_all() {
        let loads = Loads::default();
        let [a, b] = ["a", "b"].map(|name| ModelName::new(name).unwrap());
        let soon = Duration::from_secs(1);
        let first = loads.one(&a).await;
        assert!(timeout(soon, loads.one(&a)).await.is_err());
        let second = timeout(soon, loads.one(&b)).await.unwrap();
        assert!(timeout(soon, loads.none()).await.is_err());
        drop((first, second));
        let none = timeout(soon, loads.none()).await.unwrap();
        assert!(timeout(soon, loads.one(&b)).await.is_err());
        drop(none);
        drop(timeout(soon, loads.one(&a)).await.unwrap());
        drop(timeout(soon, loads.one(&b)).await.unwrap());
        assert!(loads.names.lock().unwrap().len() <= 1);
    }
}
