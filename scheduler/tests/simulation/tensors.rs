//! Tensor sessions: simulated workers that serve them, and clients that hold one each.
//!
//! What a session holds dies with its worker, and its client must be told so: nothing may hang, no call may reach another
//! process than the session's, and nothing may be left of a session that is over.

use std::{pin::Pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    session::{SESSION_KEY, SessionId, WORKER_KEY},
    v1::{
        self, MemoryRequest, MemoryResponse, OpenSessionRequest, SessionEvent, SessionOpened,
        session_event::Event, tensors_client::TensorsClient, tensors_server::Tensors,
    },
};
use hotcell_scheduler::service::{Passed, Shared};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{chance::Chance, worker::SimulatedWorker, world::World};

/// Nothing takes longer by the clock here, whatever hangs.
const LONGEST: Duration = Duration::from_secs(120);

type Answer<T> = Result<Response<T>, Status>;
type Never<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn none<T>() -> Answer<T> {
    Err(Status::unimplemented("not in this world"))
}

#[tonic::async_trait]
impl Tensors for SimulatedWorker {
    type OpenSessionStream = ReceiverStream<Result<SessionEvent, Status>>;
    type DownloadStream = Never<v1::DownloadChunk>;
    type ExecuteManyStream = Never<v1::ExecuteResponse>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Answer<v1::DescribeResponse> {
        self.living().await;
        Ok(Response::new(v1::DescribeResponse {
            memory_bytes: self.life.pid.into(),
            ..v1::DescribeResponse::default()
        }))
    }

    async fn open_session(
        &self,
        request: Request<OpenSessionRequest>,
    ) -> Answer<Self::OpenSessionStream> {
        let id = SessionId::of(request.metadata())?;
        sleep(self.life.draw(|c| c.ms(0, 3))).await;
        self.living().await;
        let session = id.to_string();
        self.life.open_session(&session);
        let (sender, receiver) = mpsc::channel(1);
        let opened = SessionOpened {
            session: session.clone(),
            // By which its client knows it again.
            max_bytes: self.life.pid.into(),
            ..SessionOpened::default()
        };
        let _ = sender.try_send(Ok(SessionEvent {
            event: Some(Event::Opened(opened)),
        }));
        let life = Arc::clone(&self.life);
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = life.token().cancelled() => {}
                () = sender.closed() => {}
            }
            life.close_session(&session);
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn memory(&self, request: Request<MemoryRequest>) -> Answer<MemoryResponse> {
        let id = SessionId::of(request.metadata())?;
        if !self.life.has_session(&id.to_string()) {
            let what = "a call reached a process that does not have its session";
            self.life.world.wrong(what);
        }
        let (strikes, after) = self.life.draw(|c| (c.percent(6), c.ms(1, 5_000)));
        if strikes && self.life.world.fault() {
            self.life.note("a tensor call hangs");
            self.life.die_in(after);
            std::future::pending::<()>().await;
        }
        sleep(self.life.draw(|c| c.ms(0, 30))).await;
        self.living().await;
        Ok(Response::new(MemoryResponse {
            memory_limit: self.life.pid.into(),
            ..MemoryResponse::default()
        }))
    }

    async fn create(&self, _: Request<v1::CreateRequest>) -> Answer<v1::TensorInfo> {
        none()
    }

    async fn upload(&self, _: Request<Streaming<v1::UploadChunk>>) -> Answer<v1::UploadResponse> {
        none()
    }

    async fn download(&self, _: Request<v1::DownloadRequest>) -> Answer<Self::DownloadStream> {
        none()
    }

    async fn free(&self, _: Request<v1::FreeRequest>) -> Answer<v1::FreeResponse> {
        none()
    }

    async fn list(&self, _: Request<v1::ListRequest>) -> Answer<v1::ListResponse> {
        none()
    }

    async fn compile(&self, _: Request<v1::CompileRequest>) -> Answer<v1::CompileResponse> {
        none()
    }

    async fn execute(&self, _: Request<v1::ExecuteRequest>) -> Answer<v1::ExecuteResponse> {
        none()
    }

    async fn execute_many(
        &self,
        _: Request<Streaming<v1::ExecuteRequest>>,
    ) -> Answer<Self::ExecuteManyStream> {
        none()
    }

