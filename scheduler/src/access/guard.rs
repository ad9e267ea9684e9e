//! The guard before all services: finds out who calls, and whether that one may.

use std::{
    future::{Ready, poll_fn, ready},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use hotcell_proto::{
    deadline,
    error::{Error, Reason},
};
use http::{HeaderMap, Request, Response, header::AUTHORIZATION};
use tokio::time::{Instant, sleep_until};
use tokio_util::either::Either;
use tonic::{Code, Status, body::Body, transport::server::UdsConnectInfo};
use tower::{Layer, Service};

use super::{
    Access, Caller, Entrance, Need, Role,
    caller::note_refused,
    roles::{need, row},
    seat::{self, Begun, Mark, Outcome},
};
use crate::{
    audit::{Audit, Who},
    traces::{Arrival, Traces},
};

/// Puts a guard before what is served at one door.
#[derive(Clone, Debug)]
pub struct Guard {
    access: Arc<Access>,
    entrance: Entrance,
    traces: Traces,
    audit: Audit,
}

impl Guard {
    /// Of this door.
    pub fn new(access: Arc<Access>, entrance: Entrance, (traces, audit): (Traces, Audit)) -> Self {
        Self {
            access,
            entrance,
            traces,
            audit,
        }
    }

    /// The door.
    pub fn entrance(&self) -> Entrance {
        self.entrance
    }

    /// Who makes this call.
    fn caller<B>(&self, request: &Request<B>, mark: Option<&Mark>) -> Result<Caller, Error> {
        match self.entrance {
            Entrance::Private => Ok(Caller::own()),
            Entrance::Unix => {
                let info = request.extensions().get::<UdsConnectInfo>();
                let uid = info.and_then(|info| info.peer_cred).map(|peer| peer.uid());
                let known = uid.and_then(|uid| Some((uid, self.access.user(uid)?)));
                let (uid, roles) = known.ok_or_else(|| {
                    Error::new(
                        Reason::PermissionDenied,
                        "this scheduler serves its own user; others need --allow-uid",
                    )
                })?;
                let name = format!("uid {uid}");
                Ok(match roles.has(Role::Admin) {
                    true => Caller::trusted(name, roles, false),
                    false => {
                        let tenant = format!("uid-{uid}").into();
                        Caller::of_tenant(name, roles, false, tenant)
                    }
                })
            }
            Entrance::Tcp => self.access.over_tcp(mark, || bearer(request.headers())),
        }
    }

    /// Whether it is let in, and the place that it then has until it is answered; and in its trace. And who looks into what
    /// others do, if the call does.
    fn check<B>(
        &self,
        request: &mut Request<B>,
        mark: Option<&Mark>,
    ) -> Result<(Option<Begun>, Arrival, Option<Who>), Status> {
        let begun = mark.map(Mark::begin).transpose()?;
        let path = request.uri().path();
        let need = need(path);
        // Asked by those who look whether it lives, without a token, and it says nothing about anybody.
        if need == Need::Nobody && self.entrance == Entrance::Tcp {
            return Ok((begun, Arrival::default(), None));
        }
        let mut caller = self.caller(request, mark)?;
        // Gateways ask for services of many kinds to find out what this is.
        if row(path).is_none() && !caller.roles.has(Role::Admin) {
            return Err(Status::unimplemented("nothing is served under this name"));
        }
        caller.check_noting((need, call(path)), request.extensions(), &self.audit)?;
        let looker = need.looks().then(|| caller.who(request.extensions()));
        if let Some(mark) = mark {
            mark.keeps();
            if self.entrance == Entrance::Tcp && self.access.knows_by_name(mark) {
                mark.came_to(Outcome::Answered);
            }
        }
        let arrival = self.traces.arrive(request.headers());
        caller.trace = arrival.clone();
        request.extensions_mut().insert(caller);
        // Nobody behind this needs the secret.
        request.headers_mut().remove(AUTHORIZATION);
        Ok((begun, arrival, looker))
    }
}

/// A call's name.
fn call(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The bearer token of a call, if it has one.
///
/// # Errors
/// [`Reason::Unauthenticated`] for another kind of authorization.
pub fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Error> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let odd = || {
        let what = "the call's authorization is not one `Bearer` and a token";
        Error::new(Reason::Unauthenticated, what)
    };
    if values.next().is_some() {
        return Err(odd());
    }
    let (scheme, token) = value
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .ok_or_else(odd)?;
    match scheme.eq_ignore_ascii_case("bearer") {
        true => Ok(Some(token.trim())),
        false => Err(odd()),
    }
}

/// How a call ended, if it did so before its answer began.
fn code(headers: &HeaderMap) -> Code {
    headers
        .get(Status::GRPC_STATUS)
        .map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()))
}

