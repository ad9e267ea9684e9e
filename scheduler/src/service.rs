//! The gRPC services, and the doors they are served at.

mod accept;
mod control;
mod debug;
mod doors;
mod graphs;
mod handout;
mod http;
mod opening;
mod pace;
mod tensors;
mod timeline;
mod tokens;
mod traced;

use std::{sync::Arc, time::Duration};

use hotcell_proto::{
    error::Error,
    limits,
    v1::{
        self, ConfinementLayer, control_server::ControlServer, debug_server::DebugServer,
        graphs_server::GraphsServer, tokens_server::TokensServer,
    },
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, metadata::MetadataMap, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};

pub use doors::{Doors, Ended, serve};
pub use tensors::Passed;

use crate::{
    access::{Access, Caller},
    admission::Admission,
    audit::Who,
    fleet::Fleet,
    gateway::{self, Protocol, WebOrigin, oip::Oip},
    graphs::Graphs,
    stream::Room,
    streams::Streams,
    takeover::Takeover,
    tensors::Sessions,
    traces::Traces,
};

/// Names under which health is reported, besides the empty one for the whole server.
const HEALTH_NAMES: [&str; 8] = [
    "",
    "hotcell.v1.Tokens",
    "hotcell.v1.Tensors",
    "hotcell.v1.Control",
    "hotcell.v1.Debug",
    "hotcell.v1.Graphs",
    "vllm.grpc.engine.VllmEngine",
    "inference.GRPCInferenceService",
];

/// Services that reflection tells of.
const SERVICES: [&str; 6] = [
    v1::tokens_server::SERVICE_NAME,
    v1::tensors_server::SERVICE_NAME,
    v1::graphs_server::SERVICE_NAME,
    v1::control_server::SERVICE_NAME,
    v1::debug_server::SERVICE_NAME,
    "grpc.health.v1.Health",
];

/// What all services share.
#[derive(Clone)]
pub struct Shared {
    /// Workers and models.
    pub fleet: Arc<Fleet>,
    /// The door for requests.
    pub admission: Admission,
    /// Cancelled when streams that still run have to end.
    pub abort: CancellationToken,
    /// Cancelled when this host is about to drain: it says that it is not ready, and still serves.
    pub leaving: CancellationToken,
    /// The streams of token requests.
    pub streams: Streams,
    /// Tensor sessions.
    pub tensors: Sessions,
    /// Graphs that clients saved.
    pub graphs: Graphs,
    /// Becomes another program when asked.
    pub takeover: Takeover,
    /// What a process could be confined by on this host when its devices were looked for.
    pub confinement: Arc<[ConfinementLayer]>,
    /// Who may come in, and what tenants have.
    pub access: Arc<Access>,
    /// The web pages that may call over HTTP.
    pub web_origins: Arc<[WebOrigin]>,
    /// Whether and where traces are made.
    pub traces: Traces,
    /// What the Open Inference Protocol's clients have.
    pub(crate) oip: Oip,
}

impl Shared {
    /// For this fleet, with nobody inside.
    pub fn new(fleet: Arc<Fleet>) -> Self {
        let streams = Streams::new(Room::default(), fleet.reattach_patience());
        Self {
            fleet,
            admission: Admission::new(limits::MAX_SCHEDULER_REQUESTS),
            abort: CancellationToken::new(),
            leaving: CancellationToken::new(),
            streams,
            tensors: Sessions::default(),
            graphs: Graphs::default(),
            takeover: Takeover::default(),
            confinement: Arc::default(),
            access: Arc::default(),
            web_origins: Arc::default(),
            traces: Traces::default(),
            oip: Oip::default(),
        }
    }

    /// Whether a request gets anywhere: a worker is there and does not stand still, and nothing drains or is about to.
    pub fn is_serving(&self) -> bool {
        self.fleet.can_step() && !self.admission.is_closed() && !self.leaving.is_cancelled()
    }
}

/// All services of a scheduler, with those of others' protocols that are gRPC.
///
/// # Errors
/// If the descriptors of our own packages do not decode.
pub fn routes(
    shared: &Shared,
    protocols: &[Protocol],
) -> Result<(Routes, HealthReporter), tonic_reflection::server::Error> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let reflection = || {
        // By name, since the descriptors hold what only workers serve, too.
        let builder = tonic_reflection::server::Builder::configure();
        let others = protocols.iter().filter_map(|protocol| protocol.service());
        SERVICES
            .into_iter()
            .chain(others)
            .fold(builder, |builder, name| builder.with_service_name(name))
            .register_encoded_file_descriptor_set(v1::DESCRIPTORS)
            .register_encoded_file_descriptor_set(hotcell_gateways::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let routes = Routes::new(
        TokensServer::new(tokens::Service(shared.clone()))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES),
    )
    .add_service(
        ControlServer::new(control::Service(shared.clone()))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES),
    )
    .add_service(
        DebugServer::new(debug::Service(shared.clone()))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES),
    )
    .add_service(tensors::Passed(shared.clone()))
    .add_service(
        GraphsServer::new(graphs::Service(shared.clone()))
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES),
    )
    .add_service(health_service)
    .add_service(reflection().build_v1()?)
    .add_service(reflection().build_v1alpha()?);
    Ok((gateway::services(shared, protocols, routes), health))
}

/// Reports health for as long as it is polled: serving while a worker is ready and nothing drains.
pub async fn report_health(shared: Shared, health: HealthReporter) {
    let mut changed = shared.fleet.changes();
    let mut told = None;
    loop {
        changed.see();
        let serving = shared.is_serving();
        if told != Some(serving) {
            let status = if serving {
                ServingStatus::Serving
            } else {
                ServingStatus::NotServing
            };
            for name in HEALTH_NAMES {
                health.set_service_status(name, status).await;
            }
            told = Some(serving);
        }
        changed.changed().await;
    }
}

/// Ends the streams of those who watch health, which would keep their connections open.
pub async fn end_health(mut health: HealthReporter) {
    for name in HEALTH_NAMES {
        health.clear_service_status(name).await;
    }
}

/// So much before its caller stops waiting, a call is over, so that the service itself can say so in its trace and its
/// metrics; at that moment the guard before it answers. Timers are exact to a millisecond.
const AHEAD: Duration = Duration::from_millis(2);

/// When a call is to be over, by its `grpc-timeout`.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a header that cannot be read.
pub(crate) fn deadline(metadata: &MetadataMap) -> Result<Option<Instant>, Error> {
    let at = hotcell_proto::deadline::of(metadata)?.map(Instant::from_std);
    Ok(at.map(|at| at.checked_sub(AHEAD).unwrap_or(at)))
}

/// Whether a request came over TCP, perhaps from another host.
fn is_remote<T>(request: &Request<T>) -> bool {
    Caller::of(request.extensions()).remote || request.remote_addr().is_some()
}

/// Who a request came from, as far as its connection tells.
pub(crate) fn who<T>(request: &Request<T>) -> Who {
    Caller::of(request.extensions()).who(request.extensions())
}

/// Runs a call within its deadline.
async fn within<T>(
    deadline: Option<Instant>,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(at) = deadline else {
        return call.await;
    };
    match tokio::time::timeout_at(at, call).await {
        Ok(result) => result,
        Err(_) => Err(hotcell_proto::deadline::passed()),
    }
}
