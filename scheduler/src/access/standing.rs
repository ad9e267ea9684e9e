//! How addresses behave. A connection, and a call that is refused, cost whoever sent them next to nothing; so each address
//! may have so many of them in a second, and one that goes on beyond is not let in for a while: that costs less than to
//! read what it says.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::seat::Origin;

/// Connections of one address in a second, in the long run.
const CONNECTIONS_PER_SECOND: f64 = 200.0;
/// What an address gets of its credit back in a second.
const CREDIT_PER_SECOND: f64 = 64.0;
/// The credit of an address that did nothing wrong.
const MOST_CREDIT: f64 = 1024.0;
/// The least credit: after this time at the latest an address is let in again.
const LEAST_CREDIT: f64 = -8.0 * CREDIT_PER_SECOND;
/// What a refused call costs.
const REFUSED: f64 = 1.0;
/// What it costs to be told that there is no room now, on a connection over which nothing else was answered yet. What an
/// address gets back in the same time: who opens a connection for each call, as often as it may, is told so each time.
const NOT_NOW: f64 = CREDIT_PER_SECOND / CONNECTIONS_PER_SECOND;
/// What a connection costs that ended without one answer.
const FRUITLESS: f64 = 16.0;
/// Refusals in a row that a connection may have over which a call was answered before.
const MOST_REFUSED: u32 = 512;
/// Addresses that are known apart. Those for whom there is no room have one account together.
const MOST_ADDRESSES: usize = 4096;
/// Between two looks whose account may be forgotten, and between two lines in the log.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Account {
    at: Instant,
    connections: f64,
    credit: f64,
}

impl Account {
    fn new(at: Instant, most: f64) -> Self {
        Self {
            at,
            connections: most,
            credit: MOST_CREDIT,
        }
    }

    /// What it is now.
    fn refill(&mut self, now: Instant, most: f64) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.connections = most.min(self.connections + passed * CONNECTIONS_PER_SECOND);
        self.credit = MOST_CREDIT.min(self.credit + passed * CREDIT_PER_SECOND);
    }

    fn is_full(&self, most: f64) -> bool {
        self.connections >= most && self.credit >= MOST_CREDIT
    }
}

#[derive(Debug)]
struct Table {
    accounts: HashMap<Origin, Account>,
    rest: Account,
    /// Connections of one address at once, after a time without any.
    most: f64,
    swept: Instant,
    told: Option<Instant>,
}

impl Table {
    fn account(&mut self, of: Origin, now: Instant) -> &mut Account {
        let most = self.most;
        if !self.accounts.contains_key(&of)
            && self.accounts.len() >= MOST_ADDRESSES
            && now.saturating_duration_since(self.swept) >= PAUSE
        {
            self.swept = now;
            self.accounts.retain(|_, account| {
                account.refill(now, most);
                !account.is_full(most)
            });
        }
        let has_room = self.accounts.len() < MOST_ADDRESSES;
        let account = match self.accounts.contains_key(&of) || has_room {
            true => self.accounts.entry(of).or_insert(Account::new(now, most)),
            false => &mut self.rest,
        };
        account.refill(now, most);
        account
    }

    /// Says that somebody is not let in, but not each time.
    fn tell(&mut self, who: Origin, why: &str, now: Instant) {
        let told = self.told.map(|told| now.saturating_duration_since(told));
        if told.is_none_or(|ago| ago >= PAUSE) {
            self.told = Some(now);
            tracing::warn!("connections of {who} are dropped: {why}");
        }
    }
}

/// How all addresses behave that come in at one door.
#[derive(Debug)]
pub(super) struct Standing(Mutex<Table>);

