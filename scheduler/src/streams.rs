//! All streams of a scheduler by their request's id, and how long each waits for its client to come back.
//!
//! A request that carries an id of its client's is not run twice while its stream is known: the same request gets
//! the same stream, another one under that id is refused. Its stream goes on without a reader, and is kept after its
//! end, for a bounded time. One whose id the scheduler drew ends when its client leaves.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits,
    receipt::Hash,
    v1::{Finished, HeldStream},
};
use tokio::{
    sync::{broadcast, watch},
    time::Instant,
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};
use tonic::Status;

use crate::{
    access::Caller,
    elsewhere::Elsewhere,
    stream::{Mark, Restored, Room, Stream},
};

/// Ends that one who is told of them may be behind with.
const ENDS: usize = 1024;

/// A request that is or was in the scheduler.
#[derive(Clone, Debug)]
pub struct Stay {
    /// Its id.
    pub id: RequestId,
    /// When it came in.
    pub born: Instant,
    /// The trace that it belongs to; none: empty.
    pub trace: String,
}

#[derive(Debug)]
struct Entry {
    stream: Arc<Stream>,
    /// Of the request, if its client chose the id.
    fingerprint: Option<Hash>,
    /// Of the request.
    tenant: String,
    /// Its number among the finished ones that are kept.
    kept: Option<u64>,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<RequestId, Entry>,
    /// Finished ones, the oldest first.
    kept: BTreeMap<u64, RequestId>,
    finished: u64,
}

impl Table {
    fn remove(&mut self, id: &RequestId) {
        if let Some(number) = self.entries.remove(id).and_then(|entry| entry.kept) {
            self.kept.remove(&number);
        }
    }
}

#[derive(Debug)]
struct Inner {
    room: Arc<Room>,
    patience: Duration,
    readers: TaskTracker,
    /// Where they go while this host drains.
    elsewhere: watch::Sender<Option<Arc<Elsewhere>>>,
    /// Whether they never go anywhere.
    stay: AtomicBool,
    /// Told of requests as they end.
    ends: broadcast::Sender<Stay>,
    table: Mutex<Table>,
}

/// The streams. Clones share them.
#[derive(Clone, Debug)]
pub struct Streams(Arc<Inner>);

/// What a request's id stands for.
#[derive(Debug)]
pub enum Opened<P> {
    /// A new stream, to be written.
    New(Arc<Stream>, P),
    /// The stream of the same request.
    Known(Arc<Stream>),
}

