//! Memory that carries one call's tensors to a worker and back, where they are too large to go with the call.
//!
//! A piece for each tensor, made and sealed here and shared with the worker alone: what the worker reads of it nobody else
//! can change. A lane is used by one call at a time and kept for the next one of the same sizes; one whose call did not end
//! well is not used again, since the worker may still write to it.

use std::{
    os::fd::AsFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use hotcell_ipc::memory::{SharedMapping, shared_memory};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{FreeRequest, Handle, ImportSharedRequest, TensorSpec},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};

use super::{
    Call,
    in_place::{Spot, Taken},
    saved::{Port, Saved},
    session::Session,
};

/// Smaller tensors go with their call: two copies of these cost less than a shared piece's calls.
const SMALL: u64 = 64 << 10;
/// Calls of one graph on one worker whose tensors are under way at once; further ones wait.
const AT_ONCE: usize = 4;
/// Pieces that one session can share with its worker.
const MAX_PIECES: usize = 64;
/// Bytes of one tensor.
const MAX_BYTES: u64 = 256 << 20;
/// What is copied without leaving the thread.
const SHORT: usize = 1 << 20;

/// Copies a tensor's bytes to or from a piece, and ends early once nobody waits for it any more.
pub type Fill = Arc<dyn Fn(&SharedMapping, &AtomicBool) -> Result<(), Error> + Send + Sync>;

/// Where an input comes from.
#[derive(Clone)]
pub enum Source {
    /// Its bytes.
    Bytes(Bytes),
    /// A client's memory, and how to copy what is there.
    Elsewhere(Spot, Fill),
}

impl Source {
    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Elsewhere(spot, _) => spot.bytes,
        }
    }
}

/// Where an output goes to.
#[derive(Clone)]
pub enum Sink {
    /// Into the answer.
    Bytes,
    /// To a client's memory, and how to copy it there.
    Elsewhere(Spot, Fill),
    /// Nowhere: nobody asked for it.
    Nothing,
}

/// A tensor's piece of memory.
struct Piece {
    mapping: Arc<SharedMapping>,
    handle: Handle,
}

/// Bytes of each input's and output's piece; none if it goes with the call.
type Sizes = Vec<Option<u64>>;

struct Pieces {
    sizes: Sizes,
    pieces: Vec<Option<Piece>>,
    stream: u32,
}

struct Shelf {
    idle: Mutex<Vec<Pieces>>,
    session: Arc<Session>,
}

/// The lanes of one graph on one worker. Clones share them.
#[derive(Clone)]
pub(super) struct Lanes {
    shelf: Arc<Shelf>,
    saved: Arc<Saved>,
    places: Arc<Semaphore>,
}

/// One call's tensors on their way. Dropped, it is not used again.
pub(super) struct Lane {
    shelf: Arc<Shelf>,
    inputs: usize,
    pieces: Option<Pieces>,
    place: Option<OwnedSemaphorePermit>,
}

impl Lanes {
    pub(super) fn new(session: &Arc<Session>, saved: &Arc<Saved>) -> Self {
        let ports = (saved.inputs.len() + saved.outputs.len()).max(1);
        let most = (MAX_PIECES / ports).clamp(1, AT_ONCE);
        Self {
            shelf: Arc::new(Shelf {
                idle: Mutex::default(),
                session: Arc::clone(session),
            }),
            saved: Arc::clone(saved),
            places: Arc::new(Semaphore::new(most)),
        }
    }

