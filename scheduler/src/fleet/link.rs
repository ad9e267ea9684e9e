//! The conversation with one process of a worker: its connections, and whether it is still there.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_ipc::{
    blackbox::{Pulse, Reader},
    socket::{DescriptorSender, stream_pair},
    transport::Windows,
};
use hotcell_proto::{
    PROTOCOL_VERSION,
    error::{Error, Reason},
    ids::{Layout, ModelName},
    limits,
    v1::{
        CheckRequest, CheckResponse, DetokenizeRequest, HandshakeRequest, HandshakeResponse,
        JoinRequest, OpenTensorsRequest, StatusRequest, StatusResponse,
        tokens_client::TokensClient, worker_client::WorkerClient,
    },
};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};

use super::{
    launch::{Launched, TensorDoor, Wire},
    signs::Signs,
};
use crate::{
    death::{Death, DeathKind},
    discover::{clip, layers},
};

/// Flow control of the token connection. Every stream is read as it comes, until what its client has not read takes
/// more than its journal may hold; then it waits in the worker. The connection's window holds every stream's, so that
/// streams which wait cannot starve the others.
///
/// HTTP/2 (h2 since 0.4.16) also counts small DATA frames that wait to be read: each costs what it lacks of
/// [`SMALL_FRAME`] bytes, and once all streams together cost more than half the connection's window, it ends the
/// connection. A token's event is one such frame, so streams that wait have to fit in by their own window, and
/// the connection's is larger than they can ever fill.
pub const TOKENS_WINDOWS: Windows = Windows {
    stream: 8 << 10,
    connection: 128 << 20,
    frame: 64 << 10,
};

/// Frames of at least so many bytes cost nothing.
const SMALL_FRAME: u64 = 256;
/// The smallest event that the journal takes: gRPC's prefix (5), the event's (2), the delta's field (2), one byte.
const SMALLEST_EVENT: u64 = 10;

const _: () = assert!(
    limits::MAX_WORKER_REQUESTS * TOKENS_WINDOWS.stream as usize
        <= TOKENS_WINDOWS.connection as usize
);
const _: () = assert!(
    limits::MAX_WORKER_REQUESTS as u64
        * (TOKENS_WINDOWS.stream as u64 / SMALLEST_EVENT)
        * (SMALL_FRAME - SMALLEST_EVENT)
        <= TOKENS_WINDOWS.connection as u64 / 2
);

/// How long a death may take to show after a stream broke, before the worker is asked.
const GRACE: Duration = Duration::from_millis(500);
/// How long it may take to answer then.
const PING: Duration = Duration::from_secs(2);

/// Why a worker has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condemnation {
    /// What its death will be told as.
    pub kind: DeathKind,
    /// In words.
    pub reason: String,
    /// Whether starting it again is pointless.
    pub hopeless: bool,
}

impl Condemnation {
    /// For something that another try may mend.
    pub fn new(kind: DeathKind, reason: impl Into<String>) -> Self {
        Self {
            kind,
            reason: reason.into(),
            hopeless: false,
        }
    }

    /// The death it leads to.
    pub fn death(&self) -> Death {
        Death::new(self.kind, &self.reason)
    }
}

/// Shared between a keeper and whoever talks to its worker.
#[derive(Clone, Debug)]
pub struct Fate {
    /// Cancelled once the process is reaped.
    pub gone: CancellationToken,
    /// Set once it has to go.
    pub condemned: watch::Sender<Option<Condemnation>>,
    death: Arc<OnceLock<Death>>,
    stalled: Arc<AtomicBool>,
}

impl Fate {
    /// That of a process just started.
    pub fn new() -> Self {
        Self {
            gone: CancellationToken::new(),
            condemned: watch::Sender::new(None),
            death: Arc::default(),
            stalled: Arc::default(),
        }
    }

    /// Tells everyone that it is gone, and why.
    pub fn end(&self, death: Death) {
        let _ = self.death.set(death);
        self.gone.cancel();
    }

    /// Why it died, once it is gone.
    pub fn death(&self) -> Option<&Death> {
        self.death.get()
    }

    /// What its death is, as far as that is known: one that was condemned may still be dying.
    pub fn kind(&self) -> Option<DeathKind> {
        let sentence = || self.condemned.borrow().as_ref().map(|c| c.kind);
        self.death().map(|death| death.kind).or_else(sentence)
    }

    /// Whether it is gone, or has to go.
    pub fn is_sealed(&self) -> bool {
        self.gone.is_cancelled() || self.condemned.borrow().is_some()
    }

    /// Notes whether it makes no progress, though it should; whether that is news.
    pub fn stalls(&self, stalled: bool) -> bool {
        self.stalled.swap(stalled, Ordering::Relaxed) != stalled
    }

