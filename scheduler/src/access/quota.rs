//! What each tenant has at the moment, held against what it may have at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hotcell_proto::error::{Error, Reason};
use serde::Deserialize;

/// What a tenant may have at once; what is left out has no limit of the tenant's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests that run or wait.
    pub requests: Option<u64>,
    /// Tokens of those: of their prompts, and those that they may generate.
    pub tokens: Option<u64>,
    /// Bytes that its tensor sessions may hold together.
    pub tensor_bytes: Option<u64>,
    /// Tensor sessions.
    pub sessions: Option<u64>,
    /// Its share of places on full workers, from 1 to 100: of two tenants that wait, one with twice the weight
    /// has twice the places. 1 if it is left out.
    pub weight: Option<u64>,
}

/// The largest share of a tenant.
const MAX_WEIGHT: u64 = 100;

/// What is taken at once; of the same kinds as [`Limits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Requests.
    pub requests: u64,
    /// Tokens.
    pub tokens: u64,
    /// Bytes of tensors.
    pub tensor_bytes: u64,
    /// Tensor sessions.
    pub sessions: u64,
}

impl Want {
    fn parts(self) -> [u64; KINDS] {
        [self.requests, self.tokens, self.tensor_bytes, self.sessions]
    }
}

const KINDS: usize = 4;
const WORDS: [&str; KINDS] = [
    "requests at once",
    "tokens in flight",
    "bytes of tensors",
    "tensor sessions",
];
const BYTES: usize = 2;

impl Limits {
    /// The share of places on full workers.
    pub fn weight(&self) -> u64 {
        self.weight.unwrap_or(1).clamp(1, MAX_WEIGHT)
    }

    /// Whether they make sense.
    ///
    /// # Errors
    /// Words that say what does not.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.weight {
            Some(weight) if !(1..=MAX_WEIGHT).contains(&weight) => {
                Err(format!("a weight is from 1 to {MAX_WEIGHT}, not {weight}"))
            }
            _ => Ok(()),
        }
    }

    fn parts(self) -> [Option<u64>; KINDS] {
        [self.requests, self.tokens, self.tensor_bytes, self.sessions]
    }
}

type Table = HashMap<Arc<str>, [u64; KINDS]>;

/// What all tenants have. Clones share it. It remembers those who have something, and no others.
#[derive(Clone, Debug, Default)]
pub struct Tenants(Arc<Mutex<Table>>);

