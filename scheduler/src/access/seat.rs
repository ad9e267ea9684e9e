//! Places at a door. Connections take them before anybody knows whose they are; who has shown nothing yet makes room for
//! newcomers, so that nobody holds a door shut by being there. Calls take memory before anybody has read them: they are
//! counted until they are answered, together and from each address. How addresses behave decides who gets a place at all.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::{IpAddr, Ipv6Addr},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

use hotcell_proto::error::{Error, Reason};
use http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{TcpConnectInfo, UdsConnectInfo};

use super::standing::Standing;
use crate::rarely::Rarely;

/// Where a connection comes from, as far as it tells: nobody has as many addresses as connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A process of this host.
    #[default]
    Local,
    /// This address.
    Address(IpAddr),
    /// A proxy that is trusted to keep its own clients apart.
    Proxy,
}

impl Origin {
    /// This address. One subscriber has a whole IPv6 network of 64 bits.
    pub fn address(address: IpAddr) -> Self {
        Self::Address(match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(all) => {
                let network = all.to_bits() & !u128::from(u64::MAX);
                IpAddr::V6(Ipv6Addr::from_bits(network))
            }
        })
    }

    /// Whether it is held against the address what comes from there.
    pub(super) fn has_standing(self) -> bool {
        matches!(self, Self::Address(_))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(IpAddr::V6(network)) => write!(f, "{network}/64"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Proxy => f.write_str("a proxy"),
            Self::Local => f.write_str("this host"),
        }
    }
}

/// Connections over which no call was let in yet.
#[derive(Debug, Default)]
struct Silent {
    /// The oldest first.
    all: BTreeMap<u64, (Origin, CancellationToken)>,
    /// How many come from where.
    count: HashMap<Origin, usize>,
}

impl Silent {
    fn add(&mut self, number: u64, from: Origin, leave: CancellationToken) {
        self.all.insert(number, (from, leave));
        *self.count.entry(from).or_default() += 1;
    }

    fn remove(&mut self, number: u64) -> Option<CancellationToken> {
        let (from, leave) = self.all.remove(&number)?;
        match self.count.get_mut(&from) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.count.remove(&from)),
        }
        Some(leave)
    }

    /// Takes out the oldest of those where most come from.
    fn remove_most(&mut self) -> Option<CancellationToken> {
        let (most, _) = self.count.iter().max_by_key(|(_, count)| **count)?;
        let oldest = self.all.iter().find(|(_, (from, _))| from == most);
        let (&number, _) = oldest?;
        self.remove(number)
    }
}

/// Calls that are not answered yet.
#[derive(Debug, Default)]
struct Calls {
    all: usize,
    count: HashMap<Origin, usize>,
}

/// What a door has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Connections.
    pub connections: usize,
    /// Calls that are not answered yet.
    pub calls: usize,
    /// Of these, from one address.
    pub calls_from_one: usize,
}

/// The places of one door.
#[derive(Debug)]
pub struct Seats {
    room: Room,
    places: Arc<Semaphore>,
    silent: Mutex<Silent>,
    calls: Mutex<Calls>,
    standing: Standing,
    given: AtomicU64,
}

impl Seats {
    /// So many.
    pub fn new(room: Room) -> Arc<Self> {
        Arc::new(Self {
            room,
            places: Arc::new(Semaphore::new(room.connections)),
            silent: Mutex::default(),
            calls: Mutex::default(),
            standing: Standing::new(Instant::now(), room.connections),
            given: AtomicU64::new(0),
        })
    }

    fn silent(&self) -> MutexGuard<'_, Silent> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a newcomer from there may have a place. To be asked once for each.
    pub fn lets_in(&self, from: Origin) -> bool {
        self.standing.lets_in(from, Instant::now())
    }

