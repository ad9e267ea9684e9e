//! Watching the workers' caches for subscribers, for as long as there are any.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hotcell_gateways::smg::KvEventBatch;
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits::{MAX_CACHE_LOGS, MAX_CACHE_READERS, MAX_CACHE_READERS_OF_TENANT},
    v1::BlocksChanged,
};
use tokio::{sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::{
    blocks::{Blocks, Change, Source},
    log::{Log, Place},
    now,
};
use crate::{fleet::Link, service::Shared};

/// How long until a worker that stopped telling is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Refuses one more subscription where so many are, of all tenants and of its own.
fn check_room(readers: usize, of_tenant: usize) -> Result<(), Error> {
    let (reason, what) = match () {
        () if of_tenant >= MAX_CACHE_READERS_OF_TENANT => (
            Reason::QuotaExceeded,
            format!(
                "a tenant may have {MAX_CACHE_READERS_OF_TENANT} subscriptions to events of caches"
            ),
        ),
        () if readers >= MAX_CACHE_READERS => (
            Reason::Overloaded,
            format!(
                "{MAX_CACHE_READERS} gateways hear of this host's caches already, which is the limit"
            ),
        ),
        () => return Ok(()),
    };
    Err(Error::new(reason, what))
}

struct State {
    blocks: Blocks,
    /// By tenant: those who subscribed.
    logs: HashMap<String, Log>,
    /// Who subscribes now, of all tenants.
    readers: usize,
    /// Watches the workers, while somebody does.
    watching: Option<AbortOnDropHandle<()>>,
    /// Which watch that is: one that was ended may still do a thing or two.
    turn: u64,
}

struct Inner {
    state: Mutex<State>,
    /// Told whenever a log grew.
    grew: watch::Sender<()>,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something to the blocks, and tells each tenant what changed of its own.
    fn change(&self, act: impl FnOnce(&mut Blocks) -> Vec<Change>) {
        let mut state = self.state();
        let changes = act(&mut state.blocks);
        if changes.is_empty() {
            return;
        }
        let mut by_tenant: BTreeMap<&str, Vec<Change>> = BTreeMap::new();
        for change in &changes {
            let tenant = &*change.block().tenant;
            if state.logs.contains_key(tenant) {
                by_tenant.entry(tenant).or_default().push(change.clone());
            }
        }
        let now = now();
        for (tenant, changes) in by_tenant {
            if let Some(log) = state.logs.get_mut(tenant) {
                log.changed(now, &changes);
            }
        }
        drop(state);
        self.grew.send_replace(());
    }

    /// From now on the blocks are those of this model, if this watch is the one that goes on.
    fn serve(&self, turn: u64, model: Option<ModelName>) {
        let mut state = self.state();
        if state.turn != turn {
            return;
        }
        if state.blocks.model().is_some() {
            let now = now();
            state.logs.values_mut().for_each(|log| log.cleared(now));
        }
        state.blocks.begin(model);
        drop(state);
        self.grew.send_replace(());
    }
}

/// Watches the workers' caches for all subscribers. Clones share it.
#[derive(Clone)]
pub(super) struct Watch(Arc<Inner>);

impl Watch {
    pub(super) fn new() -> Self {
        let state = State {
            blocks: Blocks::new(),
            logs: HashMap::new(),
            readers: 0,
            watching: None,
            turn: 0,
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            grew: watch::Sender::new(()),
        }))
    }

    /// Hears of a tenant's blocks: those that there are, and what changes; or what has changed since the batch before
    /// number `from`, if that is still known.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`] or [`Reason::Overloaded`] where there are as many subscriptions as may be.
    pub(super) fn subscribe(
        &self,
        shared: &Shared,
        tenant: &str,
        from: u64,
    ) -> Result<Subscription, Error> {
        let inner = &self.0;
        let mut guard = inner.state();
        let state = &mut *guard;
        let own = state.logs.get(tenant).map_or(0, |log| log.readers);
        check_room(state.readers, own)?;
        state.readers += 1;
        if state.watching.is_none() {
            state.turn += 1;
            let following = follow_all(shared.clone(), Arc::clone(inner), state.turn);
            let watching = tokio::spawn(following);
            state.watching = Some(AbortOnDropHandle::new(watching));
        }
        if state.logs.len() >= MAX_CACHE_LOGS {
            state.logs.retain(|_, log| log.readers > 0);
        }
        let log = state.logs.entry(tenant.to_owned());
        let log = log.or_insert_with(Log::new);
        log.readers += 1;
        let place = log.place(from, now(), || state.blocks.of(tenant));
        Ok(Subscription {
            grew: inner.grew.subscribe(),
            inner: Arc::clone(inner),
            tenant: tenant.to_owned(),
            place,
        })
    }
}