    /// A lane for a call, without pieces for what is computed in place.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if inputs are not as long as they have to be, [`Reason::LimitExceeded`],
    /// [`Reason::OutOfMemory`], and the worker's words.
    pub(super) async fn take(&self, call: &Call, in_place: &Taken) -> Result<Lane, Error> {
        let mut sizes = self.sizes(call)?;
        for (at, size) in sizes.iter_mut().enumerate() {
            if in_place.handle(at).is_some() {
                *size = None;
            }
        }
        let failed = |e| Error::new(Reason::Internal, format!("no lane: {e}"));
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(failed)?;
        let ready = {
            let mut idle = self.shelf.idle();
            match idle.iter().position(|lane| lane.sizes == sizes) {
                Some(at) => Ok(idle.swap_remove(at)),
                // Together with those in use, this one included, there would be too many.
                None if idle.len() > self.places.available_permits() => Err(idle.pop()),
                None => Err(None),
            }
        };
        let lane = |pieces| Lane {
            shelf: Arc::clone(&self.shelf),
            inputs: self.saved.inputs.len(),
            pieces: Some(pieces),
            place: Some(place),
        };
        let old = match ready {
            Ok(pieces) => return Ok(lane(pieces)),
            Err(old) => old,
        };
        let mut lane = lane(Pieces {
            pieces: Vec::with_capacity(sizes.len()),
            sizes,
            stream: u32::try_from(self.places.available_permits()).unwrap_or(0),
        });
        // On a task of its own: what was shared is named by an answer, which has to be heard even if the call is given up.
        let (lanes, rows) = (self.clone(), call.rows);
        let making = tokio::spawn(async move {
            if let Some(old) = old {
                free(&lanes.shelf.session, old).await?;
            }
            lanes.make(&mut lane, rows).await.map(|()| lane)
        });
        let failed = |e| Error::new(Reason::Internal, format!("no lane: {e}"));
        making.await.map_err(failed)?
    }

    fn sizes(&self, call: &Call) -> Result<Sizes, Error> {
        let rows = call.rows;
        let size = |port: &Port, given: Option<u64>| {
            let bytes = port.bytes(rows);
            if given.is_some() && given != bytes {
                let what = format!(
                    "input {:?} has {} bytes, not {}",
                    port.name,
                    bytes.unwrap_or(u64::MAX),
                    given.unwrap_or_default()
                );
                return Err(Error::new(Reason::InvalidArgument, what));
            }
            let fits = bytes.filter(|bytes| *bytes <= MAX_BYTES);
            fits.ok_or_else(|| {
                let what = format!("{:?} has more than {MAX_BYTES} bytes", port.name);
                Error::new(Reason::LimitExceeded, what).with("limit", MAX_BYTES)
            })
        };
        let mut sizes = Vec::with_capacity(self.saved.inputs.len() + self.saved.outputs.len());
        if call.inputs.len() != self.saved.inputs.len()
            || call.outputs.len() != self.saved.outputs.len()
        {
            let what = "a call has other inputs or outputs than its graph";
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        for (port, source) in self.saved.inputs.iter().zip(&call.inputs) {
            let bytes = size(port, Some(source.bytes()))?;
            let goes_along = matches!(source, Source::Bytes(_)) && bytes <= SMALL;
            // Memory has at least one byte.
            sizes.push((!goes_along && bytes > 0).then_some(bytes));
        }
        for (port, sink) in self.saved.outputs.iter().zip(&call.outputs) {
            let bytes = size(port, None)?;
            let goes_along = match sink {
                Sink::Bytes => bytes <= SMALL,
                Sink::Elsewhere(..) => false,
                Sink::Nothing => true,
            };
            sizes.push((!goes_along && bytes > 0).then_some(bytes));
        }
        Ok(sizes)
    }

    /// Makes a lane's pieces. What there is of them goes with the lane if one cannot be made.
    async fn make(&self, lane: &mut Lane, rows: u64) -> Result<(), Error> {
        let Some(sizes) = lane.pieces.as_ref().map(|pieces| pieces.sizes.clone()) else {
            return Ok(());
        };
        let ports = self.saved.inputs.iter().chain(&self.saved.outputs);
        for (port, size) in ports.zip(sizes) {
            let piece = match size {
                None => None,
                Some(bytes) => Some(self.share(port.at(rows), bytes).await?),
            };
            if let Some(pieces) = &mut lane.pieces {
                pieces.pieces.push(piece);
            }
        }
        Ok(())
    }

    async fn share(&self, spec: TensorSpec, bytes: u64) -> Result<Piece, Error> {
        let none = |e| {
            let what = format!("no shared memory of {bytes} bytes: {e}");
            Error::new(Reason::OutOfMemory, what)
        };
        let session = &self.shelf.session;
        let memory = shared_memory("hotcell-graph-call", bytes).map_err(none)?;
        let mapping = Arc::new(SharedMapping::of_memory(&memory).map_err(none)?);
        let tag = session.link.share(memory.as_fd()).await?;
        let (mut client, request) = session.call(ImportSharedRequest {
            tag,
            spec: Some(spec),
            offset: 0,
        });
        let said = session.said(client.import_shared(request).await)?;
        let handle = said.handle.ok_or_else(|| {
            let what = "a worker's answer has no name for shared memory";
            Error::new(Reason::ProtocolViolation, what)
        })?;
        Ok(Piece { mapping, handle })
    }
}

async fn free(session: &Session, pieces: Pieces) -> Result<(), Error> {
    let pieces = pieces.pieces.into_iter().flatten();
    let handles: Vec<_> = pieces.map(|piece| piece.handle).collect();
    if handles.is_empty() {
        return Ok(());
    }
    let (mut client, request) = session.call(FreeRequest { handles });
    session.said(client.free(request).await).map(|_| ())
}

impl Shelf {
    fn idle(&self) -> MutexGuard<'_, Vec<Pieces>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that nobody waits any more, when it is dropped.
struct Given(Arc<AtomicBool>);

impl Drop for Given {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something with memory, beside the event loop if it takes long; ends soon once nobody waits for it.
async fn with<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce(&AtomicBool) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let over = Arc::new(AtomicBool::new(false));
    if bytes <= SHORT {
        return work(&over);
    }
    let given = Given(Arc::clone(&over));
    let failed = |e| Error::new(Reason::Internal, format!("a copy failed: {e}"));
    let done = spawn_blocking(move || work(&over)).await.map_err(failed)?;
    drop(given);
    done
}

fn broken(error: &std::io::Error) -> Error {
    let what = format!("a call's memory: {error}");
    Error::new(Reason::Internal, what)
}

impl Lane {
    fn piece(&self, at: usize) -> Option<&Piece> {
        self.pieces.as_ref()?.pieces.get(at)?.as_ref()
    }