    /// Whether it makes no progress, though it should.
    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// Asks the keeper to kill it. The first reason stays.
    pub fn condemn(&self, why: Condemnation) {
        self.condemned.send_if_modified(|held| {
            let first = held.is_none();
            if first {
                *held = Some(why);
            }
            first
        });
    }
}

impl Default for Fate {
    fn default() -> Self {
        Self::new()
    }
}

/// A worker's process, to talk to.
pub struct Link {
    /// The worker's name.
    pub worker: String,
    /// Which of its processes.
    pub epoch: u64,
    /// Whether it is still there.
    pub fate: Fate,
    control: Channel,
    tokens: Channel,
    tensors: Channel,
    pub(super) descriptors: DescriptorSender,
    pub(super) tags: AtomicU64,
    blackbox: Option<Arc<Reader>>,
    tensor_door: Option<TensorDoor>,
    /// The layout in which its device likes weights, once it has said so.
    layout: OnceLock<Layout>,
    /// Whether weights in its device's memory can outlive it, once it has said so.
    keeps_weights: AtomicBool,
    members: AtomicU32,
    /// Whether it was asked to do something about packed weights and has not answered.
    pub(super) packs: AtomicBool,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (epoch {})", self.worker, self.epoch)
    }
}

impl Link {
    /// Connects over our ends of its sockets.
    ///
    /// # Errors
    /// A condemnation if a socket cannot be used.
    pub async fn connect(
        worker: &str,
        epoch: u64,
        fate: Fate,
        sockets: Sockets,
    ) -> Result<Link, Condemnation> {
        let broken = |e: std::io::Error| {
            Condemnation::new(DeathKind::Protocol, format!("cannot talk to it: {e}"))
        };
        Ok(Link {
            worker: worker.to_owned(),
            epoch,
            fate,
            control: sockets
                .control
                .channel(Windows::default())
                .await
                .map_err(broken)?,
            tokens: sockets
                .tokens
                .channel(TOKENS_WINDOWS)
                .await
                .map_err(broken)?,
            tensors: sockets
                .tensors
                .channel(Windows::default())
                .await
                .map_err(broken)?,
            descriptors: DescriptorSender::new(sockets.descriptors).map_err(broken)?,
            tags: AtomicU64::new(1),
            blackbox: sockets.blackbox,
            tensor_door: sockets.tensor_door,
            layout: OnceLock::new(),
            keeps_weights: AtomicBool::new(false),
            members: AtomicU32::new(0),
            packs: AtomicBool::new(false),
        })
    }

