//! Models as this protocol tells of them: a text goes in and a text comes out, as with vLLM's models in Triton; or, of a
//! saved graph, tensors.

use std::sync::Arc;

use hotcell_gateways::inference::{
    DataType, ModelConfig, ModelInput, ModelMetadataResponse, ModelOutput, ModelStatisticsResponse,
    ModelTransactionPolicy, RepositoryIndexResponse, model_metadata_response::TensorMetadata,
    repository_index_response::ModelIndex,
};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{ModelInfo, ModelState},
};

use super::{
    graph,
    tensor::{Datatype, short},
};
use crate::{
    access::Caller,
    graphs::{Port, Saved},
    service::Shared,
};

/// Every model has this one version.
pub(super) const VERSION: &str = "1";
/// What models run on.
const PLATFORM: &str = "hotcell";

pub(super) const TEXT_INPUT: &str = "text_input";
pub(super) const STREAM: &str = "stream";
pub(super) const SAMPLING: &str = "sampling_parameters";
pub(super) const EXCLUDE_INPUT: &str = "exclude_input_in_output";

/// Inputs, and whether each has to be there.
pub(super) const INPUTS: &[(&str, Datatype, bool)] = &[
    (TEXT_INPUT, Datatype::Bytes, true),
    (STREAM, Datatype::Bool, false),
    (SAMPLING, Datatype::Bytes, false),
    (EXCLUDE_INPUT, Datatype::Bool, false),
    ("return_finish_reason", Datatype::Bool, false),
    ("return_num_input_tokens", Datatype::Bool, false),
    ("return_num_output_tokens", Datatype::Bool, false),
];

/// What comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    Text,
    FinishReason,
    InputTokens,
    Generated,
}

impl Output {
    pub const ALL: &'static [(Self, &'static str, Datatype)] = &[
        (Self::Text, "text_output", Datatype::Bytes),
        (Self::FinishReason, "finish_reason", Datatype::Bytes),
        (Self::InputTokens, "num_input_tokens", Datatype::Uint32),
        (Self::Generated, "num_output_tokens", Datatype::Uint32),
    ];

    /// The output of this name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`].
    pub fn of(name: &str) -> Result<Self, Error> {
        let row = Self::ALL.iter().find(|(_, known, _)| *known == name);
        row.map(|(output, ..)| *output).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(_, name, _)| *name).collect();
            let what = format!(
                "{:?} does not come out; there is {}",
                short(name),
                names.join(", ")
            );
            Error::new(Reason::InvalidArgument, what)
        })
    }

    /// Its name and type.
    pub fn told(self) -> (&'static str, Datatype) {
        let row = Self::ALL.iter().find(|(output, ..)| *output == self);
        row.map_or(("", Datatype::Bytes), |(_, name, datatype)| {
            (*name, *datatype)
        })
    }
}

/// What a name stands for.
pub(super) enum Model {
    /// A model that writes text.
    Text(Box<ModelInfo>),
    /// A saved graph.
    Graph(Arc<Saved>),
}

impl Model {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Text(model) => &model.name,
            Self::Graph(saved) => saved.name.as_str(),
        }
    }
}

/// The model of this name and version.
///
/// # Errors
/// [`Reason::ModelNotFound`], [`Reason::ModelNotAllowed`].
pub(super) fn find(
    shared: &Shared,
    (name, version): (&str, &str),
    caller: &Caller,
) -> Result<Model, Error> {
    // A model's name comes first, if it came to be one after the graph's.
    let graph = match shared.fleet.resolve(name) {
        Ok(_) => None,
        Err(_) => shared.graphs.find(name, caller),
    };
    let name = match &graph {
        Some(saved) => saved.name.clone(),
        None => {
            shared.may_name(name, caller)?;
            shared.fleet.resolve(name)?
        }
    };
    if !version.is_empty() && version != VERSION {
        let what = format!(
            "model {name} has no version {:?}; it has {VERSION}",
            short(version)
        );
        return Err(Error::new(Reason::ModelNotFound, what).with("model", name));
    }
    Ok(match graph {
        Some(saved) => Model::Graph(saved),
        None => Model::Text(Box::new(shared.fleet.model(name.as_str())?)),
    })
}

/// Whether a request for a model can be served now.
pub(super) fn is_ready(shared: &Shared, model: &Model) -> bool {
    match model {
        Model::Text(model) => text_is_ready(shared, model),
        Model::Graph(saved) => shared.is_serving() && !saved.suspect.is_refused(),
    }
}

fn text_is_ready(shared: &Shared, model: &ModelInfo) -> bool {
    let open = !shared.admission.is_closed();
    open && match model.state() {
        ModelState::Loaded => !model.workers.is_empty(),
        // The request has it loaded.
        ModelState::Asleep => true,
        _ => false,
    }
}

/// Its inputs and outputs.
pub(super) fn metadata(model: &Model) -> ModelMetadataResponse {
    let (inputs, outputs) = match model {
        Model::Text(_) => text_tensors(),
        Model::Graph(saved) => {
            let described = |ports: &[Port]| {
                let each = ports.iter().map(|port| {
                    let (datatype, shape) = graph::described(port);
                    TensorMetadata {
                        name: port.name.clone(),
                        datatype: datatype.name().to_owned(),
                        shape,
                    }
                });
                each.collect()
            };
            (described(&saved.inputs), described(&saved.outputs))
        }
    };
    ModelMetadataResponse {
        name: model.name().to_owned(),
        versions: vec![VERSION.to_owned()],
        platform: PLATFORM.to_owned(),
        inputs,
        outputs,
    }
}

