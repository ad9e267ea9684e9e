//! Fair shares: who is next, by what each was given so far.
//!
//! Each tenant has an account of the work done for it, and within it one for each priority, whose work counts half as
//! much with each step up. The next to be served is the tenant that got the least, and in it the priority that got the
//! least by its own count. Who comes back after a while begins where the neediest one is: what was not used is not
//! saved up (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). So nobody
//! who waits is passed for good, and every priority moves.

use std::{collections::BTreeMap, sync::Arc};

use hotcell_proto::limits::MAX_PRIORITY;

/// Priorities there are.
const LEVELS: usize = MAX_PRIORITY as usize + 1;
/// What a unit of work counts at the lowest priority; at the highest it counts 1.
const UNIT: u64 = 1 << MAX_PRIORITY;
/// Tenants without requests whose accounts are kept.
const KEPT: usize = 1024;

/// Whose work it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// The tenant.
    pub tenant: Arc<str>,
    /// The priority, [`MAX_PRIORITY`] at most.
    pub priority: u32,
}

impl Class {
    fn level(&self) -> usize {
        (self.priority as usize).min(LEVELS - 1)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    given: u64,
    members: usize,
}

impl Account {
    /// One more member. `least` is what the neediest of the others with members was given.
    fn enter(&mut self, least: Option<u64>) {
        if self.members == 0 {
            self.given = self.given.max(least.unwrap_or(0));
        }
        self.members += 1;
    }
}

#[derive(Debug, Default)]
struct Tenant {
    account: Account,
    levels: [Account; LEVELS],
}

/// The accounts.
#[derive(Debug, Default)]
pub struct Shares {
    tenants: BTreeMap<Arc<str>, Tenant>,
}

fn least<'a>(accounts: impl Iterator<Item = &'a Account>) -> Option<u64> {
    accounts.filter(|a| a.members > 0).map(|a| a.given).min()
}

impl Shares {
    /// Somebody of this class wants something from now on.
    pub fn enter(&mut self, class: &Class) {
        let neediest = least(self.tenants.values().map(|t| &t.account));
        if !self.tenants.contains_key(&class.tenant) {
            self.prune(neediest);
        }
        let tenant = self.tenants.entry(Arc::clone(&class.tenant)).or_default();
        tenant.account.enter(neediest);
        let neediest = least(tenant.levels.iter());
        tenant.levels[class.level()].enter(neediest);
    }

    /// Somebody of this class, who had entered, wants nothing more.
    pub fn leave(&mut self, class: &Class) {
        if let Some(tenant) = self.tenants.get_mut(&class.tenant) {
            let level = &mut tenant.levels[class.level()];
            level.members = level.members.saturating_sub(1);
            tenant.account.members = tenant.account.members.saturating_sub(1);
        }
    }

    /// Forgets tenants without members: those who would begin anew where they are, and the least of too many.
    fn prune(&mut self, neediest: Option<u64>) {
        let idle = |t: &Tenant| t.account.members == 0;
        self.tenants
            .retain(|_, t| !idle(t) || neediest.is_some_and(|n| t.account.given > n));
        while self.tenants.values().filter(|t| idle(t)).count() >= KEPT {
            let of_idle = self.tenants.iter().filter(|(_, t)| idle(t));
            let Some((name, _)) = of_idle.min_by_key(|(_, t)| t.account.given) else {
                return;
            };
            let name = Arc::clone(name);
            self.tenants.remove(&name);
        }
    }

    /// Work was done for this class.
    pub fn charge(&mut self, class: &Class, work: usize) {
        if let Some(tenant) = self.tenants.get_mut(&class.tenant) {
            let work = work as u64;
            let of = |unit: u64| work.saturating_mul(unit);
            tenant.account.given = tenant.account.given.saturating_add(of(1));
            let level = class.level();
            let given = &mut tenant.levels[level].given;
            *given = given.saturating_add(of(UNIT >> level));
        }
    }

