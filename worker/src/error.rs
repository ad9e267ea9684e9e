//! How this worker's failures become the errors that cross its boundary.

use hotcell_graph::GraphError;
use hotcell_kernels::backend::DeviceError;
use hotcell_proto::error::{Error, Reason};

use crate::{
    format::ModelError,
    generate::sampler::SamplingError,
    model::{run::RunError, weave::BuildError},
    text::TextError,
};

/// A model that could not be opened.
pub fn of_model(error: &ModelError) -> Error {
    let reason = match error {
        ModelError::NotAModel { .. } | ModelError::MissingFile { .. } => Reason::NotAModel,
        ModelError::Unsupported { .. } => Reason::ModelUnsupported,
        ModelError::MissingTensor { .. }
        | ModelError::Corrupt { .. }
        | ModelError::ShapeMismatch { .. } => Reason::ModelCorrupt,
        ModelError::TooLarge { .. } => Reason::LimitExceeded,
    };
    Error::new(reason, error.to_string())
}

/// A model that could not be made ready on the device.
pub fn of_run(error: &RunError) -> Error {
    match error {
        RunError::Build(BuildError::Model(e)) => of_model(e),
        RunError::Build(BuildError::Graph(_)) => {
            Error::new(Reason::ModelCorrupt, error.to_string())
        }
        RunError::Device(e) => of_device(e),
    }
}

/// A device that failed.
pub fn of_device(error: &DeviceError) -> Error {
    let reason = match error {
        DeviceError::OutOfMemory { .. } => Reason::OutOfMemory,
        DeviceError::Unsupported { .. } => Reason::ModelUnsupported,
        _ => Reason::Internal,
    };
    Error::new(reason, error.to_string())
}

/// A graph or spec that is refused.
pub fn of_graph(error: &GraphError) -> Error {
    let reason = match error {
        GraphError::Limit(_) => Reason::LimitExceeded,
        _ => Reason::GraphInvalid,
    };
    Error::new(reason, error.to_string())
}

/// A client's plan that could not be made or executed.
pub fn of_plan(error: &DeviceError) -> Error {
    let reason = match error {
        DeviceError::Graph(error) => return of_graph(error),
        DeviceError::IndexOutOfRange { op, index, bound } => {
            return Error::new(Reason::IndexOutOfRange, error.to_string())
                .with("op", op)
                .with("index", index)
                .with("bound", bound);
        }
        DeviceError::OutOfMemory { .. } => Reason::OutOfMemory,
        DeviceError::Unsupported { .. } => Reason::OpUnsupported,
        DeviceError::Binding(_) => Reason::GraphInvalid,
        _ => Reason::Internal,
    };
    Error::new(reason, error.to_string())
}

/// Text that could not be made into tokens.
pub fn of_text(error: &TextError) -> Error {
    let reason = match error {
        TextError::BadTokenizer(_) => Reason::ModelCorrupt,
        TextError::Unsupported(_) | TextError::UnknownPreTokenizer(_) => Reason::ModelUnsupported,
        TextError::TooLarge { .. } => Reason::LimitExceeded,
        TextError::Encode(_) | TextError::UnknownToken { .. } | TextError::Stop(_) => {
            Reason::InvalidArgument
        }
        TextError::Panicked(_) => Reason::Internal,
        TextError::NoChatTemplate
        | TextError::Template { .. }
        | TextError::TemplateLimit { .. } => Reason::TemplateFailed,
    };
    Error::new(reason, error.to_string())
}

/// Sampling parameters that are refused, or logits from which no token can be drawn.
pub fn of_sampling(error: &SamplingError) -> Error {
    let reason = match error {
        SamplingError::OutOfRange { .. }
        | SamplingError::BiasToken { .. }
        | SamplingError::BiasTwice { .. } => Reason::InvalidSampling,
        _ => Reason::NumericsFailed,
    };
    Error::new(reason, error.to_string())
}
