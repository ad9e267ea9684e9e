//! What a worker's words mean: an answer, a fault of its own, or that it is lost.

use std::time::Duration;

use hotcell_proto::error::{Error, Reason};
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use crate::{
    death::DeathKind,
    discover::clip,
    fleet::{Link, Placed, is_broken, words},
    traces::Span,
};

/// Has a worker that broke the protocol replaced: what it says to others cannot be trusted either. Returns once it is
/// gone, or the kernel takes too long.
pub(crate) async fn condemn(link: &Link, what: &str) {
    tracing::error!(
        worker = link.worker,
        epoch = link.epoch,
        what,
        "a worker broke the protocol"
    );
    link.condemn(DeathKind::Protocol, what).await;
}

/// The error of a request to whose stream that happened.
pub(crate) fn violated(link: &Link, what: &str) -> Error {
    let worker = &link.worker;
    let what = format!("worker {worker} broke the protocol: {what}; this is a fault of Hotcell");
    Error::new(Reason::ProtocolViolation, what).with("worker", worker)
}

/// What a failed call to a worker means: its own words, or (none) that it is lost.
pub(crate) async fn verdict(placed: &Placed, status: &Status) -> Option<Error> {
    let link = &placed.link;
    if Error::typed(status).is_some() {
        return Some(words(status));
    }
    if link.is_lost().await {
        tracing::debug!(
            worker = link.worker,
            epoch = link.epoch,
            ?status,
            "a call broke with its worker"
        );
        return None;
    }
    let said = clip(status.message());
    let what = match (status.code(), is_broken(status)) {
        (Code::Ok, _) => "it ended the call early".to_owned(),
        (_, true) => format!("it broke the call: {}", clip(&status.to_string())),
        // What its transport answers by itself, to a call that is too large or comes too late, is no word of its own.
        (
            code @ (Code::Cancelled
            | Code::DeadlineExceeded
            | Code::OutOfRange
            | Code::ResourceExhausted
            | Code::Unimplemented),
            false,
        ) => {
            return Some(violated(link, &format!("it answered {code:?} ({said})")));
        }
        (code, false) => format!("it answered {code:?} ({said})"),
    };
    condemn(link, &what).await;
    None
}

/// A request that carries what remains of the deadline, and where it is in its trace.
pub(crate) fn bounded<T>(message: T, deadline: Option<Instant>, trace: &Span) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(at) = deadline {
        // gRPC knows no zero; our own timer is about to say so.
        let left = at
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        request.set_timeout(left);
    }
    trace.carry(&mut request);
    request
}
