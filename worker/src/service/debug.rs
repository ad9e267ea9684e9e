//! `hotcell.v1.Debug`: looking into this worker.

use hotcell_proto::{
    deadline,
    error::{Error, Reason},
    ids::RequestId,
    limits,
    v1::{
        self,
        debug_server::{Debug, DebugServer},
        generate_event::Event,
    },
};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Extensions, Request, Response, Status, transport::server::UdsConnectInfo};

use super::tokens::{self, Events};
use crate::{
    debug::{
        capture::Capture,
        guard::guard,
        memory::memory,
        observer::Watching,
        trace::{Extent, trace},
        watch::{checked_interval, watch},
    },
    generate::batch::Aim,
    host::Host,
};

/// What lines of the log are headed with that say who looked into this worker.
pub const AUDIT: &str = "audit";

/// The service.
pub struct DebugService {
    host: Host,
    audits: bool,
}

/// The service with its limits. It notes who calls if it `audits`: a worker alone has nobody else to do it.
pub fn server(host: Host, audits: bool) -> DebugServer<DebugService> {
    DebugServer::new(DebugService { host, audits })
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
}

type Answers<T> = ReceiverStream<Result<T, Status>>;

impl DebugService {
    fn watching(&self, traces: bool) -> Result<Watching, Error> {
        let watching = self.host.engine().observer().watch(traces);
        watching.ok_or_else(|| {
            let most = limits::MAX_DEBUGGERS;
            let what = format!("{most} others watch this worker already; try again later");
            Error::new(Reason::Overloaded, what)
        })
    }

    /// Notes who calls, if that is to be noted.
    fn note(&self, call: &str, caller: &Extensions) {
        if self.audits {
            // Its user is this process's own, to whom the socket belongs, and has another number in a namespace of users.
            let peer = caller.get::<UdsConnectInfo>();
            let pid = peer.and_then(|peer| peer.peer_cred?.pid());
            tracing::info!(target: AUDIT, call, pid, "debug");
        }
    }

    /// Refuses what is meant for another worker.
    fn is_for_us(&self, worker: &str) -> Result<(), Error> {
        let (own, _) = self.host.identity();
        if worker.is_empty() || worker == own {
            return Ok(());
        }
        let shown: String = worker.chars().take(limits::MAX_SESSION_NAME).collect();
        let what = format!("this is worker {own}, not {shown:?}");
        Err(Error::new(Reason::NoWorker, what))
    }
}

