//! Streams that go on at another Hotcell while this one drains.
//!
//! Nobody is worse off for it: a stream's worker here waits, for a bounded time, until the other host has accepted the
//! rest as the same stream, and goes on with it otherwise. What comes from there is judged as a worker's words are.

mod forward;
mod hold;

use std::{pin::pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{
        Accepted, EventKind, GenerateEvent, GenerateRequest, Prompt, TokenIds,
        generate_event::Event, prompt::Kind,
    },
};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::{Instant, sleep_until, timeout},
};
use tonic::{Status, Streaming};

pub(super) use self::forward::Whereabouts;
use self::{forward::goes_on_at, hold::Hold};
use super::{Had, Relayed};
use crate::{
    access::Role,
    elsewhere::Elsewhere,
    events::About,
    fleet::{Fleet, Placed},
    journal::{Bounds, Journal},
    onward,
    stream::Stream,
    streams::Streams,
    traces::{Place, Span},
    verdict::bounded,
};

/// How long the other host may take to accept a stream that waits for it.
const ACCEPT: Duration = Duration::from_secs(5);
/// Times that a stream is offered, those not counted in which the other host was full; fewer where it may not go.
const TRIES: u32 = 2;
/// Pauses between two of them, each twice the one before.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(4);
/// A stream that nobody has read for so long is left to the other host: its client may come back to it there.
const AWAY: Duration = Duration::from_secs(2);

/// When and how often one stream is offered to the other host.
#[derive(Clone)]
pub(super) struct Leaving<'a> {
    fleet: &'a Arc<Fleet>,
    model: &'a ModelName,
    out: &'a Stream,
    deadline: Option<Instant>,
    /// Where it is in its client's trace, in which it goes on there.
    trace: Place,
    to: watch::Receiver<Option<Arc<Elsewhere>>>,
    tries: u32,
    next: Option<Instant>,
    pause: Duration,
    /// Whether it went already.
    gone: bool,
    /// Where it is, for others.
    there: &'a Whereabouts,
    /// What it is offered as before it was accepted anywhere, once it is known what its model's limits make of it.
    bounded: Option<GenerateRequest>,
}

/// Its turn to be offered.
pub(super) struct Turn {
    to: Arc<Elsewhere>,
    _offer: OwnedSemaphorePermit,
    /// Whether nobody reads it.
    away: bool,
}

/// A stream that the other host has accepted. If its client cancels it, the other host hears of it when this is dropped.
pub(super) struct Away {
    to: Arc<Elsewhere>,
    events: Streaming<GenerateEvent>,
    _seat: Arc<()>,
    hold: Hold,
}

/// Where a stream goes on.
pub(super) enum Next {
    Here(Placed),
    There(Box<Away>),
}

impl Away {
    /// Where that is.
    pub fn to(&self) -> &Elsewhere {
        &self.to
    }

    /// Leaves it to the other host: what its reader, or who comes back to it here, is told.
    fn leave(&mut self) -> Error {
        self.hold.let_go();
        goes_on_at(&self.to)
    }
}

fn strange(what: impl Into<String>) -> Error {
    Error::new(Reason::ProtocolViolation, what)
}

/// It would run, and be counted, as somebody else's there.
fn another_tenant() -> Error {
    let what = "it takes the stream for another tenant's";
    Error::new(Reason::PermissionDenied, what)
}