    /// A place for a newcomer. If all are taken, one leaves that made no call yet: of those where most of them come from
    /// the oldest. If there is none, a place is free once somebody goes. `None` never happens: nobody closes the semaphore.
    pub async fn take(self: &Arc<Self>, from: Origin) -> Option<Seat> {
        let place = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => place,
            Err(_) => {
                if let Some(leave) = self.silent().remove_most() {
                    leave.cancel();
                }
                Arc::clone(&self.places).acquire_owned().await.ok()?
            }
        };
        let number = self.given.fetch_add(1, Ordering::Relaxed);
        let leave = CancellationToken::new();
        self.silent().add(number, from, leave.clone());
        Some(Seat {
            mark: Mark {
                number,
                from,
                seats: Arc::clone(self),
                certificate: None,
                conduct: Arc::new(Conduct {
                    answered: AtomicBool::new(false),
                    put_off: AtomicBool::new(false),
                    refused: AtomicU32::new(0),
                    leave: leave.clone(),
                }),
            },
            must_leave: Rarely::new(Box::pin(leave.cancelled_owned())),
            left: false,
            _place: place,
        })
    }
}

/// A connection's place. Given back when it is dropped.
#[derive(Debug)]
pub struct Seat {
    mark: Mark,
    must_leave: Rarely<Pin<Box<WaitForCancellationFutureOwned>>>,
    left: bool,
    _place: OwnedSemaphorePermit,
}

impl Seat {
    /// What the connection's calls carry.
    pub fn mark(&self) -> Mark {
        self.mark.clone()
    }

    /// The client has shown a certificate with this name, or with none of use.
    pub fn certified(&mut self, name: Option<Arc<str>>) {
        self.mark.certificate = Some(name);
    }

    /// Whether the connection has to go; if not, `cx` is woken when it has to.
    pub fn must_leave(&mut self, cx: &mut Context<'_>) -> bool {
        self.left = self.left || Pin::new(&mut self.must_leave).poll(cx) == Poll::Ready(());
        self.left
    }

    /// Returns when the connection has to go.
    pub async fn left(&mut self) {
        std::future::poll_fn(|cx| match self.must_leave(cx) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Mark {
            from,
            seats,
            conduct,
            ..
        } = &self.mark;
        self.mark.keeps();
        let of_use = [&conduct.answered, &conduct.put_off];
        if !of_use.iter().any(|so| so.load(Ordering::Relaxed)) {
            seats.standing.fruitless(*from, Instant::now());
        }
    }
}

/// What came of a connection's calls.
#[derive(Debug)]
struct Conduct {
    /// One was answered.
    answered: AtomicBool,
    /// One was told to come later.
    put_off: AtomicBool,
    /// Refused ones since then.
    refused: AtomicU32,
    leave: CancellationToken,
}

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered, or failed through no fault of the caller's.
    Answered,
    /// It could not be taken at the moment, which is held against nobody who was answered before.
    NotNow,
    /// It should not have been made.
    Refused,
}

/// Says which connection a call came by.
#[derive(Clone, Debug)]
pub struct Mark {
    number: u64,
    from: Origin,
    seats: Arc<Seats>,
    /// The name in the client's certificate, if it has shown one.
    certificate: Option<Option<Arc<str>>>,
    conduct: Arc<Conduct>,
}

impl Mark {
    /// A call was let in: the connection keeps its place.
    pub fn keeps(&self) {
        self.seats.silent().remove(self.number);
    }

    /// The name in the certificate that the client has shown, if it has shown one; none if that has no name of use.
    pub fn certificate(&self) -> Option<Option<&Arc<str>>> {
        self.certificate.as_ref().map(Option::as_ref)
    }

    /// Notes what came of a call. A connection of which nothing good comes has to leave.
    pub fn came_to(&self, outcome: Outcome) {
        let Conduct {
            answered,
            put_off,
            refused,
            leave,
        } = &*self.conduct;
        let was_answered = answered.load(Ordering::Relaxed);
        match outcome {
            Outcome::Answered => {
                answered.store(true, Ordering::Relaxed);
                refused.store(0, Ordering::Relaxed);
                let standing = &self.seats.standing;
                standing.fruitful(self.from, !was_answered, Instant::now());
            }
            Outcome::NotNow if was_answered => {}
            Outcome::NotNow | Outcome::Refused => {
                let so_far = refused.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                let (standing, now) = (&self.seats.standing, Instant::now());
                let may_stay = match outcome == Outcome::NotNow {
                    true => {
                        put_off.store(true, Ordering::Relaxed);
                        standing.bears_with(self.from, so_far, now)
                    }
                    false => standing.bears(self.from, so_far, was_answered, now),
                };
                if !may_stay {
                    leave.cancel();
                }
            }
        }
    }

