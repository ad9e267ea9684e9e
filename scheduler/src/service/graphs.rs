//! `hotcell.v1.Graphs`: graphs that are kept under names.

use std::time::Duration;

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        ClearGraphRequest, ClearGraphResponse, ForgetGraphRequest, ForgetGraphResponse,
        ListGraphsRequest, ListGraphsResponse, SaveGraphChunk, SavedGraph, graphs_server::Graphs,
    },
};
use tokio::{sync::Semaphore, time::timeout};
use tonic::{Request, Response, Status, Streaming};

use super::{Shared, deadline, within};
use crate::{access::Caller, admission::draining, graphs::Constants};

/// Graphs that come in at once; each may hold as many bytes as a saved one.
static COMING: Semaphore = Semaphore::const_new(2);
/// How long the next chunk may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long all of one may take.
const WHOLE: Duration = Duration::from_secs(120);

/// The service.
pub(super) struct Service(pub Shared);

async fn next(chunks: &mut Streaming<SaveGraphChunk>) -> Result<Option<SaveGraphChunk>, Error> {
    let late = |_| {
        let what = format!("no more of the graph came for {PATIENCE:?}");
        Error::new(Reason::DeadlineExceeded, what)
    };
    let next = timeout(PATIENCE, chunks.message()).await.map_err(late)?;
    next.map_err(|status| Error::from_status(&status))
}

impl Service {
    async fn keep(
        &self,
        caller: &Caller,
        mut chunks: Streaming<SaveGraphChunk>,
    ) -> Result<SavedGraph, Error> {
        if self.0.admission.is_closed() {
            return Err(draining());
        }
        let failed = |e| Error::new(Reason::Internal, format!("no place for a graph: {e}"));
        let _place = COMING.acquire().await.map_err(failed)?;
        let first = next(&mut chunks).await?.unwrap_or_default();
        let head = first.head.ok_or_else(|| {
            let what = "the first chunk has no head, which names the graph";
            Error::new(Reason::InvalidArgument, what)
        })?;
        let (graph, limit) = (head.graph.len(), limits::MAX_GRAPH_BYTES);
        if graph > limit {
            let what = format!("a graph of {graph} bytes; {limit} are allowed");
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
        }
        self.0.graphs.may_save(&self.0, &head, caller)?;
        let mut constants = Constants::new()?;
        constants.push(&first.data)?;
        while let Some(chunk) = next(&mut chunks).await? {
            if chunk.head.is_some() || chunk.data.is_empty() {
                let what = "a chunk after the first one has a head, or nothing";
                return Err(Error::new(Reason::InvalidArgument, what));
            }
            constants.push(&chunk.data)?;
        }
        let saved = self.0.graphs.save(&self.0, caller, head, constants).await?;
        self.0.oip.forget(saved.name.as_str());
        tracing::info!(
            graph = %saved.name,
            bytes = saved.bytes(),
            by = %caller.name,
            "a graph was saved"
        );
        Ok(saved.told())
    }
}

#[tonic::async_trait]
impl Graphs for Service {
    async fn save(
        &self,
        request: Request<Streaming<SaveGraphChunk>>,
    ) -> Result<Response<SavedGraph>, Status> {
        let (metadata, extensions, chunks) = request.into_parts();
        let caller = Caller::of(&extensions);
        let keep = async {
            let late = |_| {
                let what = format!("the graph did not come within {WHOLE:?}");
                Error::new(Reason::DeadlineExceeded, what)
            };
            tokio::select! {
                () = self.0.abort.cancelled() => Err(draining()),
                kept = timeout(WHOLE, self.keep(&caller, chunks)) => kept.map_err(late)?,
            }
        };
        let saved = within(deadline(&metadata)?, keep).await?;
        Ok(Response::new(saved))
    }

    async fn list(
        &self,
        request: Request<ListGraphsRequest>,
    ) -> Result<Response<ListGraphsResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let graphs = self.0.graphs.list(&caller);
        let graphs = graphs.iter().map(|saved| saved.told()).collect();
        Ok(Response::new(ListGraphsResponse { graphs }))
    }

    async fn forget(
        &self,
        request: Request<ForgetGraphRequest>,
    ) -> Result<Response<ForgetGraphResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let name = &request.get_ref().name;
        self.0.graphs.forget(name, &caller).await?;
        self.0.oip.forget(name);
        tracing::info!(graph = name, by = %caller.name, "a graph was forgotten");
        Ok(Response::new(ForgetGraphResponse {}))
    }

    async fn clear(
        &self,
        request: Request<ClearGraphRequest>,
    ) -> Result<Response<ClearGraphResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let name = &request.get_ref().name;
        self.0.graphs.clear(name, &caller)?;
        tracing::info!(graph = name, by = %caller.name, "nothing is held against a graph any more");
        Ok(Response::new(ClearGraphResponse {}))
    }
}