    async fn synchronize(
        &self,
        _: Request<v1::SynchronizeRequest>,
    ) -> Answer<v1::SynchronizeResponse> {
        none()
    }

    async fn cancel(&self, _: Request<v1::CancelRequest>) -> Answer<v1::CancelResponse> {
        none()
    }

    async fn list_weights(
        &self,
        _: Request<v1::ListWeightsRequest>,
    ) -> Answer<v1::ListWeightsResponse> {
        none()
    }

    async fn get_weight(&self, _: Request<v1::GetWeightRequest>) -> Answer<v1::TensorInfo> {
        none()
    }

    async fn import_shared(&self, _: Request<v1::ImportSharedRequest>) -> Answer<v1::TensorInfo> {
        none()
    }
}

/// A client that holds one session.
pub struct Holder {
    world: Arc<World>,
    client: TensorsClient<Passed>,
    name: String,
    chance: Chance,
    workers: usize,
}

impl Holder {
    pub fn new(world: &Arc<World>, shared: &Shared, name: &str, workers: usize) -> Self {
        Self {
            world: Arc::clone(world),
            client: TensorsClient::new(Passed(shared.clone())),
            name: name.to_owned(),
            chance: world.chance(name),
            workers,
        }
    }

    fn note(&self, what: impl AsRef<str>) {
        self.world.note(format!("{} {}", self.name, what.as_ref()));
    }

    fn wrong(&self, what: impl AsRef<str>) {
        self.world.wrong(format!("{} {}", self.name, what.as_ref()));
    }

    /// Whether it may be told this.
    fn check(&self, status: &Status, opening: bool) {
        let Some(error) = Error::typed(status) else {
            return self.wrong(format!("gets an untyped status: {status:?}"));
        };
        let reason = error.reason();
        self.note(reason.name());
        let excused = match reason {
            // Nobody waits for a worker to come up.
            Reason::NoWorker => opening,
            other => self.world.is_excused(0, other),
        };
        if !excused {
            self.wrong(format!("gets {}, for no reason: {error}", reason.name()));
        }
    }

    /// Opens a session, calls for a while, and closes it; or is told why not.
    pub async fn run(mut self) {
        let mut request = Request::new(OpenSessionRequest::default());
        if self.chance.percent(50) {
            let worker = format!("w{}", self.chance.below(self.workers as u64));
            let worker = worker.parse().unwrap();
            request.metadata_mut().insert(WORKER_KEY, worker);
        }
        let opening = async {
            let mut lease = self.client.open_session(request).await?.into_inner();
            let first = lease.message().await?;
            Ok::<_, Status>((lease, first))
        };
        let (mut lease, opened) = match timeout(LONGEST, opening).await {
            Err(_) => return self.wrong("hangs while it opens a session"),
            Ok(Err(status)) => return self.check(&status, true),
            Ok(Ok((lease, Some(first)))) => match first.event {
                Some(Event::Opened(opened)) => (lease, opened),
                other => return self.wrong(format!("opens a session and hears {other:?}")),
            },
            Ok(Ok((_, None))) => return self.wrong("opens a session and hears nothing"),
        };
        self.note("has a session");
        let session = opened.session.parse::<tonic::metadata::MetadataValue<_>>();
        let session = session.unwrap();
        for _ in 0..self.chance.within(1, 12) {
            sleep(self.chance.ms(0, 800)).await;
            let mut request = Request::new(MemoryRequest::default());
            request.metadata_mut().insert(SESSION_KEY, session.clone());
            match timeout(LONGEST, self.client.memory(request)).await {
                Err(_) => return self.wrong("hangs in a call"),
                Ok(Ok(answer)) if answer.get_ref().memory_limit == opened.max_bytes => {}
                Ok(Ok(answer)) => {
                    return self.wrong(format!("is answered by another process: {answer:?}"));
                }
                Ok(Err(status)) => {
                    self.check(&status, false);
                    // The lease is over as well, and says why.
                    match timeout(LONGEST, lease.message()).await {
                        Ok(Err(status)) => self.check(&status, false),
                        Ok(Ok(event)) => self.wrong(format!("hears {event:?} from a lost worker")),
                        Err(_) => self.wrong("holds a lease on a lost worker"),
                    }
                    return;
                }
            }
        }
        self.note("closes its session");
    }
}
