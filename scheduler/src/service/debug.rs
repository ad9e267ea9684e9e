//! Debug, passed on to the worker that is meant, for callers who may see what others do.

use std::{sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits,
    v1::{
        CaptureHeld, CaptureRequest, Captured, GuardEvent, GuardRequest, MemoryMap,
        MemoryMapRequest, ReplayRequest, TracePiece, TraceRequest, WatchRequest, WatchSample,
        capture_request, captured, debug_server::Debug, replay_request::Which,
    },
};
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{Shared, traced::Traced, who};
use crate::{
    access::Caller,
    admission::draining,
    discover::clip,
    fleet::{
        Link, Replayer, believe_captured, believe_guarded, believe_memory_map, believe_sample,
    },
};

/// The service.
pub(super) struct Service(pub Shared);

/// How long a reader may take nothing before it is left: a process of its own, or a worker that serves, works for it.
pub(super) const STALLED: Duration = Duration::from_secs(60);

/// How long tokens that a worker was seen to compute may take until they are here, and the time between two looks.
const ON_THEIR_WAY: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

type Answers<T> = ReceiverStream<Result<T, Status>>;

impl Service {
    /// Lets somebody look inside.
    ///
    /// # Errors
    /// [`Reason::PermissionDenied`] for callers over TCP that nobody asked who they are: what they would see is others'.
    fn may<T>(&self, request: &Request<T>) -> Result<(), Error> {
        let caller = Caller::of(request.extensions());
        if caller.remote && !self.0.access.asks_for_tokens() {
            let what = "over TCP only callers with a token may look into workers: give the scheduler --tokens, \
                        and the caller a token with the role debug; or use the Unix socket";
            return Err(Error::new(Reason::PermissionDenied, what));
        }
        if self.0.admission.is_closed() {
            return Err(draining());
        }
        Ok(())
    }

    fn note<T>(&self, request: &Request<T>, call: &str, worker: &str, detail: String) {
        let who = who(request);
        let detail = clip(&detail);
        tracing::info!(worker, call, detail, by = %who.name, "somebody looks into a worker");
        self.0.fleet.audit_debug(&who, call, worker, detail);
    }

    /// Lets somebody look into a worker, and notes it.
    fn enter<T>(
        &self,
        request: &Request<T>,
        call: &str,
        worker: &str,
        detail: String,
    ) -> Result<Arc<Link>, Error> {
        self.may(request)?;
        let link = self.0.fleet.for_debug(worker)?;
        self.note(request, call, &link.worker, detail);
        Ok(link)
    }

    /// Whether somebody may see, or end, what may be any tenant's.
    ///
    /// # Errors
    /// [`Reason::PermissionDenied`] for those who belong to one.
    fn may_all<T>(request: &Request<T>) -> Result<(), Error> {
        match Caller::of(request.extensions()).owns_all() {
            true => Ok(()),
            false => {
                let what = "whoever belongs to one tenant looks into that tenant's requests by their ids, and into no others";
                Err(Error::new(Reason::PermissionDenied, what))
            }
        }
    }

    /// What is to be run again, once the tokens are known that it begins after: they may be on their way.
    async fn known(&self, asked: &ReplayRequest, caller: &Caller) -> Result<ReplayRequest, Error> {
        let until = Instant::now() + ON_THEIR_WAY;
        if let Some(Which::RequestId(id)) = &asked.which {
            let stream = self.0.streams.find(&RequestId::new(id.as_str())?, caller)?;
            while stream.waits_for_a_worker() && Instant::now() < until {
                sleep(LOOK).await;
            }
        }
        loop {
            let mut again = asked.clone();
            self.again(&mut again, caller)?;
            let known = match &again.which {
                Some(Which::Request(request)) => {
                    (request.resume.as_ref()).map_or(0, |resume| resume.generated_ids.len() as u64)
                }
                _ => 0,
            };
            let comes = matches!(asked.which, Some(Which::RequestId(_)));
            if known >= asked.at || !comes || Instant::now() >= until {
                return Ok(again);
            }
            sleep(LOOK).await;
        }
    }

