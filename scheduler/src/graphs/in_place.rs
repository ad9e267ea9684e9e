//! Tensors that a worker computes in the memory of who asked, without a copy.
//!
//! The scheduler never maps what a client may shorten; a worker, which others can do without, does, and survives it. It gets
//! the descriptor once and keeps a mapping for as long as the memory is registered and there is room. In place is only what
//! leaves a call repeatable and others alone: large and aligned tensors, with all of their pages there, and of the results
//! those that lie in nothing else of the call. Whatever else it is, it is copied as before ([`lane`](super::lane)).

use std::{
    fs::File,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use hotcell_proto::{
    error::{Error, Reason},
    limits::{IN_PLACE_ALIGNMENT, IN_PLACE_BYTES, MAX_IN_PLACE_BYTES, MAX_IN_PLACE_MAPPINGS},
    v1::{FreeRequest, Handle, ImportSharedRequest, TensorSpec},
};
use rustix::fs::SeekFrom;
use tokio_util::sync::CancellationToken;

use super::{
    Call,
    lane::{Sink, Source},
    saved::Saved,
    session::Session,
};

/// Memory that a client registered, for as long as it is.
#[derive(Debug)]
pub struct ClientMemory {
    file: File,
    identity: (u64, u64),
    left: CancellationToken,
}

impl ClientMemory {
    /// An open file, and its device and inode.
    pub fn new(file: File, identity: (u64, u64)) -> Self {
        Self {
            file,
            identity,
            left: CancellationToken::new(),
        }
    }

    /// The file, for system calls.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its device and inode.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// It is registered no more: calls that have it end with it, and no mapping of it is kept.
    pub fn leave(&self) {
        self.left.cancel();
    }

    /// Whether all pages of a range are there. Whoever touches one first pays for it, and no client's page is to be paid
    /// for by a worker.
    fn is_whole(&self, at: u64, bytes: u64) -> bool {
        let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(at));
        hole.is_ok_and(|hole| hole >= at.saturating_add(bytes))
    }
}

/// Looks whether memory still is what was registered.
pub type Look = Arc<dyn Fn() -> Result<(), Error> + Send + Sync>;

/// A tensor's place in a client's memory.
#[derive(Clone)]
pub struct Spot {
    /// The memory.
    pub memory: Arc<ClientMemory>,
    /// Where in its file the tensor begins.
    pub at: u64,
    /// Its size.
    pub bytes: u64,
    /// Whether it is there.
    pub look: Look,
}

impl Spot {
    /// Whether a byte is in both, under whichever names they were registered.
    fn overlaps(&self, other: &Self) -> bool {
        let end = |spot: &Self| spot.at.saturating_add(spot.bytes);
        self.memory.identity == other.memory.identity
            && self.at < end(other)
            && other.at < end(self)
    }

    fn is_fit(&self) -> bool {
        IN_PLACE_BYTES.contains(&self.bytes) && self.at.is_multiple_of(IN_PLACE_ALIGNMENT)
    }
}

/// Of each input and output of a call, its place if it is to be used in place.
fn chosen(call: &Call) -> Vec<Option<&Spot>> {
    let inputs = call.inputs.iter().map(|source| match source {
        Source::Elsewhere(spot, _) => Some(spot),
        Source::Bytes(_) => None,
    });
    let outputs = call.outputs.iter().map(|sink| match sink {
        Sink::Elsewhere(spot, _) => Some(spot),
        Sink::Bytes | Sink::Nothing => None,
    });
    let all: Vec<Option<&Spot>> = inputs.chain(outputs).collect();
    let mut chosen = all.clone();
    for (i, place) in chosen.iter_mut().enumerate() {
        let Some(spot) = place.filter(|spot| spot.is_fit()) else {
            *place = None;
            continue;
        };
        // What is read stays as it is until the call is answered: it may have to be read again.
        let mut others = all.iter().enumerate().filter(|(other, _)| *other != i);
        let is_shared = others.any(|(_, other)| other.is_some_and(|other| spot.overlaps(other)));
        if i >= call.inputs.len() && is_shared {
            *place = None;
        }
    }
    chosen
}