impl Streams {
    /// None yet; each waits for its client at most `patience`.
    pub fn new(room: Room, patience: Duration) -> Self {
        Self(Arc::new(Inner {
            room: Arc::new(room),
            patience,
            readers: TaskTracker::new(),
            elsewhere: watch::Sender::default(),
            stay: AtomicBool::new(false),
            ends: broadcast::Sender::new(ENDS),
            table: Mutex::default(),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes that they hold.
    pub fn room(&self) -> &Room {
        &self.0.room
    }

    /// Streams known, finished ones included.
    pub fn count(&self) -> usize {
        self.table().entries.len()
    }

    /// Those that run.
    pub fn running(&self) -> Vec<Stay> {
        let table = self.table();
        let running = table.entries.iter().filter_map(|(id, entry)| {
            let (born, trace) = entry.stream.running()?;
            let id = id.clone();
            Some(Stay { id, born, trace })
        });
        running.collect()
    }

    /// Tells of each that ends from now on, however short it was.
    pub fn ends(&self) -> broadcast::Receiver<Stay> {
        self.0.ends.subscribe()
    }

    /// Ends one, and tells of it.
    pub fn finish(&self, id: &RequestId, stream: &Stream, end: Result<Finished, Status>) {
        let stay = match self.0.ends.receiver_count() {
            0 => None,
            _ => stream.running(),
        };
        // Before its reader hears of it, who may then ask for what was told.
        if let Some((born, trace)) = stay {
            let id = id.clone();
            // Nobody may be there any more.
            let _ = self.0.ends.send(Stay { id, born, trace });
        }
        stream.finish(end);
    }

    /// Has those that run go on at another host, one after the other, as far as it takes them.
    pub fn leave_to(&self, elsewhere: Arc<Elsewhere>) {
        self.0.elsewhere.send_replace(Some(elsewhere));
    }

    /// Has streams that begin from now on expect no other host, so that they need not look for one at each event.
    pub fn stay(&self) {
        self.0.stay.store(true, Ordering::Relaxed);
    }

    /// Whether they may go to another host one day.
    pub fn may_leave(&self) -> bool {
        !self.0.stay.load(Ordering::Relaxed)
    }

    /// Where they go, once they do.
    pub fn leaving(&self) -> watch::Receiver<Option<Arc<Elsewhere>>> {
        self.0.elsewhere.subscribe()
    }

    /// Streams that another host took over, and the times that it did not take one or could not go on with it.
    pub fn handed(&self) -> (u64, u64) {
        let elsewhere = self.0.elsewhere.borrow();
        let elsewhere = elsewhere.as_ref();
        elsewhere.map_or((0, 0), |to| (to.taken(), to.refused()))
    }

    /// Clients that read, until the last event was taken.
    pub fn readers(&self) -> &TaskTracker {
        &self.0.readers
    }

    /// Goes with a reader.
    pub fn reader(&self) -> TaskTrackerToken {
        self.0.readers.token()
    }

    /// The stream of a request: a known one, or a new one if `admit` lets it in. `fingerprint` is that of the
    /// request, if its client chose the id. It is for `tenant`, whose alone the stream is.
    ///
    /// # Errors
    /// [`Reason::RequestExists`] if the id is that of another request; [`Reason::Overloaded`]; what `admit` says.
    pub fn open<P>(
        &self,
        (id, tenant): (&RequestId, &str),
        fingerprint: Option<Hash>,
        begin: Mark,
        admit: impl FnOnce() -> Result<P, Error>,
    ) -> Result<Opened<P>, Error> {
        let mut table = self.table();
        if let Some(entry) = table.entries.get(id) {
            return match entry.fingerprint {
                Some(known) if fingerprint == Some(known) && entry.tenant == tenant => {
                    Ok(Opened::Known(Arc::clone(&entry.stream)))
                }
                _ => Err(Error::new(
                    Reason::RequestExists,
                    format!("request id {id} is that of another request; choose another or leave it empty"),
                )
                .with("request_id", id)),
            };
        }
        if table.entries.len() >= limits::MAX_STREAMS {
            return Err(Error::new(
                Reason::Overloaded,
                "too many streams wait for their clients to read them; read those, or try again later",
            ));
        }
        let permit = admit()?;
        let stream = Stream::new(Arc::clone(&self.0.room), fingerprint.is_some(), begin);
        let entry = Entry {
            stream: Arc::clone(&stream),
            fingerprint,
            tenant: tenant.to_owned(),
            kept: None,
        };
        table.entries.insert(id.clone(), entry);
        Ok(Opened::New(stream, permit))
    }

    /// Writes all of them down, and does `work` before any of them can go on.
    pub fn freeze<T>(&self, work: impl FnOnce(Vec<HeldStream>) -> T) -> T {
        let table = self.table();
        let frozen: Vec<_> = table
            .entries
            .iter()
            .map(|(id, entry)| (id, entry, entry.stream.freeze()))
            .collect();
        let held = frozen.iter().filter_map(|(id, entry, stream)| {
            Some(HeldStream {
                ended: entry.kept.unwrap_or_default(),
                ..stream.hold(id.as_str(), entry.fingerprint)?
            })
        });
        let held = held.collect();
        work(held)
    }

    /// Takes a stream of another program.
    ///
    /// # Errors
    /// If it contradicts itself, its id is taken, or there are too many.
    pub fn restore(&self, held: HeldStream) -> Result<(RequestId, Restored), Error> {
        let tenant = held.request.as_ref().map(|r| r.tenant.clone());
        let restored = Stream::restore(Arc::clone(&self.0.room), held)?;
        let id = RequestId::new(restored.id.as_str())?;
        let mut table = self.table();
        if table.entries.contains_key(&id) || table.entries.len() >= limits::MAX_STREAMS {
            let what = format!("there is no place for a stream of request id {id}");
            return Err(Error::new(Reason::RequestExists, what));
        }
        let entry = Entry {
            stream: Arc::clone(&restored.stream),
            fingerprint: restored.fingerprint,
            tenant: tenant.unwrap_or_default(),
            kept: None,
        };
        table.entries.insert(id.clone(), entry);
        Ok((id, restored))
    }

    /// The stream of a request's id, if it is the caller's to see.
    ///
    /// # Errors
    /// [`Reason::RequestNotFound`].
    pub fn find(&self, id: &RequestId, caller: &Caller) -> Result<Arc<Stream>, Error> {
        let table = self.table();
        let entry = table.entries.get(id).filter(|e| caller.owns(&e.tenant));
        let entry = entry.ok_or_else(|| {
            Error::new(
                Reason::RequestNotFound,
                format!(
                    "no stream has request id {id}; it may have ended more than {:?} ago",
                    self.0.patience
                ),
            )
            .with("request_id", id)
        })?;
        Ok(Arc::clone(&entry.stream))
    }

    /// How long a stream of this kind goes on without a reader.
    fn patience(&self, stream: &Stream) -> Duration {
        match stream.keeps() {
            true => self.0.patience,
            false => Duration::ZERO,
        }
    }

    /// Returns once nobody wants a stream any more, and says why.
    pub async fn unwanted(&self, stream: &Stream) -> &'static str {
        tokio::select! {
            biased;
            () = stream.cancelled() => "its client cancelled it",
            () = stream.forsaken(self.patience(stream)) => "its client left",
        }
    }

    /// Keeps a finished stream for as long as its client may come back, and then forgets it.
    pub async fn keep(&self, id: &RequestId, stream: &Arc<Stream>) {
        let same = |entry: &Entry| Arc::ptr_eq(&entry.stream, stream);
        if stream.keeps() {
            let mut table = self.table();
            let number = table.finished;
            table.finished += 1;
            table.kept.insert(number, id.clone());
            if let Some(entry) = table.entries.get_mut(id) {
                entry.kept = Some(number);
            }
            drop(table);
            self.make_room();
        }
        self.unwanted(stream).await;
        let mut table = self.table();
        if table.entries.get(id).is_some_and(same) {
            table.remove(id);
        }
    }

    /// Forgets finished streams that nobody reads, the oldest first, while there are too many or they hold too much.
    pub fn make_room(&self) {
        let wanted =
            |table: &Table| table.kept.len() > limits::MAX_KEPT_STREAMS || self.0.room.is_full();
        let mut table = self.table();
        // One after the other, as few as it takes: this is asked for whenever a stream ends, and thousands may be kept.
        let mut from = 0;
        while wanted(&table) {
            let Some((&number, id)) = table.kept.range(from..).next() else {
                return;
            };
            from = number + 1;
            if table.entries.get(id).is_some_and(|e| e.stream.forget()) {
                let id = id.clone();
                table.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Role;

    fn id(text: &str) -> RequestId {
        RequestId::new(text).unwrap()
    }

    fn open(streams: &Streams, name: &str, fingerprint: Option<Hash>) -> Result<bool, Reason> {
        let opened = streams.open((&id(name), "acme"), fingerprint, Mark::default(), || Ok(()));
        let opened = opened.map_err(|e| e.reason())?;
        Ok(matches!(opened, Opened::New(..)))
    }

    #[test]
    fn an_id_stands_for_one_request() {
        let streams = Streams::new(Room::default(), Duration::ZERO);
        assert_eq!(open(&streams, "a", Some([1; 32])), Ok(true));
        assert_eq!(open(&streams, "a", Some([1; 32])), Ok(false));
        assert_eq!(
            open(&streams, "a", Some([2; 32])),
            Err(Reason::RequestExists)
        );
        // One whose id was drawn is nobody else's, even if the id is guessed.
        assert_eq!(open(&streams, "b", None), Ok(true));
        assert_eq!(
            open(&streams, "b", Some([1; 32])),
            Err(Reason::RequestExists)
        );
        assert_eq!(open(&streams, "b", None), Err(Reason::RequestExists));
        let unknown = streams.find(&id("c"), &Caller::own()).unwrap_err();
        assert_eq!(unknown.reason(), Reason::RequestNotFound);
    }

    #[test]
    fn a_stream_is_its_tenants() {
        let streams = Streams::new(Room::default(), Duration::ZERO);
        open(&streams, "a", Some([1; 32])).unwrap();
        let of = |tenant: &str| {
            let roles = [Role::Use].into_iter().collect();
            Caller::of_tenant("a test", roles, true, tenant.into())
        };
        assert!(streams.find(&id("a"), &of("acme")).is_ok());
        let other = streams.find(&id("a"), &of("other")).unwrap_err();
        assert_eq!(other.reason(), Reason::RequestNotFound);
        let id = id("a");
        let begin = Mark::default();
        let again = streams.open((&id, "other"), Some([1; 32]), begin, || Ok(()));
        assert_eq!(again.unwrap_err().reason(), Reason::RequestExists);
    }

    #[test]
    fn streams_are_counted() {
        let streams = Streams::new(Room::default(), Duration::ZERO);
        for i in 0..limits::MAX_STREAMS {
            assert_eq!(open(&streams, &i.to_string(), None), Ok(true));
        }
        assert_eq!(open(&streams, "x", None), Err(Reason::Overloaded));
    }

    #[tokio::test(start_paused = true)]
    async fn a_finished_stream_is_forgotten_when_nobody_came_back_in_time() {
        let patience = Duration::from_secs(60);
        let streams = Streams::new(Room::default(), patience);
        open(&streams, "a", Some([1; 32])).unwrap();
        let stream = streams.find(&id("a"), &Caller::own()).unwrap();
        let began = tokio::time::Instant::now();
        let reader = stream.attach(None, streams.reader()).unwrap();
        let keeping = tokio::spawn({
            let (streams, stream) = (streams.clone(), Arc::clone(&stream));
            async move { streams.keep(&id("a"), &stream).await }
        });
        tokio::time::sleep(2 * patience).await;
        drop(reader);
        tokio::time::sleep(patience / 2).await;
        // Who comes back starts the wait anew.
        drop(stream.attach(None, streams.reader()).unwrap());
        keeping.await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 210);
        assert_eq!(streams.count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn too_many_finished_streams_are_forgotten_from_the_oldest_on_that_nobody_reads() {
        let streams = Streams::new(Room::default(), Duration::from_secs(60));
        let many = limits::MAX_KEPT_STREAMS + 3;
        let find = |number: usize| streams.find(&id(&number.to_string()), &Caller::own());
        let mut reader = None;
        for number in 0..many {
            let name = number.to_string();
            open(&streams, &name, Some([1; 32])).unwrap();
            let stream = find(number).unwrap();
            if number == 1 {
                reader = Some(stream.attach(None, streams.reader()).unwrap());
            }
            let streams = streams.clone();
            tokio::spawn(async move { streams.keep(&id(&name), &stream).await });
            tokio::task::yield_now().await;
        }
        assert_eq!(streams.count(), limits::MAX_KEPT_STREAMS);
        let gone: Vec<usize> = (0..many).filter(|&number| find(number).is_err()).collect();
        assert_eq!(gone, [0, 2, 3], "the second is being read");
        drop(reader);
    }
}