    /// A call begins, and has a place until what is returned is dropped.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when there are too many.
    pub fn begin(&self) -> Result<Begun, Error> {
        let Room {
            calls,
            calls_from_one,
            ..
        } = self.seats.room;
        let mut table = self.seats.calls();
        let own = table.count.get(&self.from).copied().unwrap_or(0);
        // A proxy's calls are those of many.
        let crowded = own >= calls_from_one && self.from != Origin::Proxy;
        if table.all >= calls || crowded {
            let what = format!(
                "too many calls wait for their answers ({} of at most {calls}, {own} of at most {calls_from_one} from here); try again later",
                table.all
            );
            return Err(Error::new(Reason::Overloaded, what));
        }
        table.all += 1;
        table.count.insert(self.from, own + 1);
        drop(table);
        Ok(Begun { mark: self.clone() })
    }
}

/// The place of a call that is not answered yet.
#[derive(Debug)]
pub struct Begun {
    mark: Mark,
}

impl Begun {
    /// Notes what came of it.
    pub fn came_to(&self, outcome: Outcome) {
        self.mark.came_to(outcome);
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut table = self.mark.seats.calls();
        table.all = table.all.saturating_sub(1);
        match table.count.get_mut(&self.mark.from) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(table.count.remove(&self.mark.from)),
        }
    }
}

/// What a connection is known by, and its mark.
#[derive(Clone, Debug)]
pub struct Came<I> {
    /// What the kernel says about it.
    pub info: I,
    /// Its mark.
    pub mark: Mark,
}