/// A mapping that the worker has.
struct Entry {
    memory: Arc<ClientMemory>,
    at: u64,
    bytes: u64,
    /// Which of the graph's inputs and outputs, with how many rows.
    port: (usize, u64),
    handle: Handle,
    /// Calls that use it.
    uses: usize,
    /// It is freed when no call uses it any more.
    doomed: bool,
    /// Ends who waits for its memory to be left.
    _over: tokio_util::sync::DropGuard,
}

impl Entry {
    fn is(&self, spot: &Spot, port: (usize, u64)) -> bool {
        !self.doomed
            && Arc::ptr_eq(&self.memory, &spot.memory)
            && (self.at, self.bytes, self.port) == (spot.at, spot.bytes, port)
    }
}

struct Shelf {
    /// The one that was used last is the last.
    entries: Mutex<Vec<Entry>>,
    /// Held by who has the worker map something.
    making: tokio::sync::Mutex<()>,
    /// Whether the worker does not do it.
    refused: AtomicBool,
    session: Arc<Session>,
}

impl Shelf {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses what is mapped already.
    fn find(&self, spot: &Spot, port: (usize, u64)) -> Option<Handle> {
        let mut entries = self.entries();
        let at = entries.iter().position(|entry| entry.is(spot, port))?;
        let mut entry = entries.remove(at);
        entry.uses += 1;
        let handle = entry.handle.clone();
        entries.push(entry);
        Some(handle)
    }

    /// Takes out what nobody uses and nobody may use again, and what has to go for so many bytes more; `None` if there is
    /// no room.
    fn make_room(&self, bytes: u64) -> Option<Vec<Handle>> {
        let mut entries = self.entries();
        let mut gone = Vec::new();
        loop {
            let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
            if entries.len() < MAX_IN_PLACE_MAPPINGS
                && held.saturating_add(bytes) <= MAX_IN_PLACE_BYTES
            {
                return Some(gone);
            }
            let Some(idle) = entries.iter().position(|entry| entry.uses == 0) else {
                drop(entries);
                return self.dismiss(gone);
            };
            gone.push(entries.remove(idle).handle);
        }
    }

    fn dismiss(&self, gone: Vec<Handle>) -> Option<Vec<Handle>> {
        free(&self.session, gone);
        None
    }

    /// Has the entries that these are freed, at once or with their last call.
    fn doom(&self, which: impl Fn(&Entry) -> bool) {
        let mut entries = self.entries();
        for entry in entries.iter_mut().filter(|entry| which(entry)) {
            entry.doomed = true;
        }
        let gone = entries.extract_if(.., |entry| entry.doomed && entry.uses == 0);
        let gone = gone.map(|entry| entry.handle).collect();
        drop(entries);
        free(&self.session, gone);
    }

    fn release(&self, handle: &Handle) {
        for entry in self.entries().iter_mut() {
            if entry.handle == *handle {
                entry.uses = entry.uses.saturating_sub(1);
            }
        }
        self.doom(|_| false);
    }
}

/// Frees mappings, whoever waits.
fn free(session: &Arc<Session>, handles: Vec<Handle>) {
    if handles.is_empty() {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        let session = Arc::clone(session);
        runtime.spawn(async move {
            let (mut client, request) = session.call(FreeRequest { handles });
            // Of a worker that is gone, nothing is left to free.
            let _ = session.said(client.free(request).await);
        });
    }
}

/// What one plan's worker has mapped.
pub(super) struct InPlace(Arc<Shelf>);

/// What of a call is computed in place. Dropped, its mappings are others' to use.
#[derive(Default)]
pub(super) struct Taken {
    shelf: Option<Arc<Shelf>>,
    /// For each input, then each output.
    handles: Vec<Option<Handle>>,
    looks: Vec<Look>,
}

impl Taken {
    /// The name of an input's or output's mapping.
    pub(super) fn handle(&self, at: usize) -> Option<Handle> {
        self.handles.get(at).cloned().flatten()
    }

    /// Whether all of it still is what was registered.
    ///
    /// # Errors
    /// [`Reason::RegionChanged`].
    pub(super) fn look(&self) -> Result<(), Error> {
        self.looks.iter().try_for_each(|look| look())
    }