/// Whose fault that is.
fn outcome(code: Code) -> Outcome {
    match code {
        Code::ResourceExhausted => Outcome::NotNow,
        // tonic says `Internal` to messages that cannot be decoded.
        Code::InvalidArgument
        | Code::OutOfRange
        | Code::NotFound
        | Code::FailedPrecondition
        | Code::Unimplemented
        | Code::Unauthenticated
        | Code::PermissionDenied
        | Code::Internal => Outcome::Refused,
        _ => Outcome::Answered,
    }
}

/// Waits for the answer of a call until its deadline. Services have deadlines of their own, which pass a little earlier;
/// one that is late by then is answered here, before the library below does so: it would say that the caller cancelled the
/// call. It asks for the answer first and looks at its clock then, which began to run after ours.
async fn by<E>(
    at: Instant,
    answer: impl Future<Output = Result<Response<Body>, E>>,
) -> Result<Response<Body>, E> {
    let (mut answer, mut late) = (pin!(answer), pin!(sleep_until(at)));
    poll_fn(|cx| {
        if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
            return Poll::Ready(answer);
        }
        // The clock too: of two timers that ended, one may not have told yet.
        match late.as_mut().poll(cx).is_ready() || Instant::now() >= at {
            true => Poll::Ready(Ok(Status::from(deadline::passed()).into_http())),
            false => Poll::Pending,
        }
    })
    .await
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded {
            guard: self.clone(),
            inner,
        }
    }
}

/// An answer that is not there yet.
type Answer<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

/// What is served, behind a guard.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    guard: Guard,
    inner: S,
}

impl<S, B> Service<Request<B>> for Guarded<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, Answer<S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let mark = seat::came_by(request.extensions_mut());
        match self.guard.check(&mut request, mark.as_ref()) {
            Ok((begun, arrival, looker)) => {
                let looker = looker.map(|who| (who, call(request.uri().path()).to_owned()));
                let audit = self.guard.audit.clone();
                // The services refuse one that cannot be read.
                let deadline = deadline::of_headers(request.headers()).ok().flatten();
                let answer = self.inner.call(request);
                Either::Right(Box::pin(async move {
                    let mut answer = match deadline {
                        None => answer.await,
                        Some(at) => by(at.into(), answer).await,
                    };
                    if let Ok(response) = &mut answer {
                        arrival.answer(response.headers_mut());
                        let status = looker.zip(Status::from_header_map(response.headers()));
                        if let Some(((who, call), status)) = status
                            && status.code() != Code::Ok
                        {
                            let error = Error::from_status(&status);
                            note_refused(&call, &who, &error, &audit);
                        }
                        if let Some(begun) = begun {
                            begun.came_to(outcome(code(response.headers())));
                        }
                    }
                    answer
                }))
            }
            Err(error) => {
                tracing::debug!(path = request.uri().path(), %error, "refused");
                if let Some(mark) = mark {
                    mark.came_to(outcome(error.code()));
                }
                Either::Left(ready(Ok(error.into_http())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_late_is_answered_by_its_deadline() {
        let soon = Duration::from_millis(50);
        let after = |time| async move {
            tokio::time::sleep(time).await;
            Ok::<_, Infallible>(Status::ok("").into_http::<Body>())
        };
        let deadline = || Instant::now() + soon;
        let late = by(deadline(), after(soon * 2)).await.unwrap();
        assert_eq!(code(late.headers()), Code::DeadlineExceeded);
        let there = by(deadline(), after(soon / 2)).await.unwrap();
        assert_eq!(code(there.headers()), Code::Ok);
        // What is there at that moment is told.
        let just = by(deadline(), after(soon)).await.unwrap();
        assert_eq!(code(just.headers()), Code::Ok);
    }
}