impl Tenants {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes so much for a tenant, until the result is dropped.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`], naming what there is too much of. Nothing is taken then.
    pub fn take(&self, tenant: &str, limits: &Limits, want: Want) -> Result<Held, Error> {
        self.take_instead(tenant, limits, want, Want::default())
    }

    /// The same in place of something that the tenant has: held against the limits is what it has without that. Until it is
    /// given back both count for whatever else is taken, so that only the one that is replaced last is not held against it.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_instead(
        &self,
        tenant: &str,
        limits: &Limits,
        want: Want,
        before: Want,
    ) -> Result<Held, Error> {
        let parts = want.parts();
        let mut table = self.table();
        let mut has = table.get(tenant).copied().unwrap_or_default();
        for (has, before) in has.iter_mut().zip(before.parts()) {
            *has = has.saturating_sub(before);
        }
        for (kind, limit) in limits.parts().into_iter().enumerate() {
            let Some(limit) = limit else { continue };
            let then = has[kind].saturating_add(parts[kind]);
            if parts[kind] > 0 && then > limit {
                let what = WORDS[kind];
                let message = format!(
                    "tenant {tenant:?} may have {limit} {what}, has {} and asks for {}; wait until some are done",
                    has[kind], parts[kind]
                );
                return Err(Error::new(Reason::QuotaExceeded, message)
                    .with("tenant", tenant)
                    .with("quota", what)
                    .with("limit", limit));
            }
        }
        Ok(self.hold(&mut table, tenant, parts))
    }

    /// The same without limits: what a tenant has already.
    pub fn note(&self, tenant: &str, want: Want) -> Held {
        self.hold(&mut self.table(), tenant, want.parts())
    }

    /// Bytes of tensors that a tenant may still have; none if there is no limit.
    pub fn bytes_left(&self, tenant: &str, limits: &Limits) -> Option<u64> {
        let limit = limits.tensor_bytes?;
        let has = self.table().get(tenant).map_or(0, |has| has[BYTES]);
        Some(limit.saturating_sub(has))
    }

    fn hold(&self, table: &mut Table, tenant: &str, parts: [u64; KINDS]) -> Held {
        let tenant: Arc<str> = match table.get_key_value(tenant) {
            Some((known, _)) => Arc::clone(known),
            None => tenant.into(),
        };
        let has = table.entry(Arc::clone(&tenant)).or_default();
        for (has, part) in has.iter_mut().zip(parts) {
            *has = has.saturating_add(part);
        }
        Held {
            tenants: self.clone(),
            tenant,
            parts,
        }
    }

    /// Tenants that have something.
    pub fn count(&self) -> usize {
        self.table().len()
    }
}

/// What a tenant has, given back when dropped.
#[derive(Debug)]
pub struct Held {
    tenants: Tenants,
    tenant: Arc<str>,
    parts: [u64; KINDS],
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.tenants.table();
        let Some(has) = table.get_mut(&self.tenant) else {
            return;
        };
        for (has, part) in has.iter_mut().zip(self.parts) {
            *has = has.saturating_sub(part);
        }
        if *has == [0; KINDS] {
            table.remove(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Want = Want {
        requests: 1,
        tokens: 10,
        tensor_bytes: 0,
        sessions: 0,
    };

    /// A hundred bytes, and no other limit.
    const HUNDRED: Limits = Limits {
        requests: None,
        tokens: None,
        tensor_bytes: Some(100),
        sessions: None,
        weight: None,
    };

    fn bytes(tensor_bytes: u64) -> Want {
        Want {
            tensor_bytes,
            ..Want::default()
        }
    }

    #[test]
    fn one_tenants_limit_is_nobody_elses() {
        let tenants = Tenants::default();
        let limits = Limits {
            requests: Some(2),
            tokens: Some(25),
            ..Limits::default()
        };
        let take = |tenant, want| tenants.take(tenant, &limits, want);
        let first = take("a", ONE).unwrap();
        let second = take("a", ONE).unwrap();
        let error = take("a", ONE).unwrap_err();
        assert_eq!(error.reason(), Reason::QuotaExceeded);
        assert_eq!(error.get("tenant"), Some("a"));
        let other = take("b", ONE).unwrap();
        assert!(tenants.take("a", &Limits::default(), ONE).is_ok());
        drop(first);
        let many = Want { tokens: 16, ..ONE };
        let error = take("a", many).unwrap_err();
        assert_eq!(error.get("quota"), Some("tokens in flight"));
        let third = take("a", Want { tokens: 15, ..ONE }).unwrap();
        drop((second, third, other));
        assert_eq!(tenants.count(), 0);
    }

    #[test]
    fn what_is_replaced_is_not_held_against_what_takes_its_place_and_counts_until_it_is_gone() {
        let tenants = Tenants::default();
        let limits = HUNDRED;
        let first = tenants.take("a", &limits, bytes(60)).unwrap();
        let instead = |new, old| tenants.take_instead("a", &limits, bytes(new), bytes(old));
        assert!(tenants.take("a", &limits, bytes(70)).is_err());
        assert!(instead(101, 60).is_err());
        let second = instead(70, 60).unwrap();
        // The first one is still there: nothing else comes in, nor a third one.
        assert!(tenants.take("a", &limits, bytes(1)).is_err());
        assert!(instead(70, 70).is_err());
        drop(first);
        let third = instead(100, 70).unwrap();
        drop((second, third));
        assert_eq!(tenants.count(), 0);
    }

    #[test]
    fn sums_do_not_wrap_and_what_is_full_lets_through_what_takes_none_of_it() {
        let tenants = Tenants::default();
        let limits = HUNDRED;
        let _all = tenants.take("a", &limits, bytes(100)).unwrap();
        assert_eq!(tenants.bytes_left("a", &limits), Some(0));
        assert!(tenants.take("a", &limits, bytes(u64::MAX)).is_err());
        assert!(tenants.take("a", &limits, ONE).is_ok());
        let _more = tenants.note("a", bytes(u64::MAX));
        assert_eq!(tenants.bytes_left("a", &limits), Some(0));
        assert_eq!(tenants.bytes_left("b", &limits), Some(100));
        assert_eq!(tenants.bytes_left("b", &Limits::default()), None);
    }
}
