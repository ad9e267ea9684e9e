//! Graphs that a scheduler keeps under names: models of tensors for every client that speaks the Open Inference Protocol.

use bytes::Bytes;
use hotcell_graph::{Graph, wire};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{self, SaveGraphChunk, SaveGraphHead},
};
use prost::Message;
use tokio_stream::iter;

use crate::connect::Client;

/// A graph to be saved.
#[derive(Clone, Debug, Default)]
pub struct SaveGraph {
    /// Under which name.
    pub name: String,
    /// Takes the place of a graph of this name.
    pub replace: bool,
    /// Names of the outputs, in their order; none: `output_0` and so on.
    pub outputs: Vec<String>,
}

impl SaveGraph {
    /// Under a name that is free.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }
}

impl Client {
    /// Has the scheduler keep a graph with the values of its constant inputs, in their order: row-major, little-endian.
    /// The other inputs' names are those by which each call gives them.
    ///
    /// # Errors
    /// [`Reason::ModelExists`] if the name is taken, [`Reason::GraphInvalid`], [`Reason::InvalidArgument`] if names or
    /// constants do not fit, [`Reason::LimitExceeded`].
    pub async fn save_graph(
        &self,
        saving: &SaveGraph,
        graph: &Graph,
        constants: Vec<Bytes>,
    ) -> Result<v1::SavedGraph, Error> {
        self.save_encoded(saving, &wire::encode(graph), constants)
            .await
    }

    pub(crate) async fn save_encoded(
        &self,
        saving: &SaveGraph,
        graph: &v1::Graph,
        constants: Vec<Bytes>,
    ) -> Result<v1::SavedGraph, Error> {
        let graph = graph.encode_to_vec();
        if graph.len() > limits::MAX_GRAPH_BYTES {
            let (have, limit) = (graph.len(), limits::MAX_GRAPH_BYTES);
            let what = format!("the graph takes {have} bytes, at most {limit} may travel");
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
        }
        let head = SaveGraphHead {
            name: saving.name.clone(),
            graph,
            outputs: saving.outputs.clone(),
            replace: saving.replace,
        };
        let first = SaveGraphChunk {
            head: Some(head),
            data: Vec::new(),
        };
        let pieces = constants.into_iter().flat_map(|mut data| {
            std::iter::from_fn(move || {
                let next = data.split_to(data.len().min(limits::TENSOR_CHUNK));
                (!next.is_empty()).then_some(next)
            })
        });
        let rest = pieces.map(|piece| SaveGraphChunk {
            head: None,
            data: piece.into(),
        });
        let chunks = iter(std::iter::once(first).chain(rest));
        self.scheduler_answer(self.graphs_client().save(chunks).await, KEEPS_NONE)
    }

    /// The saved graphs, by name.
    ///
    /// # Errors
    /// When the scheduler does not answer.
    pub async fn graphs(&self) -> Result<Vec<v1::SavedGraph>, Error> {
        let asked = self.graphs_client().list(v1::ListGraphsRequest {}).await;
        Ok(self.scheduler_answer(asked, KEEPS_NONE)?.graphs)
    }

    /// Has the scheduler forget a graph.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`].
    pub async fn forget_graph(&self, name: &str) -> Result<(), Error> {
        let name = name.to_owned();
        let request = v1::ForgetGraphRequest { name };
        let asked = self.graphs_client().forget(request).await;
        self.scheduler_answer(asked, KEEPS_NONE).map(|_| ())
    }

    /// Has the scheduler serve a graph again that it refuses because workers died of it. Needs the role admin.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`], [`Reason::PermissionDenied`].
    pub async fn clear_graph(&self, name: &str) -> Result<(), Error> {
        let name = name.to_owned();
        let request = v1::ClearGraphRequest { name };
        let asked = self.graphs_client().clear(request).await;
        self.scheduler_answer(asked, KEEPS_NONE).map(|_| ())
    }
}

/// What a worker alone is told to lack.
const KEEPS_NONE: &str = "keeps no graphs";