    /// The least comes first.
    fn key<'a>(&self, class: &'a Class) -> (u64, &'a str, u64, std::cmp::Reverse<u32>) {
        let tenant = self.tenants.get(&class.tenant);
        let account = tenant.map_or(0, |t| t.account.given);
        let level = tenant.map_or(0, |t| t.levels[class.level()].given);
        (
            account,
            &class.tenant,
            level,
            std::cmp::Reverse(class.priority),
        )
    }

    /// The class that is next, of those that want something.
    pub fn next<'a>(&self, classes: impl Iterator<Item = &'a Class>) -> Option<&'a Class> {
        classes.min_by_key(|class| self.key(class))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn class(tenant: &str, priority: u32) -> Class {
        Class {
            tenant: tenant.into(),
            priority,
        }
    }

    /// Serves members that always want more; returns what each got.
    fn serve(shares: &mut Shares, members: &[Class], rounds: usize) -> Vec<usize> {
        let mut got = vec![0; members.len()];
        for _ in 0..rounds {
            let next = shares.next(members.iter()).unwrap().clone();
            shares.charge(&next, 3);
            // Members of one class are the caller's to order; here the first has it all.
            let at = members.iter().position(|m| *m == next).unwrap();
            got[at] += 3;
        }
        got
    }

    #[test]
    fn tenants_share_alike_however_many_requests_they_have() {
        let mut shares = Shares::default();
        let members = [class("a", 0), class("b", 7)];
        for _ in 0..50 {
            shares.enter(&members[0]);
        }
        shares.enter(&members[1]);
        assert_eq!(serve(&mut shares, &members, 100), [150, 150]);
    }

    #[test]
    fn each_priority_has_twice_the_share_of_the_one_below() {
        let mut shares = Shares::default();
        let members = [class("a", 0), class("a", 1), class("a", 3)];
        members.iter().for_each(|m| shares.enter(m));
        let got = serve(&mut shares, &members, 1100);
        for (got, expected) in got.iter().zip([300i64, 600, 2400]) {
            assert!((*got as i64 - expected).abs() <= 3, "{got} / {expected}");
        }
    }

    #[test]
    fn who_was_away_saves_nothing_up_and_owes_what_it_took() {
        let mut shares = Shares::default();
        let members = [class("a", 0), class("b", 0)];
        shares.enter(&members[0]);
        shares.charge(&members[0], 1000);
        // New ones begin where the neediest is.
        shares.enter(&members[1]);
        assert_eq!(serve(&mut shares, &members, 100), [150, 150]);
        // One that leaves and comes again is not better off.
        shares.leave(&members[1]);
        shares.enter(&members[1]);
        assert_eq!(serve(&mut shares, &members, 100), [150, 150]);
        shares.charge(&members[1], 300);
        shares.leave(&members[1]);
        shares.enter(&class("c", 0));
        shares.enter(&members[1]);
        assert_eq!(serve(&mut shares, &members, 100), [300, 0]);
    }

    #[test]
    fn accounts_without_members_are_bounded() {
        let mut shares = Shares::default();
        shares.enter(&class("always", 0));
        for i in 0..3 * KEPT {
            let class = class(&format!("t{i}"), 0);
            shares.enter(&class);
            shares.charge(&class, 10);
            shares.leave(&class);
        }
        assert!(shares.tenants.len() <= KEPT + 1, "{}", shares.tenants.len());
    }

    proptest! {
        /// Whoever keeps wanting gets its share: between two servings of anyone, the work of all others is bounded.
        #[test]
        fn nobody_is_passed_for_good(
            steps in proptest::collection::vec((0u8..4, 0u32..=MAX_PRIORITY, 1usize..50, any::<bool>()), 200..400),
        ) {
            let mut shares = Shares::default();
            let patient = class("p", 0);
            let beside = class("p", MAX_PRIORITY);
            shares.enter(&patient);
            shares.enter(&beside);
            let mut others: Vec<Class> = Vec::new();
            let mut since = 0;
            for (tenant, priority, work, comes) in steps {
                if comes && others.len() < 8 {
                    let class = class(&format!("o{tenant}"), priority);
                    shares.enter(&class);
                    others.push(class);
                } else if let Some(class) = others.pop() {
                    shares.leave(&class);
                }
                let all = others.iter().chain([&patient, &beside]);
                let next = shares.next(all).unwrap().clone();
                shares.charge(&next, work);
                since = if next == patient { 0 } else { since + work };
                // Its tenant is one of five, and within it the other has 128 times its share; each serving is 49 at most.
                prop_assert!(since <= 5 * (129 * 50), "{since}");
            }
        }
    }
}