    /// The request that is to be run again, under its model's name here.
    fn again(&self, request: &mut ReplayRequest, caller: &Caller) -> Result<(), Error> {
        if let Some(Which::RequestId(id)) = &request.which {
            let id = RequestId::new(id.as_str())?;
            let stream = self.0.streams.find(&id, caller)?;
            let again = stream.again().ok_or_else(|| {
                if stream.waits_for_a_worker() {
                    let what = format!(
                        "no worker has accepted request {id} yet; try again once it has said something"
                    );
                    return Error::new(Reason::NoWorker, what);
                }
                let what = format!("what request {id} was and said is held no more");
                Error::new(Reason::TokensForgotten, what)
            })?;
            request.which = Some(Which::Request(again));
        }
        match &mut request.which {
            Some(Which::Request(again)) => {
                let model = self.0.fleet.resolve(&again.model)?;
                again.model = model.as_str().to_owned();
                Ok(())
            }
            _ => {
                let what = "name a request, or give one";
                Err(Error::new(Reason::InvalidArgument, what))
            }
        }
    }
}

/// How often a black box is looked at for who follows it.
const FOLLOW: Duration = Duration::from_millis(20);

/// Passes on what comes of running a request again, and where the process is meanwhile.
async fn pass_followed(
    shared: Shared,
    link: Arc<Link>,
    mut messages: Streaming<Captured>,
    to: mpsc::Sender<Result<Captured, Status>>,
    _held: Replayer,
) {
    let mut looking = interval(FOLLOW);
    looking.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut before, mut has_plan) = (None, false);
    loop {
        let next = tokio::select! {
            () = shared.abort.cancelled() => Err(draining()),
            () = to.closed() => return,
            _ = looking.tick(), if has_plan => Ok(None),
            next = messages.message() => match next {
                Ok(Some(said)) => Ok(Some(believe_captured(said, &link))),
                Ok(None) => return,
                Err(status) => Err(link.said(&status).await),
            },
        };
        // Also when it is gone: where it was at last.
        let seen = link
            .seen()
            .filter(|seen| has_plan && before.as_ref() != Some(seen));
        let seen = seen.map(|seen| Captured {
            kind: Some(captured::Kind::Seen(seen)),
        });
        if let Some(captured::Kind::Seen(seen)) = seen.as_ref().and_then(|seen| seen.kind.as_ref())
        {
            before = Some(seen.clone());
        }
        let (next, is_last) = match next {
            Ok(next) => (next.map(Ok), false),
            Err(error) => (Some(Err(Status::from(error))), true),
        };
        if let Some(Ok(Captured {
            kind: Some(captured::Kind::Plan(_)),
        })) = &next
        {
            has_plan = true;
        }
        for message in seen.map(Ok).into_iter().chain(next) {
            let sent = tokio::select! {
                () = shared.abort.cancelled() => return,
                sent = timeout(STALLED, to.send(message)) => sent,
            };
            if !matches!(sent, Ok(Ok(()))) {
                return;
            }
        }
        if is_last {
            return;
        }
    }
}

