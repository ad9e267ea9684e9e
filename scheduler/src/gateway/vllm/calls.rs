//! Requests by the ids that their clients gave them, so that they can be aborted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hotcell_proto::error::{Error, Reason};
use tokio_util::sync::CancellationToken;

/// Bytes of a request's id. Gateways put their own client's before one of theirs.
const MAX_ID: usize = 512;

/// Tenant and id. An id means something only among its tenant's own requests.
type Key = (String, String);

#[derive(Debug, Default)]
struct Table {
    running: HashMap<Key, Vec<(u64, CancellationToken)>>,
    /// Requests so far.
    count: u64,
}

/// Requests that run. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls(Arc<Mutex<Table>>);

impl Calls {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request that runs until this is dropped. Several may have one id, as one that is sent again while the gateway's
    /// first try is still ending; one without an id cannot be aborted.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] for a long id.
    pub(super) fn enter(&self, tenant: &str, id: &str) -> Result<Call, Error> {
        if id.len() > MAX_ID {
            let what = format!("request_id: {} bytes are more than {MAX_ID}", id.len());
            return Err(Error::new(Reason::LimitExceeded, what).with("field", "request_id"));
        }
        let key = (!id.is_empty()).then(|| (tenant.to_owned(), id.to_owned()));
        let aborted = CancellationToken::new();
        let mut table = self.table();
        table.count += 1;
        let number = table.count;
        if let Some(key) = &key {
            let same = table.running.entry(key.clone()).or_default();
            same.push((number, aborted.clone()));
        }
        drop(table);
        Ok(Call {
            calls: self.clone(),
            key,
            number,
            aborted,
        })
    }

    /// Ends a tenant's requests of this id.
    pub(super) fn abort(&self, tenant: &str, id: &str) {
        let key = (tenant.to_owned(), id.to_owned());
        let same = self.table().running.get(&key).cloned();
        for (_, aborted) in same.unwrap_or_default() {
            aborted.cancel();
        }
    }
}

/// A request that runs.
#[derive(Debug)]
pub(super) struct Call {
    calls: Calls,
    key: Option<Key>,
    number: u64,
    aborted: CancellationToken,
}

impl Call {
    /// Returns once it is aborted.
    pub(super) async fn aborted(&self) {
        self.aborted.cancelled().await;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Some(key) = &self.key else { return };
        let mut table = self.calls.table();
        if let Some(same) = table.running.get_mut(key) {
            same.retain(|(number, _)| *number != self.number);
            if same.is_empty() {
                table.running.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_ends_all_of_its_tenant_and_id_and_no_other() {
        let calls = Calls::default();
        let enter = |tenant, id| calls.enter(tenant, id).unwrap();
        let (a, again) = (enter("acme", "r"), enter("acme", "r"));
        let others = [enter("acme", "r2"), enter("other", "r"), enter("acme", "")];
        calls.abort("acme", "r");
        calls.abort("acme", "");
        assert!(a.aborted.is_cancelled() && again.aborted.is_cancelled());
        assert!(others.iter().all(|other| !other.aborted.is_cancelled()));
    }

    #[test]
    fn requests_that_ended_are_forgotten() {
        let calls = Calls::default();
        let first = calls.enter("acme", "r").unwrap();
        let second = calls.enter("acme", "r").unwrap();
        drop(first);
        calls.abort("acme", "r");
        assert!(second.aborted.is_cancelled());
        drop(second);
        assert!(calls.table().running.is_empty());
        let long = calls.enter("acme", &"x".repeat(MAX_ID + 1)).unwrap_err();
        assert_eq!(long.reason(), Reason::LimitExceeded);
    }
}