impl<'a> Leaving<'a> {
    /// For a stream that is to stay here until this host drains.
    pub fn new(
        (fleet, model): (&'a Arc<Fleet>, &'a ModelName),
        (out, streams): (&'a Stream, &Streams),
        (deadline, trace): (Option<Instant>, Place),
        there: &'a Whereabouts,
    ) -> Self {
        Self {
            fleet,
            model,
            out,
            deadline,
            trace,
            to: streams.leaving(),
            tries: match streams.may_leave() {
                true => TRIES,
                false => 0,
            },
            next: None,
            pause: PAUSE,
            gone: false,
            there,
            bounded: None,
        }
    }

    /// Whether [`turn`](Self::turn) may return at all.
    pub fn may_go(&self) -> bool {
        self.tries > 0
    }

    /// Returns once this host drains and has somewhere to send streams.
    pub fn drains(&self) -> impl Future<Output = ()> + use<> {
        let mut to = self.to.clone();
        async move {
            if to.wait_for(Option::is_some).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Returns once it is to be offered; never while this host does not drain, or has nowhere to send it.
    pub async fn turn(&mut self) -> Turn {
        let to = match self.tries {
            0 => None,
            _ => {
                let known = self.to.wait_for(Option::is_some).await;
                known.ok().and_then(|to| (*to).clone())
            }
        };
        let Some(to) = to else {
            return std::future::pending().await;
        };
        if let Some(at) = self.next {
            sleep_until(at).await;
        }
        self.out.settled(AWAY).await;
        match Arc::clone(&to.offers).acquire_owned().await {
            Ok(offer) => Turn {
                to,
                _offer: offer,
                away: !self.out.is_attached(),
            },
            // Never: nobody closes it.
            Err(_) => std::future::pending().await,
        }
    }

    /// It goes on here.
    fn stays(&mut self, to: &Elsewhere, id: &str, error: &Error) {
        self.there.set(None);
        to.count_refused();
        self.tries = match error.reason() {
            Reason::Overloaded => self.tries,
            // It says the same to the next try.
            Reason::PermissionDenied => 0,
            _ => self.tries.saturating_sub(1),
        };
        self.next = Some(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(PAUSE_MAX);
        let reason = error.reason().name();
        match self.tries {
            0 => tracing::info!(request = id, %to, reason, %error, "a stream stays here"),
            _ => tracing::debug!(request = id, %to, reason, %error, "a stream stays here for now"),
        }
    }

    /// It goes on there.
    fn goes(&mut self, to: &Arc<Elsewhere>, journal: &Journal) {
        // One whose id nobody chose ends there with the call.
        self.there.set(Some(to).filter(|_| self.out.keeps()));
        if !std::mem::replace(&mut self.gone, true) {
            to.count_taken();
        }
        let (id, tokens) = (journal.request_id(), journal.generated());
        let message =
            format!("request {id} goes on at {to} after {tokens} tokens; this host is draining");
        tracing::info!("{message}");
        let about = About {
            model: self.model.as_str(),
            ..About::default()
        };
        self.fleet
            .events
            .tell(EventKind::StreamContinued, about, message);
    }

    /// Asks the other host to go on with a stream.
    async fn offer(
        &self,
        mut request: GenerateRequest,
        to: &Arc<Elsewhere>,
    ) -> Result<(Away, Accepted), Error> {
        request.model = self.fleet.name_of(self.model);
        // One whose id nobody chose ends with its reader, and there with this call.
        let id = self.out.keeps().then(|| request.request_id.clone());
        request.request_id = id.clone().unwrap_or_default();
        let (mut client, seat) = to.line();
        let tenant = request.tenant.clone();
        let request = to.offering(bounded(
            request,
            self.deadline,
            &Span::passing(self.trace.clone()),
        ));
        let mut hold = Hold::new(to, self.out.cancellation());
        let asked = async {
            let answer = client.generate(request).await?;
            hold.begun(id);
            if !to.took_for(answer.metadata(), &tenant) {
                return Ok(Err(another_tenant()));
            }
            let mut events = answer.into_inner();
            let first = events.message().await?;
            Ok::<_, Status>(Ok((events, first.and_then(|first| first.event))))
        };
        let error = match timeout(ACCEPT, asked).await {
            Ok(Ok(Ok((events, Some(Event::Accepted(accepted)))))) => {
                let to = Arc::clone(to);
                let away = Away {
                    to,
                    events,
                    _seat: seat,
                    hold,
                };
                return Ok((away, accepted));
            }
            Ok(Ok(Ok(_))) => strange("its first event is not Accepted"),
            Ok(Ok(Err(error))) => error,
            Ok(Err(status)) => match Error::typed(&status) {
                Some(error) if error.reason() != Reason::RequestExists => {
                    if error.get("role") == Some(Role::Admin.name()) {
                        to.warn_of_tenants();
                    }
                    error
                }
                // That of somebody else is not ours to cancel, and nobody hears where there is no connection.
                _ => {
                    hold.let_go();
                    Error::from_status(&status)
                }
            },
            Err(_) => {
                let what = format!("it did not accept the stream within {ACCEPT:?}");
                Error::new(Reason::DeadlineExceeded, what)
            }
        };
        // So that its id is free for the next try.
        hold.cancel().await;
        Err(error)
    }

    /// Offers a stream that runs here; none if it goes on here.
    ///
    /// # Errors
    /// Where it goes on, if nobody reads it here.
    pub async fn hand_over(
        &mut self,
        journal: &mut Journal,
        turn: Turn,
    ) -> Result<Option<Box<Away>>, Error> {
        let to = &turn.to;
        // Who is away may have less than was said: the other host says all of it again, where that is the same.
        let repeats = turn.away && journal.is_repeatable();
        let request = match repeats {
            true => {
                let begin = self.out.begin();
                journal.request_from(begin.tokens, begin.text)
            }
            false => journal.request(),
        };
        let offered = match self.offer(request, to).await {
            Ok((mut away, accepted)) => match journal.fits(&accepted) {
                // Another class would say other things than the client has heard.
                Ok(class) if repeats && !journal.is_repeated_by(&class) => {
                    away.hold.cancel().await;
                    let what = "it would not say again what was said, in numerics class";
                    Err(strange(format!("{what} {}", class.id)))
                }
                Ok(class) => Ok((away, class, accepted)),
                Err(violation) => {
                    away.hold.cancel().await;
                    Err(strange(violation.to_string()))
                }
            },
            Err(error) => Err(error),
        };
        let (mut away, class, accepted) = match offered {
            Ok(offered) => offered,
            Err(error) => {
                self.stays(to, journal.request_id(), &error);
                return Ok(None);
            }
        };
        self.goes(to, journal);
        if turn.away {
            return Err(away.leave());
        }
        journal.begin(&class);
        let event = GenerateEvent {
            event: Some(Event::Accepted(accepted)),
        };
        match journal.take(event) {
            Ok(Some(event)) => {
                self.out.write(event);
            }
            Ok(None) => {}
            Err(violation) => return Err(strange(violation.to_string())),
        }
        Ok(Some(Box::new(away)))
    }

    /// Offers a request that waits to be accepted here; none if it goes on waiting.
    ///
    /// # Errors
    /// Where it goes on, if nobody reads it here; [`Reason::LimitExceeded`] as it would be here.
    async fn hand_whole(&mut self, turn: Turn) -> Result<Option<(Journal, Box<Away>)>, Error> {
        let to = &turn.to;
        let asked = self.bounded.take().or_else(|| self.out.asked_for());
        let Some(mut request) = asked else {
            self.tries = 0;
            return Ok(None);
        };
        // What the other host allows is not what this one does.
        if let Some(Kind::Ids(given)) = request.prompt.as_ref().and_then(|p| p.kind.as_ref()) {
            let prompt = given.ids.len();
            let most = self
                .fleet
                .most_tokens(self.model, prompt, request.max_tokens);
            request.max_tokens = most?;
        }
        let mut offered = self.offer(request.clone(), to).await;
        if let Ok((away, accepted)) = &mut offered {
            let prompt = accepted.prompt_ids.len();
            let most = self
                .fleet
                .most_tokens(self.model, prompt, request.max_tokens);
            if !most.as_ref().is_ok_and(|most| *most == request.max_tokens) {
                // Only now is it known how long the prompt is.
                away.hold.cancel().await;
                request.max_tokens = most?;
                request.prompt = Some(Prompt {
                    kind: Some(Kind::Ids(TokenIds {
                        ids: std::mem::take(&mut accepted.prompt_ids),
                    })),
                });
                offered = self.offer(request.clone(), to).await;
            }
        }
        let offered = match offered {
            Ok((mut away, accepted)) => match self.journal(&request, &accepted) {
                Ok((journal, event)) => Ok((away, journal, event)),
                Err(error) => {
                    away.hold.cancel().await;
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        let (mut away, journal, event) = match offered {
            Ok(offered) => offered,
            Err(error) => {
                self.stays(to, &request.request_id, &error);
                self.bounded = Some(request);
                return Ok(None);
            }
        };
        self.goes(to, &journal);
        if turn.away {
            return Err(away.leave());
        }
        self.out.write(event);
        Ok(Some((journal, Box::new(away))))
    }

    /// The journal of a request that the other host was the first to accept, and what the client gets for that.
    fn journal(
        &self,
        request: &GenerateRequest,
        accepted: &Accepted,
    ) -> Result<(Journal, GenerateEvent), Error> {
        let ids = &accepted.prompt_ids;
        let given = request.prompt.as_ref().and_then(|p| p.kind.as_ref());
        let same = match given {
            Some(Kind::Ids(given)) => given.ids == *ids,
            _ => ids.len() <= limits::MAX_PROMPT_TOKENS,
        };
        // Without a worker that has the model, only the other host knows.
        let bounds = self.fleet.bounds(self.model).unwrap_or(Bounds {
            vocabulary: limits::MAX_VOCABULARY,
            context: u32::MAX,
        });
        if !same || ids.iter().any(|&id| id >= bounds.vocabulary) {
            return Err(strange("Accepted with another prompt"));
        }
        let mut journal = Journal::new(request.clone(), ids.clone(), bounds);
        let event = journal.fits(accepted).and_then(|class| {
            journal.begin(&class);
            journal.take(GenerateEvent {
                event: Some(Event::Accepted(accepted.clone())),
            })
        });
        match event {
            Ok(Some(event)) => Ok((journal, event)),
            Ok(None) => Err(strange("Accepted twice")),
            Err(violation) => Err(strange(violation.to_string())),
        }
    }
}

impl Relayed<'_> {
    /// The journal of a new stream, and a place for it, here or at the other host.
    pub(super) async fn begin_somewhere(
        &mut self,
        request: GenerateRequest,
    ) -> Result<(Journal, Next), Error> {
        let mut leaving = self.leaving.clone();
        let begun = {
            let mut here = pin!(self.begin(request));
            loop {
                let turn = tokio::select! {
                    biased;
                    turn = leaving.turn() => turn,
                    begun = &mut here => {
                        let (journal, placed) = begun?;
                        break (journal, Next::Here(placed));
                    }
                };
                if let Some((journal, away)) = leaving.hand_whole(turn).await? {
                    break (journal, Next::There(away));
                }
            }
        };
        self.leaving = leaving;
        Ok(begun)
    }

    /// A place for the rest of a stream whose worker was lost, here or at the other host.
    pub(super) async fn next_somewhere(
        &mut self,
        journal: &mut Journal,
        had: &Had,
    ) -> Result<Next, Error> {
        let mut leaving = self.leaving.clone();
        let turn = {
            let mut here = pin!(self.next_place(journal, had));
            tokio::select! {
                // First what the death means.
                biased;
                placed = &mut here => return placed.map(Next::Here),
                turn = leaving.turn() => turn,
            }
        };
        let suspect = self.fleet.suspects(&self.record);
        let away = match suspect {
            true => {
                // Others may be offered while this one waits for a place.
                drop(turn);
                None
            }
            false => leaving.hand_over(journal, turn).await?,
        };
        self.leaving = leaving;
        if let Some(away) = away {
            return Ok(Next::There(away));
        }
        let wish = onward::wish(journal, &had.home);
        self.place(journal, wish, suspect).await.map(Next::Here)
    }
}