#[tonic::async_trait]
impl Debug for DebugService {
    type WatchStream = Answers<v1::WatchSample>;

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.note("Watch", request.extensions());
        let v1::WatchRequest {
            worker,
            interval_ms,
        } = request.into_inner();
        self.is_for_us(&worker)?;
        let every = checked_interval(interval_ms)?;
        let watching = self.watching(false)?;
        // One: a watcher that does not read gets the latest but few.
        let (to, samples) = mpsc::channel(1);
        tokio::spawn(watch(self.host.clone(), watching, every, to));
        Ok(Response::new(ReceiverStream::new(samples)))
    }

    type CaptureStream = Answers<v1::Captured>;

    async fn capture(
        &self,
        request: Request<v1::CaptureRequest>,
    ) -> Result<Response<Self::CaptureStream>, Status> {
        self.note("Capture", request.extensions());
        use v1::capture_request::Which;
        let request = request.into_inner();
        self.is_for_us(&request.worker)?;
        let model = self.host.model(&request.model)?;
        let aim = match request.which {
            Some(Which::RequestId(id)) => Aim::Request(RequestId::new(id)?.as_str().to_owned()),
            Some(Which::Next(true)) => Aim::Next,
            _ => {
                let what = "name the request, or say that it is the next one";
                return Err(Error::new(Reason::InvalidArgument, what).into());
            }
        };
        let options = request.options.unwrap_or_default();
        let capture = Capture::begin(&self.host, &model, aim, false, options).await?;
        drop(model);
        let (to, told) = mpsc::channel(1);
        tokio::spawn(capture.tell(self.host.clone(), to, std::future::pending()));
        Ok(Response::new(ReceiverStream::new(told)))
    }

    type ReplayStream = Answers<v1::Captured>;

    async fn replay(
        &self,
        request: Request<v1::ReplayRequest>,
    ) -> Result<Response<Self::ReplayStream>, Status> {
        self.note("Replay", request.extensions());
        use v1::replay_request::Which;
        let deadline = deadline::of(request.metadata())?;
        let request = request.into_inner();
        self.is_for_us(&request.worker)?;
        let Some(Which::Request(mut wire)) = request.which else {
            let what = "a worker keeps no streams: give the request itself";
            return Err(Error::new(Reason::RequestNotFound, what).into());
        };
        let model = self.host.model(&wire.model)?;
        let generated = wire.resume.take().unwrap_or_default().generated_ids;
        let at = usize::try_from(request.at).unwrap_or(usize::MAX);
        let Some(before) = generated.get(..at) else {
            let what = format!(
                "token {at} is none of the answer's: {} are known",
                generated.len()
            );
            return Err(Error::new(Reason::InvalidArgument, what).into());
        };
        wire.resume = Some(v1::Resume {
            generated_ids: before.to_vec(),
            text_bytes_emitted: 0,
        });
        let id = RequestId::random()?;
        wire.request_id = id.as_str().to_owned();
        // Of a token that is looked at there is one row.
        wire.no_speculation = true;
        let id = wire.request_id.clone();
        let aim = Aim::Request(id.clone());
        let options = request.options.unwrap_or_default();
        let mut capture = Capture::begin(&self.host, &model, aim, true, options).await?;
        capture.expect(match request.expected.is_empty() {
            true => generated,
            false => request.expected,
        });
        if !request.conditions.is_empty() {
            capture.watch(&self.host, &id, &request.conditions).await?;
        }
        if request.follow {
            capture.follow(&self.host).await?;
        }
        drop(model);
        let (to, told) = mpsc::channel(1);
        let host = self.host.clone();
        if !request.follow {
            let events = tokens::begin(&host, wire, deadline).await?;
            tokio::spawn(capture.tell(host, to, ended(events)));
            return Ok(Response::new(ReceiverStream::new(told)));
        }
        tokio::spawn(async move {
            if capture.tell_plan(&to).await.is_err() {
                return;
            }
            match tokens::begin(&host, wire, deadline).await {
                Ok(events) => capture.tell(host, to, ended(events)).await,
                Err(error) => {
                    let _ = to.send(Err(error.into())).await;
                    host.engine().leave_alone().await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(told)))
    }

    type GuardStream = Answers<v1::GuardEvent>;

    async fn guard(
        &self,
        request: Request<v1::GuardRequest>,
    ) -> Result<Response<Self::GuardStream>, Status> {
        self.note("Guard", request.extensions());
        let request = request.into_inner();
        self.is_for_us(&request.worker)?;
        let model = self.host.model(&request.model)?;
        let (to, events) = mpsc::channel(limits::HIT_BUFFER);
        guard(self.host.clone(), &model, request, to).await?;
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn memory(
        &self,
        request: Request<v1::MemoryMapRequest>,
    ) -> Result<Response<v1::MemoryMap>, Status> {
        self.note("Memory", request.extensions());
        let v1::MemoryMapRequest { worker, handles } = request.into_inner();
        self.is_for_us(&worker)?;
        Ok(Response::new(memory(&self.host, handles).await?))
    }

    type TraceStream = Answers<v1::TracePiece>;

    async fn trace(
        &self,
        request: Request<v1::TraceRequest>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        self.note("Trace", request.extensions());
        let request = request.into_inner();
        self.is_for_us(&request.worker)?;
        let extent = Extent::checked(request.duration_ms, request.steps)?;
        let watching = self.watching(request.nodes)?;
        let (to, pieces) = mpsc::channel(1);
        tokio::spawn(trace(self.host.clone(), watching, extent, to));
        Ok(Response::new(ReceiverStream::new(pieces)))
    }
}

/// Reads a request's events, and says how it ended if that was badly.
async fn ended(mut events: Events) -> Option<Status> {
    while let Some(event) = events.next().await {
        match event {
            Err(status) => return Some(status),
            Ok(event) if matches!(event.event, Some(Event::Finished(_))) => return None,
            Ok(_) => {}
        }
    }
    None
}