    /// None of these mappings is used again.
    pub(super) fn forget(&mut self) {
        if let Some(shelf) = &self.shelf {
            let its = |entry: &Entry| self.handles.iter().flatten().any(|h| *h == entry.handle);
            shelf.doom(its);
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(shelf) = &self.shelf {
            self.handles.iter().flatten().for_each(|h| shelf.release(h));
        }
    }
}

impl InPlace {
    pub(super) fn new(session: &Arc<Session>) -> Self {
        Self(Arc::new(Shelf {
            entries: Mutex::default(),
            making: tokio::sync::Mutex::default(),
            refused: AtomicBool::new(false),
            session: Arc::clone(session),
        }))
    }

    /// What of a call is computed in place; nothing where the worker cannot.
    ///
    /// # Errors
    /// [`Reason::WorkerLost`] and the like.
    pub(super) async fn take(&self, saved: &Saved, call: &Call) -> Result<Taken, Error> {
        let mut taken = Taken::default();
        if self.0.refused.load(Ordering::Relaxed) {
            return Ok(taken);
        }
        let spots = chosen(call);
        if spots.iter().all(Option::is_none) {
            return Ok(taken);
        }
        taken.shelf = Some(Arc::clone(&self.0));
        let ports = saved.inputs.iter().chain(&saved.outputs);
        for (index, (spot, port)) in spots.into_iter().zip(ports).enumerate() {
            let handle = match spot.filter(|spot| port.bytes(call.rows) == Some(spot.bytes)) {
                None => None,
                Some(spot) => {
                    let key = (index, call.rows);
                    match self.0.find(spot, key) {
                        Some(handle) => Some(handle),
                        None => self.map(spot, key, port.at(call.rows)).await?,
                    }
                }
            };
            if let (Some(_), Some(spot)) = (&handle, spot) {
                taken.looks.push(Arc::clone(&spot.look));
            }
            taken.handles.push(handle);
        }
        Ok(taken)
    }

    /// Has the worker map a place; `None` if that cannot be.
    async fn map(
        &self,
        spot: &Spot,
        port: (usize, u64),
        spec: TensorSpec,
    ) -> Result<Option<Handle>, Error> {
        if !spot.memory.is_whole(spot.at, spot.bytes) {
            return Ok(None);
        }
        let (shelf, spot) = (Arc::clone(&self.0), spot.clone());
        // On a task of its own: what is mapped is named by an answer, which has to be heard even if the call is given up.
        let making = tokio::spawn(async move {
            let made = make(&shelf, &spot, port, spec).await;
            Ok(match made {
                Ok(handle) => handle.map(|handle| Unclaimed(shelf, Some(handle))),
                Err(error) => match error.reason() {
                    Reason::OpUnsupported => {
                        shelf.refused.store(true, Ordering::Relaxed);
                        None
                    }
                    // Also of memory that was shortened just now, the copy finds out.
                    Reason::QuotaExceeded
                    | Reason::OutOfMemory
                    | Reason::LimitExceeded
                    | Reason::InvalidArgument => None,
                    _ => return Err(error),
                },
            })
        });
        let failed = |e| Error::new(Reason::Internal, format!("nothing was mapped: {e}"));
        let made: Option<Unclaimed> = making.await.map_err(failed)??;
        Ok(made.and_then(|mut made| made.1.take()))
    }
}

/// A use of a mapping that its call may have left meanwhile.
struct Unclaimed(Arc<Shelf>, Option<Handle>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(handle) = &self.1 {
            self.0.release(handle);
        }
    }
}

