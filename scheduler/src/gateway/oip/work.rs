//! A request, read for the kind of model that it is for.

use hotcell_gateways::inference::ModelInferRequest;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};

use super::{
    Oip, graph,
    infer::{Ask, By, few},
    model::{self, Model},
    tensor::invalid,
};
use crate::service::Shared;

/// What a request asks for.
pub(super) enum Work {
    /// Text of a model.
    Text(Box<Ask>),
    /// Tensors of a saved graph.
    Graph(graph::Ask),
}

impl Work {
    /// Reads a request.
    ///
    /// # Errors
    /// Why it makes no sense, or may not be made.
    pub(super) fn read(
        oip: &Oip,
        shared: &Shared,
        by: &By<'_>,
        asked: ModelInferRequest,
    ) -> Result<Self, Error> {
        let parameters = asked.parameters.len();
        few("parameters", parameters, limits::MAX_INFER_PARAMETERS)?;
        if asked.id.len() > limits::MAX_WORD {
            let limit = limits::MAX_WORD;
            return Err(invalid(format!("a request's id has at most {limit} bytes")));
        }
        let named = (asked.model_name.as_str(), asked.model_version.as_str());
        Ok(match model::find(shared, named, by.caller)? {
            Model::Text(model) => Self::Text(Box::new(Ask::read(oip, by, model.name, asked)?)),
            Model::Graph(saved) => Self::Graph(graph::Ask::read(oip, by, saved, asked)?),
        })
    }

    /// The same, if it is for text.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`Reason::InvalidArgument`] if it is for tensors.
    pub(super) fn text(self) -> Result<Ask, Error> {
        match self {
            Self::Text(ask) => Ok(*ask),
            Self::Graph(ask) => {
                let what = format!(
                    "{} is a graph of tensors, and writes no text",
                    ask.saved.name
                );
                Err(Error::new(Reason::InvalidArgument, what))
            }
        }
    }
}