/// Passes messages on until either side leaves. What looks on at a worker that serves is left out there if its reader is
/// slow; who runs for this reader alone waits. `held` lives until the end.
async fn pass_all<T>(
    shared: Shared,
    link: Arc<Link>,
    mut messages: Streaming<T>,
    believe: fn(T, &Link) -> T,
    to: mpsc::Sender<Result<T, Status>>,
    _held: Option<Replayer>,
) {
    loop {
        let next = tokio::select! {
            () = shared.abort.cancelled() => Err(draining()),
            () = to.closed() => return,
            next = messages.message() => match next {
                Ok(Some(said)) => Ok(believe(said, &link)),
                Ok(None) => return,
                Err(status) => Err(link.said(&status).await),
            },
        };
        let is_last = next.is_err();
        let sent = tokio::select! {
            () = shared.abort.cancelled() => return,
            sent = timeout(STALLED, to.send(next.map_err(Status::from))) => sent,
        };
        if is_last || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

/// Has a throw-away worker run a request.
async fn run_again(
    replayer: &Replayer,
    asked: ReplayRequest,
) -> Result<Streaming<Captured>, Error> {
    let mut client = replayer.link.debug().await?;
    match client.replay(asked).await {
        Ok(messages) => Ok(messages.into_inner()),
        Err(status) => Err(replayer.link.said(&status).await),
    }
}

/// Tells which process it is, has it run once a debugger is attached, or after so long, and passes on what it tells.
async fn pass_held(
    shared: Shared,
    replayer: Replayer,
    asked: ReplayRequest,
    hold: Duration,
    to: mpsc::Sender<Result<Captured, Status>>,
) {
    let link = Arc::clone(&replayer.link);
    let held = CaptureHeld {
        worker: link.worker.clone(),
        epoch: link.epoch,
        pid: replayer.pid,
    };
    let kind = Some(captured::Kind::Held(held));
    if to.send(Ok(Captured { kind })).await.is_err() {
        return;
    }
    tokio::select! {
        () = shared.abort.cancelled() => return,
        () = to.closed() => return,
        () = replayer.held(hold) => {}
    }
    let follow = asked.follow;
    match run_again(&replayer, asked).await {
        Ok(messages) if follow => pass_followed(shared, link, messages, to, replayer).await,
        Ok(messages) => {
            pass_all(shared, link, messages, believe_captured, to, Some(replayer)).await;
        }
        Err(error) => {
            // To one who left this goes nowhere.
            let _ = to.send(Err(error.into())).await;
        }
    }
}

/// Passes samples on until either side leaves. A watcher that does not read misses some, and nobody waits for it.
async fn pass(
    shared: Shared,
    link: Arc<Link>,
    mut samples: Streaming<WatchSample>,
    to: mpsc::Sender<Result<WatchSample, Status>>,
) {
    let mut missed = 0u64;
    loop {
        let next = tokio::select! {
            () = shared.abort.cancelled() => Err(draining()),
            () = to.closed() => return,
            next = samples.message() => match next {
                Ok(Some(sample)) => Ok(sample),
                Ok(None) => return,
                Err(status) => Err(link.said(&status).await),
            },
        };
        match next {
            Ok(said) => {
                let mut sample = believe_sample(said, &link);
                sample.missed = sample.missed.saturating_add(missed);
                missed = match to.try_send(Ok(sample)) {
                    Ok(()) => 0,
                    Err(TrySendError::Full(Ok(sample))) => sample.missed.saturating_add(1),
                    Err(_) => return,
                };
            }
            Err(error) => {
                // To a watcher that left this goes nowhere.
                let _ = to.send(Err(error.into())).await;
                return;
            }
        }
    }
}

#[tonic::async_trait]
impl Debug for Service {
    type WatchStream = Answers<WatchSample>;

    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest {
            worker,
            interval_ms,
        } = request.get_ref();
        let link = self.enter(&request, "watch", worker, String::new())?;
        let asked = WatchRequest {
            // It goes by another name to itself than to us while it stands by.
            worker: String::new(),
            interval_ms: *interval_ms,
        };
        let mut client = link.debug().await?;
        let samples = match client.watch(asked).await {
            Ok(samples) => samples.into_inner(),
            Err(status) => return Err(link.said(&status).await.into()),
        };
        let (to, stream) = mpsc::channel(1);
        tokio::spawn(pass(self.0.clone(), link, samples, to));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type CaptureStream = Answers<Captured>;

    async fn capture(
        &self,
        request: Request<CaptureRequest>,
    ) -> Result<Response<Self::CaptureStream>, Status> {
        let asked = request.get_ref();
        let reveal = asked.options.as_ref().is_some_and(|options| options.reveal);
        let detail = format!("{:?}, reveal: {reveal}", asked.which);
        if let Err(error) = Self::may_all(&request) {
            match &asked.which {
                Some(capture_request::Which::RequestId(id)) => {
                    let id = RequestId::new(id.as_str())?;
                    let caller = Caller::of(request.extensions());
                    self.0.streams.find(&id, &caller)?;
                }
                Some(_) => return Err(error.into()),
                // Of nothing the worker says that it is nothing.
                None => {}
            }
        }
        let link = self.enter(&request, "capture", &asked.worker, detail)?;
        let mut asked = request.into_inner();
        asked.worker = String::new();
        if !asked.model.is_empty() {
            asked.model = self.0.fleet.resolve(&asked.model)?.as_str().to_owned();
        }
        let mut client = link.debug().await?;
        let messages = match client.capture(asked).await {
            Ok(messages) => messages.into_inner(),
            Err(status) => return Err(link.said(&status).await.into()),
        };
        let (to, stream) = mpsc::channel(1);
        let passing = pass_all(self.0.clone(), link, messages, believe_captured, to, None);
        tokio::spawn(passing);
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type ReplayStream = Answers<Captured>;

    async fn replay(
        &self,
        request: Request<ReplayRequest>,
    ) -> Result<Response<Self::ReplayStream>, Status> {
        self.may(&request)?;
        let caller = Caller::of(request.extensions());
        let which = match &request.get_ref().which {
            Some(Which::RequestId(id)) => format!("request {id:?}"),
            _ => "a request".to_owned(),
        };
        if request.get_ref().hold_ms > limits::MAX_HOLD_MILLIS {
            let most = limits::MAX_HOLD_MILLIS;
            let what = format!("a worker waits {most} ms for a debugger at most");
            return Err(Error::new(Reason::InvalidArgument, what).into());
        }
        let mut asked = self.known(request.get_ref(), &caller).await?;
        let Some(Which::Request(again)) = &asked.which else {
            return Err(Error::new(Reason::Internal, "a request without a request").into());
        };
        let model = self.0.fleet.resolve(&again.model)?;
        let reveal = asked.options.as_ref().is_some_and(|options| options.reveal);
        let detail = format!("{which} of {model}, reveal: {reveal}");
        self.note(&request, "replay", &asked.worker, detail);
        let beside = std::mem::take(&mut asked.worker);
        let starting = self.0.fleet.replayer(&model, &beside, asked.hurry);
        let replayer = tokio::select! {
            () = self.0.abort.cancelled() => return Err(draining().into()),
            replayer = starting => replayer?,
        };
        let hold = Duration::from_millis(std::mem::take(&mut asked.hold_ms).into());
        let (to, stream) = mpsc::channel(1);
        if hold.is_zero() {
            let follow = asked.follow;
            let messages = run_again(&replayer, asked).await?;
            let link = Arc::clone(&replayer.link);
            let shared = self.0.clone();
            if follow {
                tokio::spawn(pass_followed(shared, link, messages, to, replayer));
            } else {
                let held = Some(replayer);
                let passing = pass_all(shared, link, messages, believe_captured, to, held);
                tokio::spawn(passing);
            }
        } else {
            tokio::spawn(pass_held(self.0.clone(), replayer, asked, hold, to));
        }
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type GuardStream = Answers<GuardEvent>;

    async fn guard(
        &self,
        request: Request<GuardRequest>,
    ) -> Result<Response<Self::GuardStream>, Status> {
        let asked = request.get_ref();
        let (conditions, end, reveal) = (&asked.conditions, asked.end, asked.reveal);
        let detail = format!("{conditions:?}, end: {end}, reveal: {reveal}");
        // Of nothing the worker says that it is nothing.
        if !asked.conditions.is_empty() {
            Self::may_all(&request)?;
        }
        let link = self.enter(&request, "guard", &asked.worker, detail)?;
        let mut asked = request.into_inner();
        asked.worker = String::new();
        if !asked.model.is_empty() {
            asked.model = self.0.fleet.resolve(&asked.model)?.as_str().to_owned();
        }
        let mut client = link.debug().await?;
        let messages = match client.guard(asked).await {
            Ok(messages) => messages.into_inner(),
            Err(status) => return Err(link.said(&status).await.into()),
        };
        let (to, stream) = mpsc::channel(1);
        let passing = pass_all(self.0.clone(), link, messages, believe_guarded, to, None);
        tokio::spawn(passing);
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn memory(
        &self,
        request: Request<MemoryMapRequest>,
    ) -> Result<Response<MemoryMap>, Status> {
        let MemoryMapRequest { worker, handles } = request.get_ref();
        let link = self.enter(&request, "memory", worker, String::new())?;
        let asked = MemoryMapRequest {
            worker: String::new(),
            handles: *handles,
        };
        let mut client = link.debug().await?;
        let map = match timeout(STALLED, client.memory(asked)).await {
            Ok(Ok(map)) => believe_memory_map(map.into_inner(), &link),
            Ok(Err(status)) => return Err(link.said(&status).await.into()),
            Err(_) => {
                let what = format!(
                    "worker {} did not answer for {STALLED:?}; try again later",
                    link.worker
                );
                return Err(Error::new(Reason::WorkerLost, what).into());
            }
        };
        Ok(Response::new(MemoryMap {
            resident_bytes: self.0.fleet.resident_bytes(&link.worker),
            ..map
        }))
    }

    type TraceStream = Answers<TracePiece>;

    async fn trace(
        &self,
        request: Request<TraceRequest>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        let asked = request.get_ref();
        let detail = format!(
            "{} ms, {} steps, nodes: {}",
            asked.duration_ms, asked.steps, asked.nodes
        );
        let link = self.enter(&request, "trace", &asked.worker, detail)?;
        let mut asked = request.into_inner();
        asked.worker = String::new();
        let traced = Traced::begin(self.0.clone(), link, asked).await?;
        let (to, stream) = mpsc::channel(1);
        tokio::spawn(traced.pass(to));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