/// The mark of the connection that a call came by. What is known about the connection is then found under its own type.
pub fn came_by(extensions: &mut Extensions) -> Option<Mark> {
    fn of<I: Clone + Send + Sync + 'static>(extensions: &mut Extensions) -> Option<Mark> {
        let Came { info, mark } = extensions.remove::<Came<I>>()?;
        extensions.insert(info);
        Some(mark)
    }
    of::<UdsConnectInfo>(extensions).or_else(|| of::<TcpConnectInfo>(extensions))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(connections: usize) -> Room {
        Room {
            connections,
            calls: 3,
            calls_from_one: 2,
        }
    }

    #[tokio::test]
    async fn calls_are_counted_together_and_from_each_address() {
        let seats = Seats::new(room(9));
        let one = seats.take(from(1)).await.unwrap();
        let two = seats.take(from(2)).await.unwrap();
        let first = one.mark().begin().unwrap();
        let second = one.mark().begin().unwrap();
        let error = one.mark().begin().unwrap_err();
        assert_eq!(error.reason(), Reason::Overloaded);
        let third = two.mark().begin().unwrap();
        let error = two.mark().begin().unwrap_err();
        assert!(error.message().contains("3 of at most 3, 1 of"), "{error}");
        drop(first);
        let fourth = one.mark().begin().unwrap();
        drop((second, third, fourth));
        let calls = seats.calls();
        assert!(calls.all == 0 && calls.count.is_empty());
    }

    #[tokio::test]
    async fn what_comes_through_a_proxy_is_not_held_against_all_that_does() {
        let seats = Seats::new(room(9));
        let proxy = seats.take(Origin::Proxy).await.unwrap();
        let calls: Vec<_> = (0..3).map(|_| proxy.mark().begin()).collect();
        // As many as there are from anywhere.
        assert!(calls.iter().all(Result::is_ok));
        assert!(proxy.mark().begin().is_err());
        drop(calls);
        for _ in 0..10_000 {
            proxy.mark().came_to(Outcome::Refused);
        }
        assert!(seats.lets_in(Origin::Proxy));
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut proxy = proxy;
        assert!(!proxy.must_leave(&mut context));
        // An address that does the same has to go.
        let mut other = seats.take(from(1)).await.unwrap();
        (0..10_000).for_each(|_| other.mark().came_to(Outcome::Refused));
        assert!(other.must_leave(&mut context) && !seats.lets_in(from(1)));
    }

    fn from(last: u8) -> Origin {
        Origin::address([127, 0, 0, last].into())
    }

    #[tokio::test]
    async fn who_made_no_call_makes_room_and_who_did_does_not() {
        let seats = Seats::new(room(3));
        let mut first = seats.take(from(1)).await.unwrap();
        let second = seats.take(from(2)).await.unwrap();
        let mut third = seats.take(from(1)).await.unwrap();
        first.mark().keeps();
        second.mark().keeps();
        let mut fourth = Box::pin(seats.take(from(2)));
        // It waits until the third has gone.
        assert!(now(fourth.as_mut()).is_none());
        third.left().await;
        drop(third);
        let fourth = fourth.await.unwrap();
        fourth.mark().keeps();
        // All have made a call now.
        let mut fifth = Box::pin(seats.take(from(3)));
        assert!(now(fifth.as_mut()).is_none());
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(!first.must_leave(&mut context));
        drop(first);
        fifth.await.unwrap();
        drop((second, fourth));
        let silent = seats.silent();
        assert!(silent.all.is_empty() && silent.count.is_empty());
    }

    #[tokio::test]
    async fn it_is_the_many_who_make_room() {
        let seats = Seats::new(room(3));
        let mut old = seats.take(from(1)).await.unwrap();
        let mut many = seats.take(from(2)).await.unwrap();
        let _more = seats.take(from(2)).await.unwrap();
        let mut next = Box::pin(seats.take(from(2)));
        assert!(now(next.as_mut()).is_none());
        many.left().await;
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(!old.must_leave(&mut context));
        let v6 = |text: &str| Origin::address(text.parse().unwrap());
        assert_eq!(v6("2001:db8::1"), v6("2001:db8::ffff:1"));
        assert_ne!(v6("2001:db8::1"), v6("2001:db8:0:1::1"));
    }

    #[tokio::test]
    async fn a_connection_whose_calls_are_all_refused_has_to_leave_and_one_that_is_of_use_stays() {
        let seats = Seats::new(room(9));
        let mut stranger = seats.take(from(1)).await.unwrap();
        let mut known = seats.take(from(2)).await.unwrap();
        let mut local = seats.take(Origin::default()).await.unwrap();
        for _ in 0..200 {
            stranger.mark().came_to(Outcome::Refused);
            known.mark().came_to(Outcome::Refused);
            known.mark().came_to(Outcome::Answered);
            local.mark().came_to(Outcome::Refused);
        }
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(stranger.must_leave(&mut context));
        // Who was answered is not blamed for coming when there is no room.
        (0..10_000).for_each(|_| known.mark().came_to(Outcome::NotNow));
        assert!(!known.must_leave(&mut context) && !local.must_leave(&mut context));
    }

    #[tokio::test]
    async fn a_connection_whose_only_call_has_to_come_later_is_not_held_against_its_address() {
        let seats = Seats::new(room(500));
        for _ in 0..200 {
            for (last, outcome) in [(1, Outcome::NotNow), (2, Outcome::Refused)] {
                let once = seats.take(from(last)).await.unwrap();
                once.mark().came_to(outcome);
            }
        }
        assert!(seats.lets_in(from(1)) && !seats.lets_in(from(2)));
    }

    #[tokio::test]
    async fn connections_that_end_without_an_answer_are_counted() {
        let seats = Seats::new(room(9));
        for _ in 0..200 {
            let used = seats.take(from(1)).await.unwrap();
            used.mark().came_to(Outcome::Answered);
            drop(used);
            drop(seats.take(from(2)).await.unwrap());
        }
        assert!(seats.lets_in(from(1)) && !seats.lets_in(from(2)));
    }

    fn now<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }
}
