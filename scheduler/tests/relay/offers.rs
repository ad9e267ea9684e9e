//! A scheduler that drains, and another host that answers its offers as it likes.

use std::{path::PathBuf, sync::Mutex};

use hotcell_proto::v1::{
    Accepted, AttachRequest, CancelStreamRequest, CancelStreamResponse, DetokenizeRequest,
    DetokenizeResponse, EmbedRequest, EmbedResponse, GenerateEvent, NumericsClass, TokenizeRequest,
    TokenizeResponse,
    tokens_server::{Tokens, TokensServer},
};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Response, transport::Server};

use super::{
    away::{begun, drain, held_at, refused, taken},
    readers::named,
    *,
};

/// How it answers.
#[derive(Clone)]
enum Says {
    Refuses(Reason),
    /// Accepts, for the tenant with this name in hexadecimal; none: it does not say for whom.
    Accepts(Option<&'static str>),
}

#[derive(Default)]
struct Heard {
    /// Whether each offer said that it is one.
    offers: Mutex<Vec<bool>>,
    cancelled: Mutex<Vec<String>>,
}

struct Odd {
    heard: Arc<Heard>,
    says: Says,
}

type Events = ReceiverStream<Result<GenerateEvent, Status>>;

#[tonic::async_trait]
impl Tokens for Odd {
    type GenerateStream = Events;
    type AttachStream = Events;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Events>, Status> {
        let offer = request.metadata().contains_key("hotcell-handover");
        let request = request.into_inner();
        let tenant = match self.says.clone() {
            Says::Refuses(reason) => {
                self.heard.offers.lock().unwrap().push(offer);
                return Err(Error::new(reason, "I refuse").into());
            }
            Says::Accepts(tenant) => tenant,
        };
        let (to, from) = tokio::sync::mpsc::channel(1);
        let accepted = Accepted {
            request_id: request.request_id,
            model: request.model,
            prompt_ids: vec![1, 2, 3],
            seed: 5,
            numerics: Some(NumericsClass {
                id: "fake/class".into(),
                ..NumericsClass::default()
            }),
        };
        let event = Some(Event::Accepted(accepted));
        to.send(Ok(GenerateEvent { event })).await.unwrap();
        // It says no more, and does not end.
        tokio::spawn(async move { to.closed().await });
        let mut answer = Response::new(ReceiverStream::new(from));
        if let Some(tenant) = tenant {
            let tenant = tenant.parse().unwrap();
            answer.metadata_mut().insert("hotcell-tenant", tenant);
        }
        self.heard.offers.lock().unwrap().push(offer);
        Ok(answer)
    }

    async fn attach(&self, _: Request<AttachRequest>) -> Result<Response<Events>, Status> {
        Err(Status::unimplemented("nobody comes back"))
    }

    async fn cancel(
        &self,
        request: Request<CancelStreamRequest>,
    ) -> Result<Response<CancelStreamResponse>, Status> {
        let id = request.into_inner().request_id;
        self.heard.cancelled.lock().unwrap().push(id);
        Ok(Response::new(CancelStreamResponse {}))
    }

    async fn tokenize(
        &self,
        _: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn detokenize(
        &self,
        _: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn embed(&self, _: Request<EmbedRequest>) -> Result<Response<EmbedResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }
}

/// Where it listens, until the folder is dropped, and what it hears.
fn odd(says: Says) -> (TempDir, PathBuf, Arc<Heard>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
    let heard = Arc::new(Heard::default());
    let odd = Odd {
        heard: Arc::clone(&heard),
        says,
    };
    let server = Server::builder().add_service(TokensServer::new(odd));
    tokio::spawn(server.serve_with_incoming(incoming));
    (dir, path, heard)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_would_run_for_another_tenant_stays_here_and_is_cancelled_there() {
    // "bob", and no word about it.
    for tenant in [Some("626f62"), None] {
        let (_dir, path, heard) = odd(Says::Accepts(tenant));
        let house = held_at(10).await;
        let asked = GenerateRequest {
            tenant: "alice".into(),
            ..named("mine", 32)
        };
        let running = begun(&house, asked, 10).await;
        drain(&house, path);
        until(|| !heard.cancelled.lock().unwrap().is_empty()).await;
        house.stage.hold_at.store(0, Ordering::SeqCst);
        running.end().await.check(&[1, 2, 3], 5, 32, 0);
        assert_eq!((taken(&house), refused(&house)), (0, 1));
        assert_eq!(*heard.cancelled.lock().unwrap(), ["mine"]);
        assert_eq!(*heard.offers.lock().unwrap(), [true]);
        house.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_other_host_did_not_begin_is_not_cancelled_there() {
    let (_dir, path, heard) = odd(Says::Refuses(Reason::ModelNotFound));
    let house = held_at(10).await;
    let running = begun(&house, named("mine", 32), 10).await;
    drain(&house, path);
    // An offer ends with what it cancels.
    until(|| refused(&house) == 2).await;
    house.stage.hold_at.store(0, Ordering::SeqCst);
    running.end().await.check(&[1, 2, 3], 5, 32, 0);
    assert!(heard.cancelled.lock().unwrap().is_empty());
    assert_eq!(*heard.offers.lock().unwrap(), [true, true]);
    house.end().await;
}
