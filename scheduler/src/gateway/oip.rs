//! The Open Inference Protocol, version 2, with Triton's extensions: over gRPC, and as JSON under `/v2`.
//!
//! A model is one text that goes in and one that comes out, with the tensors' names of vLLM's models in Triton, so that
//! clients made for those work: `text_input`, `stream`, `sampling_parameters` and `exclude_input_in_output` make
//! `text_output`. Tensors come as bytes, in fields of their types, or in memory that a client on this host shares.

mod graph;
mod grpc;
mod infer;
mod model;
mod peer;
mod regions;
mod repository;
mod rest;
mod sampling;
mod settings;
mod statistics;
mod tensor;
mod work;

use hotcell_gateways::inference::grpc_inference_service_server::{
    GrpcInferenceService, GrpcInferenceServiceServer,
};
use hotcell_proto::limits;

use crate::service::Shared;

pub(super) use rest::routes;

/// The service's name on the wire.
pub(crate) use hotcell_gateways::inference::grpc_inference_service_server::SERVICE_NAME;

/// The service, for what a scheduler has.
pub(crate) fn server(shared: &Shared) -> GrpcInferenceServiceServer<impl GrpcInferenceService> {
    GrpcInferenceServiceServer::new(grpc::Service(shared.clone()))
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
}

/// What is kept between calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Oip {
    regions: regions::Regions,
    statistics: statistics::Statistics,
}

impl Oip {
    /// A saved graph is gone, or another one.
    pub(crate) fn forget(&self, name: &str) {
        self.statistics.forget(name);
    }
}

/// Extensions of the protocol that are served.
const EXTENSIONS: &[&str] = &[
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
];