/// Inputs and outputs of a model that writes text.
fn text_tensors() -> (Vec<TensorMetadata>, Vec<TensorMetadata>) {
    let tensor = |name: &str, datatype: Datatype| TensorMetadata {
        name: name.to_owned(),
        datatype: datatype.name().to_owned(),
        shape: vec![1],
    };
    let inputs = INPUTS
        .iter()
        .map(|(name, datatype, _)| tensor(name, *datatype));
    let outputs = Output::ALL
        .iter()
        .map(|(_, name, datatype)| tensor(name, *datatype));
    (inputs.collect(), outputs.collect())
}

/// The number that a configuration has for a type.
fn data_type(datatype: Datatype) -> DataType {
    match datatype {
        Datatype::Bool => DataType::TypeBool,
        Datatype::Uint8 => DataType::TypeUint8,
        Datatype::Uint16 => DataType::TypeUint16,
        Datatype::Uint32 => DataType::TypeUint32,
        Datatype::Uint64 => DataType::TypeUint64,
        Datatype::Int8 => DataType::TypeInt8,
        Datatype::Int16 => DataType::TypeInt16,
        Datatype::Int32 => DataType::TypeInt32,
        Datatype::Int64 => DataType::TypeInt64,
        Datatype::Fp16 => DataType::TypeFp16,
        Datatype::Bf16 => DataType::TypeBf16,
        Datatype::Fp32 => DataType::TypeFp32,
        Datatype::Fp64 => DataType::TypeFp64,
        Datatype::Bytes => DataType::TypeString,
    }
}

/// Its configuration.
pub(super) fn config(model: &Model) -> ModelConfig {
    let (input, output, decoupled) = match model {
        Model::Text(_) => {
            let (input, output) = text_config();
            (input, output, true)
        }
        Model::Graph(saved) => {
            let input = |port: &Port| {
                let (datatype, dims) = graph::described(port);
                ModelInput {
                    name: port.name.clone(),
                    data_type: data_type(datatype).into(),
                    dims,
                    optional: false,
                }
            };
            let output = |port: &Port| {
                let (datatype, dims) = graph::described(port);
                ModelOutput {
                    name: port.name.clone(),
                    data_type: data_type(datatype).into(),
                    dims,
                }
            };
            let inputs = saved.inputs.iter().map(input).collect();
            (inputs, saved.outputs.iter().map(output).collect(), false)
        }
    };
    ModelConfig {
        name: model.name().to_owned(),
        platform: PLATFORM.to_owned(),
        backend: PLATFORM.to_owned(),
        // One request is one text; requests are batched whatever they say. Of a graph, rows are among its axes.
        max_batch_size: 0,
        input,
        output,
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled }),
    }
}

fn text_config() -> (Vec<ModelInput>, Vec<ModelOutput>) {
    let inputs = INPUTS.iter().map(|(name, datatype, needed)| ModelInput {
        name: (*name).to_owned(),
        data_type: data_type(*datatype).into(),
        dims: vec![1],
        optional: !needed,
    });
    let outputs = Output::ALL.iter().map(|(_, name, datatype)| ModelOutput {
        name: (*name).to_owned(),
        data_type: data_type(*datatype).into(),
        dims: vec![1],
    });
    (inputs.collect(), outputs.collect())
}

/// All models, or those that are ready.
pub(super) fn index(shared: &Shared, ready: bool, caller: &Caller) -> RepositoryIndexResponse {
    let models = shared.fleet.models().into_iter();
    let models = models.filter(|model| !ready || text_is_ready(shared, model));
    let models = models.map(|model| {
        let (state, reason) = match model.state() {
            _ if text_is_ready(shared, &model) => ("READY", String::new()),
            ModelState::Loading => ("LOADING", String::new()),
            ModelState::Failed => ("UNAVAILABLE", model.problem.clone()),
            ModelState::Loaded => ("UNAVAILABLE", "no worker has it now".to_owned()),
            ModelState::Retiring => ("UNLOADING", "another one takes its place".to_owned()),
            ModelState::Asleep | ModelState::Available | ModelState::Unspecified => {
                ("UNAVAILABLE", "it is not loaded".to_owned())
            }
        };
        ModelIndex {
            name: model.name,
            version: VERSION.to_owned(),
            state: state.to_owned(),
            reason,
        }
    });
    let serving = shared.is_serving();
    let graphs = shared.graphs.list(caller).into_iter();
    let is_ready = |saved: &Arc<Saved>| serving && !saved.suspect.is_refused();
    let graphs = graphs.filter(|saved| !ready || is_ready(saved));
    let graphs = graphs.map(|saved| {
        let (state, reason) = match serving {
            _ if saved.suspect.is_refused() => ("UNAVAILABLE", "workers died of it"),
            true => ("READY", ""),
            false => ("UNAVAILABLE", "no worker is ready"),
        };
        ModelIndex {
            name: saved.name.to_string(),
            version: VERSION.to_owned(),
            state: state.to_owned(),
            reason: reason.to_owned(),
        }
    });
    RepositoryIndexResponse {
        models: models.chain(graphs).collect(),
    }
}

/// What was served of a model, or of all of them without a name.
///
/// # Errors
/// As [`find`].
pub(super) fn statistics(
    shared: &Shared,
    (name, version): (&str, &str),
    caller: &Caller,
) -> Result<ModelStatisticsResponse, Error> {
    let names = match name {
        "" => {
            let models = shared.fleet.models().into_iter().map(|model| model.name);
            let graphs = shared.graphs.list(caller);
            let graphs = graphs.iter().map(|saved| saved.name.to_string());
            models.chain(graphs).collect()
        }
        name => vec![find(shared, (name, version), caller)?.name().to_owned()],
    };
    let stats = names.iter().map(|name| shared.oip.statistics.of(name));
    Ok(ModelStatisticsResponse {
        model_stats: stats.collect(),
    })
}
