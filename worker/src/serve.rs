//! Serving a scheduler: one connection each for control, tokens and tensors, so that an unread stream on one does not
//! stall the others. Who takes the scheduler's place has connections of its own, before the scheduler's end.

use std::os::fd::OwnedFd;

use hotcell_ipc::transport::{Windows, incoming_once};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{tokens_server::TokensServer, worker_server::WorkerServer},
};

use tokio::sync::watch;

use crate::{
    host::{Host, TENSOR_STREAMS},
    service::{TokensService, WorkerService, tensors_server},
};

/// Calls on the tokens connection at once: every request the worker holds, and as many short calls.
pub const MAX_STREAMS: u32 = 2 * limits::MAX_WORKER_REQUESTS as u32;

/// The ends of one scheduler's connections.
#[derive(Debug)]
pub struct Connections {
    /// For `hotcell.v1.Worker` and health.
    pub control: OwnedFd,
    /// For `hotcell.v1.Tokens`.
    pub tokens: OwnedFd,
    /// For `hotcell.v1.Tensors`.
    pub tensors: OwnedFd,
}

/// The service of tokens.
pub fn tokens_server(host: Host) -> TokensServer<TokensService> {
    TokensServer::new(TokensService(host)).max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
}

/// The control connections, counted: the worker lives until the last one is over.
#[derive(Clone, Debug, Default)]
pub struct Controls(watch::Sender<usize>);

/// One of them, counted until this is dropped.
#[derive(Debug)]
pub struct Control(Controls);

impl Controls {
    /// Counts one more.
    pub fn enter(&self) -> Control {
        self.0.send_modify(|count| *count += 1);
        Control(self.clone())
    }

    /// Returns once there is none, or at once.
    pub async fn none(&self) {
        // An error would mean that the sender, which is ours, is gone.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.0
            .0
            .send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// Serves until the control connection is over, and counts it until then.
///
/// # Errors
/// Which connection could not be served, and why.
pub async fn serve(
    host: Host,
    connections: Connections,
    counted: Control,
) -> Result<(), (&'static str, tonic::transport::Error)> {
    let (control, over) = incoming_once(connections.control);
    let (tokens, _) = incoming_once(connections.tokens);
    let (tensors, _) = incoming_once(connections.tensors);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<WorkerServer<WorkerService>>().await;
    let worker = WorkerServer::new(WorkerService(host.clone(), counted.0.clone()))
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES);
    let windows = Windows::default();
    let control = windows
        .server()
        .add_service(worker)
        .add_service(health.clone())
        .serve_with_incoming(control);
    let tokens = windows
        .server()
        .max_concurrent_streams(MAX_STREAMS)
        .add_service(tokens_server(host.clone()))
        .serve_with_incoming(tokens);
    let tensors = windows
        .server()
        .max_concurrent_streams(TENSOR_STREAMS)
        .add_service(tensors_server(host))
        .add_service(health)
        .serve_with_incoming(tensors);
    let (what, ended) = tokio::select! {
        () = over.wait() => ("control", Ok(())),
        ended = control => ("control", ended),
        ended = tokens => ("tokens", ended),
        ended = tensors => ("tensors", ended),
    };
    drop(counted);
    ended.map_err(|error| (what, error))
}

/// Serves one more set of connections, whose ends come under `tag`.
///
/// # Errors
/// When they do not come, or there are too many.
pub async fn join(host: &Host, controls: &Controls, tag: u64) -> Result<(), Error> {
    let ends = host.descriptors(tag).await?;
    let [control, tokens, tensors] = <[OwnedFd; 3]>::try_from(ends).map_err(|ends| {
        let what = format!("{} descriptors came where three are due", ends.len());
        Error::new(Reason::ProtocolViolation, what)
    })?;
    if *controls.0.borrow() >= limits::MAX_CONTROLS {
        let what = "too many schedulers' connections are open already";
        return Err(Error::new(Reason::Overloaded, what));
    }
    let connections = Connections {
        control,
        tokens,
        tensors,
    };
    // Counted before this is answered, should the other scheduler leave right then.
    let served = serve(host.clone(), connections, controls.enter());
    tokio::spawn(async move {
        if let Err((what, error)) = served.await {
            tracing::warn!(%error, "one more {what} connection failed");
        }
    });
    Ok(())
}