impl Standing {
    /// Of a door with so many places: an address that has done nothing for a while may come with as many at once.
    pub(super) fn new(now: Instant, places: usize) -> Self {
        let most = places as f64;
        Self(Mutex::new(Table {
            accounts: HashMap::new(),
            rest: Account::new(now, most),
            most,
            swept: now,
            told: None,
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a connection may come in. Those without an address always may.
    pub(super) fn lets_in(&self, from: Origin, now: Instant) -> bool {
        if !from.has_standing() {
            return true;
        }
        let mut table = self.table();
        let account = table.account(from, now);
        if account.credit <= 0.0 {
            table.tell(from, "too many of its calls came to nothing", now);
            return false;
        }
        if account.connections < 1.0 {
            table.tell(from, "too many of them in a second", now);
            return false;
        }
        account.connections -= 1.0;
        true
    }

    /// A call was refused, which was the `refused`th in a row on its connection. Whether that connection may stay; one
    /// over which no call was answered ever may have the fewer refusals the less credit there is.
    pub(super) fn bears(&self, from: Origin, refused: u32, answered: bool, now: Instant) -> bool {
        if !from.has_standing() {
            return true;
        }
        let credit = self.charge(from, REFUSED, now);
        match answered {
            true => refused < MOST_REFUSED,
            false => f64::from(refused) * FRUITLESS < credit,
        }
    }

    /// A call could not be taken at the moment, on a connection over which no other was answered and so many in a row came to
    /// nothing. Whether that connection may stay.
    pub(super) fn bears_with(&self, from: Origin, refused: u32, now: Instant) -> bool {
        !from.has_standing() || f64::from(refused) * FRUITLESS < self.charge(from, NOT_NOW, now)
    }

    /// A connection ended over which no call was ever answered, nor told to come later.
    pub(super) fn fruitless(&self, from: Origin, now: Instant) {
        if from.has_standing() {
            self.charge(from, FRUITLESS, now);
        }
    }

    /// A call was answered, perhaps the first one of its connection. That gives back what a refusal, and the connection, cost:
    /// whoever passes on the calls of many clients is not shut out for those of a few, nor for how it connects.
    pub(super) fn fruitful(&self, from: Origin, first: bool, now: Instant) {
        if !from.has_standing() {
            return;
        }
        let mut table = self.table();
        let most = table.most;
        let account = table.account(from, now);
        account.credit = MOST_CREDIT.min(account.credit + REFUSED);
        if first {
            account.connections = most.min(account.connections + 1.0);
        }
    }

    fn charge(&self, from: Origin, cost: f64, now: Instant) -> f64 {
        let mut table = self.table();
        let account = table.account(from, now);
        account.credit = LEAST_CREDIT.max(account.credit - cost);
        account.credit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: usize = 700;

    fn from(last: u8) -> Origin {
        Origin::address([10, 0, 0, last].into())
    }

    #[test]
    fn an_address_has_so_many_connections_in_a_second_and_others_have_theirs() {
        let start = Instant::now();
        let standing = Standing::new(start, PLACES);
        let come = |last, now| {
            (0..1000)
                .filter(|_| standing.lets_in(from(last), now))
                .count()
        };
        assert_eq!(come(1, start), PLACES);
        assert_eq!(come(2, start), PLACES);
        let later = start + Duration::from_secs(1);
        assert_eq!(come(1, later), CONNECTIONS_PER_SECOND as usize);
        // A clock that stands still, or a thread that is late, gives nothing.
        assert_eq!(come(1, start), 0);
        assert!((0..5000).all(|_| standing.lets_in(Origin::default(), start)));
    }

    #[test]
    fn an_address_whose_connections_come_to_nothing_is_shut_out_for_a_while() {
        let start = Instant::now();
        let standing = Standing::new(start, PLACES);
        let most = (MOST_CREDIT / FRUITLESS) as u32;
        for _ in 1..most {
            standing.fruitless(from(1), start);
            assert!(standing.lets_in(from(1), start));
        }
        standing.fruitless(from(1), start);
        assert!(!standing.lets_in(from(1), start));
        assert!(standing.lets_in(from(2), start));
        for _ in 0..1_000_000 {
            standing.fruitless(from(1), start);
            standing.fruitless(Origin::default(), start);
        }
        assert!(!standing.lets_in(from(1), start + Duration::from_secs(7)));
        assert!(standing.lets_in(from(1), start + Duration::from_secs(9)));
    }

    #[test]
    fn a_connection_that_was_of_use_bears_more_refusals_than_one_that_never_was() {
        let now = Instant::now();
        let standing = Standing::new(now, PLACES);
        let strangers = (1..).find(|&n| !standing.bears(from(1), n, false, now));
        assert_eq!(strangers, Some(61));
        // With less credit there is less patience.
        let strangers = (1..).find(|&n| !standing.bears(from(1), n, false, now));
        assert!(strangers.is_some_and(|n| n < 61));
        let known = (1..).find(|&n| !standing.bears(from(2), n, true, now));
        assert_eq!(known, Some(MOST_REFUSED));
        assert!(standing.bears(Origin::default(), u32::MAX, false, now));
    }

    #[test]
    fn who_passes_on_the_calls_of_many_is_not_shut_out_for_those_of_a_few() {
        let now = Instant::now();
        let standing = Standing::new(now, PLACES);
        for n in 1..100_000 {
            assert!(standing.lets_in(from(1), now), "after {n}");
            standing.fruitful(from(1), true, now);
            standing.bears(from(1), 1, true, now);
        }
    }

    #[test]
    fn who_opens_a_connection_for_each_call_is_told_to_come_later_each_time() {
        let start = Instant::now();
        let standing = Standing::new(start, PLACES);
        for n in 0..100_000_u32 {
            let now = start + Duration::from_secs(n.into()) / CONNECTIONS_PER_SECOND as u32;
            assert!(standing.lets_in(from(1), now), "after {n}");
            assert!(standing.bears_with(from(1), 1, now), "after {n}");
        }
        // One that asks again and again by the same connection does not.
        let asks = (1..).find(|&n| !standing.bears_with(from(2), n, start));
        assert_eq!(asks, Some(63));
    }

    #[test]
    fn the_table_has_a_bound_and_forgets_those_who_do_nothing() {
        let start = Instant::now();
        let standing = Standing::new(start, PLACES);
        let address = |n: usize| Origin::address(std::net::Ipv4Addr::from(n as u32).into());
        for n in 0..2 * MOST_ADDRESSES {
            standing.fruitless(address(n), start);
        }
        assert_eq!(standing.table().accounts.len(), MOST_ADDRESSES);
        // Those for whom there is no room answer for each other.
        assert!(!standing.lets_in(address(2 * MOST_ADDRESSES), start));
        assert!(standing.lets_in(address(0), start));
        let later = start + Duration::from_secs(3600);
        assert!(standing.lets_in(address(2 * MOST_ADDRESSES), later));
        assert_eq!(standing.table().accounts.len(), 1);
    }
}