    pub(super) fn control(&self) -> WorkerClient<Channel> {
        WorkerClient::new(self.control.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// Where its process is now, if it has a black box.
    pub(super) fn pulse(&self) -> Option<Pulse> {
        self.blackbox.as_ref().map(|blackbox| blackbox.pulse())
    }

    /// Its token service.
    pub fn tokens(&self) -> TokensClient<Channel> {
        TokensClient::new(self.tokens.clone())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
    }

    /// The connection for tensor calls outside of sessions. Each session has one of its own.
    pub fn tensors(&self) -> Channel {
        self.tensors.clone()
    }

    /// A connection of its own for one session of tensors.
    ///
    /// # Errors
    /// As [`Link::open_tensors`].
    pub async fn connect_tensors(&self) -> Result<Wire, Error> {
        match &self.tensor_door {
            Some(door) => Ok(door()),
            None => self.open_tensors().await.map(Wire::from),
        }
    }

    /// A connection of its own, at whose other end the worker serves one who looks into it.
    ///
    /// # Errors
    /// As [`Link::open_tensors`].
    pub async fn connect_debug(&self) -> Result<Wire, Error> {
        match &self.tensor_door {
            Some(door) => Ok(door()),
            None => self.open(true).await.map(Wire::from),
        }
    }

    /// One end of a new connection, at whose other end the worker serves tensors, and nothing else.
    ///
    /// # Errors
    /// The worker's words, or those about the broken connection.
    pub async fn open_tensors(&self) -> Result<OwnedFd, Error> {
        self.open(false).await
    }

    async fn open(&self, debug: bool) -> Result<OwnedFd, Error> {
        let lost = |e: std::io::Error| {
            Error::new(
                Reason::WorkerLost,
                format!("worker {} cannot be handed a connection: {e}", self.worker),
            )
        };
        let (ours, its) = stream_pair().map_err(lost)?;
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        self.descriptors
            .send_async(tag, &[its.as_fd()])
            .await
            .map_err(lost)?;
        drop(its);
        let request = OpenTensorsRequest { tag, debug };
        match timeout(PING, self.control().open_tensors(request)).await {
            Ok(Ok(_)) => Ok(ours),
            Ok(Err(status)) if is_broken(&status) => Err(Error::new(
                Reason::WorkerLost,
                format!(
                    "worker {} died as it was handed a connection; try again",
                    self.worker
                ),
            )),
            Ok(Err(status)) => Err(words(&status)),
            Err(_) => Err(Error::new(
                Reason::Overloaded,
                format!(
                    "worker {} did not take a connection in time; try again",
                    self.worker
                ),
            )),
        }
    }

    /// Has the worker serve one more set of connections, and returns their ends: control, tokens, tensors. It lives until
    /// the last control connection is closed.
    ///
    /// # Errors
    /// The worker's words, or those about the broken connection or its silence.
    pub async fn join(&self) -> Result<[OwnedFd; 3], Error> {
        let lost = |why: String| {
            let what = format!("worker {} opens no connections: {why}", self.worker);
            Error::new(Reason::WorkerLost, what)
        };
        let pair = || stream_pair().map_err(|e| lost(e.to_string()));
        let ((control, a), (tokens, b), (tensors, c)) = (pair()?, pair()?, pair()?);
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        let its = [a.as_fd(), b.as_fd(), c.as_fd()];
        let sent = self.descriptors.send_async(tag, &its).await;
        sent.map_err(|e| lost(e.to_string()))?;
        drop((a, b, c));
        match timeout(PING, self.control().join(JoinRequest { tag })).await {
            Ok(Ok(_)) => Ok([control, tokens, tensors]),
            Ok(Err(status)) => Err(words(&status)),
            Err(_) => Err(lost(format!("no answer within {PING:?}"))),
        }
    }

    /// The socket that descriptors go out on.
    pub(super) fn descriptors(&self) -> BorrowedFd<'_> {
        self.descriptors.as_fd()
    }

    /// The first tag that was not used.
    pub(super) fn next_tag(&self) -> u64 {
        self.tags.load(Ordering::Relaxed)
    }

    /// Uses no tags below this one.
    pub(super) fn tags_from(&self, next: u64) {
        self.tags.fetch_max(next, Ordering::Relaxed);
    }

    /// Sends the worker memory that a client shares with it, under a tag that nobody can guess.
    ///
    /// # Errors
    /// [`Reason::WorkerLost`] when it cannot be sent.
    pub async fn share(&self, memory: BorrowedFd<'_>) -> Result<u64, Error> {
        let mut bytes = [0u8; 8];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::new(Reason::Internal, format!("no random bytes: {e}")))?;
        // Apart from the tags that this link counts.
        let tag = u64::from_ne_bytes(bytes) | limits::FIRST_SHARED_TAG;
        self.descriptors
            .send_async(tag, &[memory])
            .await
            .map_err(|e| {
                Error::new(
                    Reason::WorkerLost,
                    format!("worker {} cannot be handed memory: {e}", self.worker),
                )
            })?;
        Ok(tag)
    }

