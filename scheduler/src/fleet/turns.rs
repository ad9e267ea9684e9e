//! Whose turn it is to have the next place, where workers are full: that of the tenant that has the fewest for its weight, in
//! it that of who has waited longest. So nobody who has many requests shuts others out.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use hotcell_proto::ids::ModelName;
use tokio::sync::Notify;

use super::changes::Teller;

/// One that waits, and how it is told that it is the first of its tenant for its model.
#[derive(Debug)]
struct Wanted {
    model: ModelName,
    is_first: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Tenant {
    /// Places it has.
    held: usize,
    /// What it waits for, by arrival.
    waiting: BTreeMap<u64, Wanted>,
}

impl Tenant {
    /// Whether nobody waits for the same model since before this one.
    fn is_first(&self, arrival: u64) -> bool {
        let model = self.waiting.get(&arrival).map(|wanted| &wanted.model);
        let mut before = self.waiting.range(..arrival);
        !before.any(|(_, other)| Some(&other.model) == model)
    }

    /// Forgets one, and tells the next one for the same model.
    fn leave(&mut self, arrival: u64) {
        let Some(gone) = self.waiting.remove(&arrival) else {
            return;
        };
        let mut after = self.waiting.range(arrival..);
        if let Some((_, next)) = after.find(|(_, other)| other.model == gone.model) {
            next.is_first.notify_one();
        }
    }
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

/// The share of a tenant, at least 1.
type Weigh = dyn Fn(&str) -> u64 + Send + Sync;

#[derive(Default)]
struct Shared {
    inner: Mutex<Inner>,
    weigh: OnceLock<Box<Weigh>>,
}

/// Who has places and who waits for one. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Turns(Arc<Shared>);

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turns").field(&self.0.inner).finish()
    }
}

/// How much a tenant has for its weight, and since when it waits.
#[derive(Clone, Copy, Debug)]
struct Claim {
    held: u64,
    weight: u64,
    arrival: u64,
}

impl Claim {
    /// The least has the next place.
    fn order(&self, other: &Self) -> Ordering {
        // held / weight, without a fraction.
        let own = u128::from(self.held) * u128::from(other.weight);
        let others = u128::from(other.held) * u128::from(self.weight);
        own.cmp(&others).then(self.arrival.cmp(&other.arrival))
    }
}

/// Somebody waits, until it is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    turns: Turns,
    tenant: Arc<str>,
    arrival: u64,
    is_first: Arc<Notify>,
    changed: Teller,
}

impl Waiting {
    /// Whether it is the first of its tenant for its model: only such a one may come first of all.
    pub(super) fn is_first(&self) -> bool {
        let inner = self.turns.inner();
        let of = inner.tenants.get(&self.tenant);
        of.is_none_or(|of| of.is_first(self.arrival))
    }

    /// Returns once it may be. Until then it need not look whether there is a place: thousands may wait.
    pub(super) async fn told(&self) {
        self.is_first.notified().await;
    }
}

/// Somebody has a place, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    turns: Turns,
    tenant: Arc<str>,
}

impl Turns {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks this for the share of each tenant from now on; to be told once. All have the same until then.
    pub(super) fn weigh_by(&self, weigh: Box<Weigh>) {
        // The first one stays.
        let _ = self.0.weigh.set(weigh);
    }

    fn weight(&self, tenant: &str) -> u64 {
        self.0.weigh.get().map_or(1, |weigh| weigh(tenant).max(1))
    }

    /// Waits behind those of the same tenant who wait already. `changed` is told when that ends.
    pub(super) fn wait(&self, tenant: &str, model: &ModelName, changed: &Teller) -> Waiting {
        let mut inner = self.inner();
        let arrival = inner.arrivals;
        inner.arrivals += 1;
        let (tenant, of) = inner.enter(tenant);
        let is_first = Arc::new(Notify::new());
        let wanted = Wanted {
            model: model.clone(),
            is_first: Arc::clone(&is_first),
        };
        of.waiting.insert(arrival, wanted);
        Waiting {
            turns: self.clone(),
            tenant,
            arrival,
            is_first,
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

    /// How many wait for this model.
    pub(super) fn waiting_for(&self, model: &str) -> usize {
        let inner = self.inner();
        let all = inner.tenants.values().flat_map(|of| of.waiting.values());
        all.filter(|wanted| wanted.model.as_str() == model).count()
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
        let mut next: Option<Claim> = None;
        for (tenant, of) in &inner.tenants {
            let may = of.waiting.iter().find(|(_, wanted)| {
                let known = known.entry(&wanted.model);
                *known.or_insert_with_key(|model| has_place(model))
            });
            if let Some((arrival, _)) = may {
                let own = Claim {
                    held: of.held as u64,
                    weight: self.weight(tenant),
                    arrival: *arrival,
                };
                if next.is_none_or(|next| own.order(&next) == Ordering::Less) {
                    next = Some(own);
                }
            }
        }
        match (next, waiting) {
            (Some(next), Some(waiting)) => next.arrival == waiting.arrival,
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
            ..
        } = self;
        turns.inner().edit(tenant, |of| of.leave(*arrival));
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

    #[tokio::test]
    async fn who_is_behind_others_is_told_when_it_no_longer_is() {
        let (turns, changed) = (Turns::default(), Teller::default());
        let [m, other] = ["m", "other"].map(|name| ModelName::new(name).unwrap());
        let [one, two] = [1, 2].map(|_| turns.wait("a", &m, &changed));
        let elsewhere = turns.wait("a", &other, &changed);
        let three = turns.wait("a", &m, &changed);
        let another = turns.wait("b", &m, &changed);
        for (waiting, is_first) in [
            (&one, true),
            (&two, false),
            (&elsewhere, true),
            (&three, false),
            (&another, true),
        ] {
            assert_eq!(waiting.is_first(), is_first, "{waiting:?}");
        }
        let told = async |waiting: &Waiting| {
            let soon = std::time::Duration::from_millis(1);
            tokio::time::timeout(soon, waiting.told()).await.is_ok()
        };
        // One that leaves from the middle has told nobody but who is next, who is not first for that.
        drop(two);
        assert!(told(&three).await && !three.is_first());
        drop((elsewhere, another));
        assert!(!told(&three).await);
        drop(one);
        assert!(told(&three).await && three.is_first());
    }

    #[test]
    fn a_tenant_has_places_by_its_weight() {
        let (turns, changed) = (Turns::default(), Teller::default());
        turns.weigh_by(Box::new(|tenant| if tenant == "heavy" { 3 } else { 1 }));
        let model = ModelName::new("m").unwrap();
        let mut waiting: Vec<_> = ["light", "heavy"]
            .iter()
            .flat_map(|tenant| (0..30).map(move |_| *tenant))
            .map(|tenant| (tenant, turns.wait(tenant, &model, &changed)))
            .collect();
        let mut held = Vec::new();
        for _ in 0..20 {
            let next = waiting
                .iter()
                .position(|(_, w)| turns.comes_first(Some(w), |_| true))
                .unwrap();
            let (tenant, _) = waiting.remove(next);
            held.push((tenant, turns.hold(tenant)));
        }
        let heavy = held.iter().filter(|(tenant, _)| *tenant == "heavy");
        assert_eq!(heavy.count(), 15);
    }
}