/// Hears of one tenant's blocks until it is dropped.
pub(super) struct Subscription {
    inner: Arc<Inner>,
    grew: watch::Receiver<()>,
    tenant: String,
    place: Place,
}

impl Subscription {
    /// The next batch. May be dropped and called again.
    pub(super) async fn next(&mut self) -> KvEventBatch {
        loop {
            // Before looking, so that what comes in between is not missed.
            self.grew.borrow_and_update();
            let batch = {
                let state = self.inner.state();
                let all = || state.blocks.of(&self.tenant);
                let log = state.logs.get(&self.tenant);
                log.and_then(|log| log.next(&mut self.place, now(), all))
            };
            if let Some(batch) = batch {
                return batch;
            }
            if self.grew.changed().await.is_err() {
                // The sender is in what this shares.
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut guard = self.inner.state();
        let state = &mut *guard;
        state.readers = state.readers.saturating_sub(1);
        if let Some(log) = state.logs.get_mut(&self.tenant) {
            log.readers = log.readers.saturating_sub(1);
        }
        if state.readers == 0 {
            // Nothing is known of what changes from now on.
            state.turn += 1;
            state.logs.clear();
            state.blocks.begin(None);
            let watching = state.watching.take();
            // What it drops wants the lock.
            drop(guard);
            drop(watching);
        }
    }
}

/// A worker that is watched; what it had is gone when this is dropped.
struct Watched {
    inner: Arc<Inner>,
    source: Source,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.inner.change(|blocks| blocks.leave(self.source));
    }
}

/// Takes what one worker says of its cache until it dies, has the model no more or says no more.
async fn follow(link: Arc<Link>, model: ModelName, room: u64, inner: Arc<Inner>) {
    let telling = async {
        let Ok(mut told) = link.watch_blocks(&model).await else {
            return;
        };
        let Some(source) = inner.state().blocks.enter(&model, room) else {
            return;
        };
        let watched = Watched {
            inner: Arc::clone(&inner),
            source,
        };
        while let Ok(Some(said)) = told.message().await {
            take(&watched, said);
        }
    };
    tokio::select! {
        () = telling => {}
        () = link.fate.gone.cancelled() => {}
    }
}

fn take(watched: &Watched, said: BlocksChanged) {
    let changed = |blocks: &mut Blocks| blocks.take(watched.source, said);
    watched.inner.change(changed);
}

/// Watches all workers that serve the model of this door.
async fn follow_all(shared: Shared, inner: Arc<Inner>, turn: u64) {
    let mut changed = shared.fleet.changes();
    let mut model = None;
    // By name and epoch.
    let mut followed: HashMap<(String, u64), AbortOnDropHandle<()>> = HashMap::new();
    loop {
        changed.see();
        let asked = shared.fleet.resolve("").ok();
        if asked != model {
            followed.clear();
            inner.serve(turn, asked.clone());
            model = asked;
        }
        followed.retain(|_, following| !following.is_finished());
        if let Some(model) = &model {
            for (link, room) in shared.fleet.holders(model) {
                let process = (link.worker.clone(), link.epoch);
                followed.entry(process).or_insert_with(|| {
                    let inner = Arc::clone(&inner);
                    let following = follow(link, model.clone(), room, inner);
                    AbortOnDropHandle::new(tokio::spawn(following))
                });
            }
        }
        // One that ended is looked at again then.
        let _ = timeout(AGAIN, changed.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_cannot_have_all_subscriptions_nor_all_tenants_more_than_there_are() {
        let refused = |readers, own| check_room(readers, own).map_err(|e| e.reason());
        assert_eq!(refused(0, 0), Ok(()));
        assert_eq!(
            refused(MAX_CACHE_READERS - 1, MAX_CACHE_READERS_OF_TENANT - 1),
            Ok(())
        );
        assert_eq!(
            refused(MAX_CACHE_READERS_OF_TENANT, MAX_CACHE_READERS_OF_TENANT),
            Err(Reason::QuotaExceeded)
        );
        assert_eq!(refused(MAX_CACHE_READERS, 0), Err(Reason::Overloaded));
    }
}
