//! Whose turn it is to have the next place, where workers are full: that of the tenant that has the fewest, in it that of
//! who has waited longest. So nobody who has many requests shuts others out.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hotcell_proto::ids::ModelName;

use super::changes::Teller;

#[derive(Debug, Default)]
struct Tenant {
    /// Places it has.
    held: usize,
    /// What it waits for, by arrival.
    waiting: BTreeMap<u64, ModelName>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Those who have or want something.
    tenants: BTreeMap<Arc<str>, Tenant>,
    arrivals: u64,
}

impl Inner {
    fn edit(&mut self, tenant: &Arc<str>, change: impl FnOnce(&mut Tenant)) {
        if let Some(of) = self.tenants.get_mut(tenant) {
            change(of);
            if of.held == 0 && of.waiting.is_empty() {
                self.tenants.remove(tenant);
            }
        }
    }

    fn enter(&mut self, tenant: &str) -> (Arc<str>, &mut Tenant) {
        let name = match self.tenants.get_key_value(tenant) {
            Some((known, _)) => Arc::clone(known),
            None => tenant.into(),
        };
        let of = self.tenants.entry(Arc::clone(&name)).or_default();
        (name, of)
    }
}

/// Who has places and who waits for one. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns(Arc<Mutex<Inner>>);

/// Somebody waits, until it is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    turns: Turns,
    tenant: Arc<str>,
    arrival: u64,
    changed: Teller,
}

/// Somebody has a place, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    turns: Turns,
    tenant: Arc<str>,
}

impl Turns {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits behind those of the same tenant who wait already. `changed` is told when that ends.
    pub(super) fn wait(&self, tenant: &str, model: &ModelName, changed: &Teller) -> Waiting {
        let mut inner = self.inner();
        let arrival = inner.arrivals;
        inner.arrivals += 1;
        let (tenant, of) = inner.enter(tenant);
        of.waiting.insert(arrival, model.clone());
        Waiting {
            turns: self.clone(),
            tenant,
            arrival,
            changed: changed.clone(),
        }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.inner()
            .tenants
            .values()
            .map(|of| of.waiting.len())
            .sum()
    }

    /// Has a place.
    pub(super) fn hold(&self, tenant: &str) -> Held {
        let mut inner = self.inner();
        let (tenant, of) = inner.enter(tenant);
        of.held += 1;
        Held {
            turns: self.clone(),
            tenant,
        }
    }

    /// Whether the next place is for this one, who does not wait yet if there is none. Those who wait for a model for which
    /// there is no place are passed over.
    pub(super) fn comes_first(
        &self,
        waiting: Option<&Waiting>,
        has_place: impl Fn(&ModelName) -> bool,
    ) -> bool {
        let inner = self.inner();
        let mut known: BTreeMap<&ModelName, bool> = BTreeMap::new();
        let mut next: Option<(usize, u64)> = None;
        for of in inner.tenants.values() {
            let may = of.waiting.iter().find(|(_, model)| {
                let known = known.entry(*model);
                *known.or_insert_with_key(|model| has_place(model))
            });
            if let Some((arrival, _)) = may {
                let own = (of.held, *arrival);
                next = Some(next.map_or(own, |next| next.min(own)));
            }
        }
        match (next, waiting) {
            (Some((_, arrival)), Some(waiting)) => arrival == waiting.arrival,
            (Some(_), None) => false,
            (None, _) => true,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Self {
            turns,
            tenant,
            arrival,
            changed,
        } = self;
        turns.inner().edit(tenant, |of| {
            of.waiting.remove(arrival);
        });
        // Whoever gave way to this one looks again.
        changed.tell();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut inner = self.turns.inner();
        inner.edit(&self.tenant, |of| of.held = of.held.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tenant_with_the_fewest_places_is_next_and_in_it_who_came_first() {
        let (turns, changed) = (Turns::default(), Teller::default());
        let model = |name: &str| ModelName::new(name).unwrap();
        let (m, other) = (model("m"), model("other"));
        let wait = |tenant: &str| turns.wait(tenant, &m, &changed);
        let first = |waiting: &Waiting| turns.comes_first(Some(waiting), |_| true);
        assert!(turns.comes_first(None, |_| true));
        let held: Vec<Held> = ["a", "a", "b"].map(|tenant| turns.hold(tenant)).into();
        let (a1, a2) = (wait("a"), wait("a"));
        assert!(first(&a1) && !first(&a2));
        assert!(!turns.comes_first(None, |_| true), "others wait already");
        let b = wait("b");
        assert!(first(&b) && !first(&a1));
        let c = turns.wait("c", &other, &changed);
        assert!(first(&c) && !first(&b));
        // Nobody is kept waiting for one that cannot have the place.
        assert!(turns.comes_first(Some(&b), |model| *model == m));
        drop(c);
        // With as many places as the other, whoever came first.
        let more = turns.hold("b");
        assert!(first(&a1) && !first(&b));
        drop((a1, more));
        assert!(first(&b));
        drop((held, a2, b));
        assert!(turns.inner().tenants.is_empty());
    }
}
