//! Compile: graphs are large when decoded, so they are bounded before, and verified and planned beside the event loop and the
//! engine, which only gives the plan its memory.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hotcell_graph::wire::{decode, wire_inputs};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::SessionId,
    v1::{self, tensors_server::TensorsServer},
};
use prost::Message;
use tokio::sync::Semaphore;
use tonic::{Status, body::Body, server::NamedService};
use tower::Service;

use super::TensorsService;
use crate::{
    error::of_graph,
    host::Host,
    session::{compile::Draft, invalid},
};

/// Graphs of one connection that are received and decoded at once. How many the worker plans at once is the
/// host's to say: a connection that sends slowly must not keep the others waiting.
const AT_ONCE: usize = 2;
/// How long one may take from its first byte to its plan.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a compile message besides the graph, at most.
const AROUND_GRAPH: usize = 1024;

impl TensorsService {
    /// Verifies a graph and makes a plan of it.
    pub(super) async fn plan(
        &self,
        session: SessionId,
        request: v1::CompileRequest,
    ) -> Result<v1::CompileResponse, Error> {
        let bounded = |bytes: usize| {
            if bytes > limits::MAX_GRAPH_BYTES {
                let limit = limits::MAX_GRAPH_BYTES;
                let what = format!("a graph of {bytes} bytes; {limit} are allowed");
                return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
            }
            Ok(())
        };
        let is_encoded = !request.encoded.is_empty();
        let graph = match request.graph {
            Some(_) if is_encoded => {
                return Err(invalid("the call has two graphs, one of them encoded"));
            }
            Some(graph) => graph,
            None if is_encoded => {
                bounded(request.encoded.len())?;
                let read = v1::Graph::decode(request.encoded.as_slice());
                read.map_err(|e| invalid(format!("the encoded graph cannot be read: {e}")))?
            }
            None => return Err(invalid("the call has no graph")),
        };
        bounded(graph.encoded_len())?;
        let fuse = !request.no_fusion;
        let terms = self.with(session.clone(), move |s| Ok(s.terms(fuse)));
        let terms = terms.await?;
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(Reason::Internal, format!("planning failed: {e}"))
        };
        let place = self.host.graphs().acquire_owned();
        let place = place.await.map_err(|e| failed(&e))?;
        let planner = self.host.engine().planner();
        let draft = move || {
            let graph = decode(&graph).map_err(|e| of_graph(&e));
            let draft = graph.and_then(|graph| Draft::new(graph, terms, planner.as_ref()));
            // Only here: a call that was given up is planned to its end.
            drop(place);
            draft
        };
        let drafted = tokio::task::spawn_blocking(draft).await;
        let mut draft = drafted.map_err(|e| failed(&e))??;
        let (inputs, max_rows) = match is_encoded {
            true => (wire_inputs(draft.graph()), draft.graph().max_rows() as u64),
            false => (Vec::new(), 0),
        };
        let dry_run = request.dry_run;
        let compiled = self.with(session, move |s| {
            let made = s.compile(&mut draft, dry_run)?;
            // The graph goes back with the answer: to drop a large one takes the engine's time.
            Ok((made, draft))
        });
        let (made, _) = compiled.await?;
        Ok(v1::CompileResponse {
            inputs,
            max_rows,
            ..made
        })
    }
}

/// The service as gRPC, with a lower limit for the messages that carry graphs.
pub fn server(host: Host) -> Bounded {
    let service = Arc::new(TensorsService::new(host));
    let of = |bytes| TensorsServer::from_arc(Arc::clone(&service)).max_decoding_message_size(bytes);
    Bounded {
        graphs: of(limits::MAX_GRAPH_BYTES + AROUND_GRAPH),
        rest: of(limits::MAX_MESSAGE_BYTES),
        places: Arc::new(Semaphore::new(AT_ONCE)),
    }
}

/// See [`server`].
#[derive(Clone)]
pub struct Bounded {
    graphs: TensorsServer<TensorsService>,
    rest: TensorsServer<TensorsService>,
    places: Arc<Semaphore>,
}

impl NamedService for Bounded {
    const NAME: &'static str = <TensorsServer<TensorsService> as NamedService>::NAME;
}

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl Service<http::Request<Body>> for Bounded {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        if request.uri().path() != "/hotcell.v1.Tensors/Compile" {
            return self.rest.call(request);
        }
        let (mut graphs, places) = (self.graphs.clone(), Arc::clone(&self.places));
        Box::pin(async move {
            let answer = async {
                // Not even read before there is a place: what is not read stays with the sender.
                let _place = places.acquire_owned().await;
                graphs.call(request).await
            };
            match tokio::time::timeout(PATIENCE, answer).await {
                Ok(answer) => answer,
                Err(_) => {
                    let what = "compiling took too long; send a smaller graph, or fewer at once";
                    let status = Status::from(Error::new(Reason::DeadlineExceeded, what));
                    Ok(status.into_http())
                }
            }
        })
    }
}