async fn make(
    shelf: &Arc<Shelf>,
    spot: &Spot,
    port: (usize, u64),
    spec: TensorSpec,
) -> Result<Option<Handle>, Error> {
    let _making = shelf.making.lock().await;
    // Another call may have had it mapped while this one waited.
    if let Some(handle) = shelf.find(spot, port) {
        return Ok(Some(handle));
    }
    let Some(gone) = shelf.make_room(spot.bytes) else {
        return Ok(None);
    };
    let session = &shelf.session;
    if !gone.is_empty() {
        let (mut client, request) = session.call(FreeRequest { handles: gone });
        session.said(client.free(request).await)?;
    }
    let tag = session.link.share(spot.memory.file.as_fd()).await?;
    let (mut client, request) = session.call(ImportSharedRequest {
        tag,
        spec: Some(spec),
        offset: spot.at,
    });
    let said = session.said(client.import_shared(request).await)?;
    let handle = said.handle.ok_or_else(|| {
        let what = "a worker's answer has no name for a client's memory";
        Error::new(Reason::ProtocolViolation, what)
    })?;
    let over = CancellationToken::new();
    shelf.entries().push(Entry {
        memory: Arc::clone(&spot.memory),
        at: spot.at,
        bytes: spot.bytes,
        port,
        handle: handle.clone(),
        uses: 1,
        doomed: false,
        _over: over.clone().drop_guard(),
    });
    tokio::spawn(let_go(
        Arc::downgrade(shelf),
        Arc::clone(&spot.memory),
        handle.clone(),
        over,
    ));
    Ok(Some(handle))
}

/// Frees a mapping once its memory is registered no more.
async fn let_go(
    shelf: Weak<Shelf>,
    memory: Arc<ClientMemory>,
    handle: Handle,
    over: CancellationToken,
) {
    tokio::select! {
        () = over.cancelled() => return,
        () = memory.left.cancelled() => {}
    }
    if let Some(shelf) = shelf.upgrade() {
        shelf.doom(|entry| entry.handle == handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(inode: u64) -> Arc<ClientMemory> {
        let file = File::open("/dev/null").unwrap();
        Arc::new(ClientMemory::new(file, (1, inode)))
    }

    /// A place of the smallest size that is used in place.
    fn spot(memory: &Arc<ClientMemory>, at: u64) -> Spot {
        Spot {
            memory: Arc::clone(memory),
            at,
            bytes: *IN_PLACE_BYTES.start(),
            look: Arc::new(|| Ok(())),
        }
    }

    /// Which are used in place.
    fn used<const N: usize>(inputs: &[&Spot], outputs: [&Spot; N]) -> (Vec<bool>, [bool; N]) {
        let call = Call {
            rows: 0,
            inputs: inputs
                .iter()
                .map(|spot| Source::Elsewhere((*spot).clone(), Arc::new(|_, _| Ok(()))))
                .collect(),
            outputs: outputs
                .iter()
                .map(|spot| Sink::Elsewhere((*spot).clone(), Arc::new(|_, _| Ok(()))))
                .collect(),
            deadline: None,
            tenant: String::new(),
        };
        let all: Vec<bool> = chosen(&call).iter().map(Option::is_some).collect();
        let (read, written) = all.split_at(inputs.len());
        (read.to_vec(), written.try_into().unwrap())
    }

    #[test]
    fn what_is_written_in_place_lies_in_nothing_else_of_its_call() {
        let bytes = *IN_PLACE_BYTES.start();
        let (one, other) = (memory(7), memory(8));
        // The same file, registered once more.
        let again = memory(7);
        let from = spot(&one, 0);
        assert_eq!(used(&[&from], [&spot(&other, 0)]), (vec![true], [true]));
        assert_eq!(used(&[&from], [&spot(&again, bytes)]), (vec![true], [true]));
        for at in [0, IN_PLACE_ALIGNMENT, bytes - IN_PLACE_ALIGNMENT] {
            assert_eq!(used(&[&from], [&spot(&again, at)]), (vec![true], [false]));
            let two = [&spot(&one, 0), &spot(&again, at)];
            assert_eq!(used(&[], two), (vec![], [false, false]));
        }
        // One that is copied is read, too.
        let off = spot(&one, 4);
        assert_eq!(used(&[&off], [&spot(&one, 0)]), (vec![false], [false]));
        // What is read may be read twice.
        assert_eq!(used(&[&from, &from], []), (vec![true, true], []));
    }

    #[test]
    fn what_is_small_or_lies_crooked_is_copied() {
        let one = memory(7);
        let small = Spot {
            bytes: *IN_PLACE_BYTES.start() - 1,
            ..spot(&one, 0)
        };
        let large = Spot {
            bytes: *IN_PLACE_BYTES.end() + 1,
            ..spot(&one, 0)
        };
        let crooked = spot(&one, IN_PLACE_ALIGNMENT - 1);
        assert_eq!(used(&[&small, &large, &crooked], []).0, [false; 3]);
    }
}