    /// The queue of the session that its call goes to.
    pub(super) fn stream(&self) -> u32 {
        self.pieces.as_ref().map_or(0, |pieces| pieces.stream)
    }

    /// The name of an input's piece; none if it goes with the call.
    pub(super) fn input(&self, index: usize) -> Option<Handle> {
        self.piece(index).map(|piece| piece.handle.clone())
    }

    /// The same of an output.
    pub(super) fn output(&self, index: usize) -> Option<Handle> {
        self.input(self.inputs + index)
    }

    /// Copies the inputs that have pieces there.
    ///
    /// # Errors
    /// Why one cannot be read.
    pub(super) async fn fill(&mut self, inputs: &[Source]) -> Result<(), Error> {
        for (index, source) in inputs.iter().enumerate() {
            let Some(piece) = self.piece(index) else {
                continue;
            };
            let (mapping, source) = (Arc::clone(&piece.mapping), source.clone());
            let fill = move |over: &AtomicBool| match source {
                Source::Bytes(bytes) => mapping.write(0, &bytes).map_err(|e| broken(&e)),
                Source::Elsewhere(_, fill) => fill(&mapping, over),
            };
            with(piece.mapping.len(), fill).await?;
        }
        Ok(())
    }

    /// Copies an output from its piece to where it goes.
    ///
    /// # Errors
    /// Why it cannot be written.
    pub(super) async fn empty(&self, index: usize, sink: &Sink) -> Result<Bytes, Error> {
        let Some(piece) = self.piece(self.inputs + index) else {
            return Ok(Bytes::new());
        };
        let (mapping, sink) = (Arc::clone(&piece.mapping), sink.clone());
        let empty = move |over: &AtomicBool| match sink {
            Sink::Bytes => {
                let mut bytes = vec![0; mapping.len()];
                mapping.read(0, &mut bytes).map_err(|e| broken(&e))?;
                Ok(bytes.into())
            }
            Sink::Elsewhere(_, empty) => empty(&mapping, over).map(|()| Bytes::new()),
            Sink::Nothing => Ok(Bytes::new()),
        };
        with(piece.mapping.len(), empty).await
    }

    /// Its call ended well.
    pub(super) fn give_back(mut self) {
        if let Some(pieces) = self.pieces.take() {
            self.shelf.idle().push(pieces);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The worker ends the call, which nobody waits for, and then frees what it used.
        if let Some(pieces) = self.pieces.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (session, place) = (Arc::clone(&self.shelf.session), self.place.take());
            runtime.spawn(async move {
                let _ = free(&session, pieces).await;
                // Not before: another one would find the session full.
                drop(place);
            });
        }
    }
}