    /// The first call: whether both sides speak the same version.
    ///
    /// # Errors
    /// A condemnation, hopeless for another version.
    pub async fn handshake(&self) -> Result<HandshakeResponse, Condemnation> {
        let request = HandshakeRequest {
            protocol_version: PROTOCOL_VERSION,
            worker_id: self.worker.clone(),
            epoch: self.epoch,
        };
        let mismatch = |said: String| Condemnation {
            kind: DeathKind::Protocol,
            reason: format!(
                "the worker's program does not fit this scheduler: {said}; install both from one release"
            ),
            hopeless: true,
        };
        let hello = match self.control().handshake(request).await {
            Ok(hello) => hello.into_inner(),
            Err(status) => {
                let said = clip(status.message());
                return Err(match Error::typed(&status).map(|e| e.reason()) {
                    Some(Reason::ProtocolMismatch) => mismatch(said),
                    _ => {
                        Condemnation::new(DeathKind::Protocol, format!("handshake failed: {said}"))
                    }
                });
            }
        };
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err(mismatch(format!(
                "it speaks protocol {}, not {PROTOCOL_VERSION}",
                hello.protocol_version
            )));
        }
        // One that is oddly spelt is none.
        if let Ok(layout) = Layout::new(hello.packing.as_str()) {
            let _ = self.layout.set(layout);
        }
        self.keeps_weights
            .store(hello.keeps_weights, Ordering::Relaxed);
        self.members.store(hello.members, Ordering::Relaxed);
        Ok(HandshakeResponse {
            version: clip(&hello.version),
            confinement: clip(&hello.confinement),
            layers: layers(hello.layers),
            ..hello
        })
    }

    /// Its process's black box, if it has one.
    pub(super) fn blackbox(&self) -> Option<&Arc<Reader>> {
        self.blackbox.as_ref()
    }

    /// The layout in which its device likes weights.
    pub(super) fn layout(&self) -> Option<&Layout> {
        self.layout.get()
    }

    /// Whether weights in its device's memory can outlive it, as it says.
    pub(super) fn keeps_weights(&self) -> bool {
        self.keeps_weights.load(Ordering::Relaxed)
    }

    /// Processes that it is besides the one that answers, as it says: what another number of them left is of no use to it.
    pub(super) fn members(&self) -> u32 {
        self.members.load(Ordering::Relaxed)
    }

    /// Whether it died over packed weights, and not of what it computed, as far as can be told.
    pub(super) fn died_packing(&self) -> bool {
        if !self.packs.load(Ordering::Acquire) {
            return false;
        }
        let seen = self.blackbox.as_ref().and_then(|b| b.snapshot().ok());
        let struck = seen.and_then(|seen| Some((seen.crash?.thread, seen.packer)));
        struck.is_none_or(|(thread, packer)| packer == Some(thread))
    }

    /// Those of its process, which may stand still for as long as `patience`.
    pub(super) fn signs(&self, patience: Duration) -> Signs {
        Signs::new(self.blackbox.as_ref(), patience)
    }

    /// Has it compute so many steps of a model's known answer, and hash a part of the weights.
    ///
    /// # Errors
    /// Its words, or those about the broken connection.
    pub async fn check(
        &self,
        model: &ModelName,
        steps: u32,
        weights_part: Option<u32>,
    ) -> Result<CheckResponse, Status> {
        let request = CheckRequest {
            model: model.as_str().to_owned(),
            steps,
            weights_part,
        };
        let answer = self.control().check(request).await;
        answer.map(tonic::Response::into_inner)
    }

    /// Asks what is in its caches, and what it holds.
    ///
    /// # Errors
    /// Its words, or those about the broken connection.
    pub async fn status(&self) -> Result<StatusResponse, Status> {
        let answer = self.control().status(StatusRequest {}).await?;
        Ok(answer.into_inner())
    }

    /// After a stream broke without a typed status: whether the process is lost. Waits for its end to show;
    /// if it lives, asks it over the same connection, and has it killed if it does not answer.
    pub async fn is_lost(&self) -> bool {
        if timeout(GRACE, self.fate.gone.cancelled()).await.is_ok() {
            return true;
        }
        let answer = tokio::select! {
            biased;
            () = self.fate.gone.cancelled() => return true,
            answer = self.ask_tokens(PING) => answer,
        };
        match answer {
            Ok(()) => false,
            Err(why) => {
                self.condemn(why.kind, &why.reason).await;
                true
            }
        }
    }

    /// Whether it answers on its token connection within `patience`.
    ///
    /// # Errors
    /// What it is to be condemned for if not.
    pub(super) async fn ask_tokens(&self, patience: Duration) -> Result<(), Condemnation> {
        let mut tokens = self.tokens();
        match timeout(patience, tokens.detokenize(DetokenizeRequest::default())).await {
            Ok(Err(status)) if is_broken(&status) => Err(Condemnation::new(
                DeathKind::Protocol,
                "its token connection broke",
            )),
            Ok(_) => Ok(()),
            Err(_) => Err(Condemnation::new(
                DeathKind::Deadline,
                "it did not answer on its token connection",
            )),
        }
    }

    /// Has it killed, and returns once it is gone. A killed process may take long to end (its memory is freed first);
    /// nobody need wait for that.
    pub async fn condemn(&self, kind: DeathKind, why: &str) {
        self.fate.condemn(Condemnation::new(kind, why));
        let _ = timeout(PING, self.fate.gone.cancelled()).await;
    }
}

/// Our ends of a worker's sockets.
pub struct Sockets {
    control: Wire,
    tokens: Wire,
    tensors: Wire,
    descriptors: OwnedFd,
    blackbox: Option<Arc<Reader>>,
    tensor_door: Option<TensorDoor>,
}

impl Launched {
    /// Takes process and sockets apart.
    pub fn split(self) -> (Box<dyn super::launch::Process>, Sockets) {
        let sockets = Sockets {
            control: self.control,
            tokens: self.tokens,
            tensors: self.tensors,
            descriptors: self.descriptors,
            blackbox: self.process.blackbox().cloned(),
            tensor_door: self.process.tensor_door(),
        };
        (self.process, sockets)
    }
}

/// Whether a status tells of a broken connection instead of being the peer's own words.
pub fn is_broken(status: &Status) -> bool {
    Error::typed(status).is_none() && std::error::Error::source(status).is_some()
}

/// A worker's words, cut to what may be passed on.
pub fn words(status: &Status) -> Error {
    let said = Error::from_status(status);
    said.metadata().take(16).fold(
        Error::new(said.reason(), clip(said.message())),
        |error, (key, value)| error.with(clip(key), clip(value)),
    )
}
