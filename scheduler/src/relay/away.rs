//! Streams that go on at another Hotcell while this one drains.
//!
//! Nobody is worse off for it: a stream's worker here waits, for a bounded time, until the other host has accepted the
//! rest as the same stream, and goes on with it otherwise. What comes from there is judged as a worker's words are.

mod hold;

use std::{ops::ControlFlow, pin::pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{
        Accepted, EventKind, Finished, GenerateEvent, GenerateRequest, Survived,
        generate_event::Event, prompt::Kind,
    },
};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::{Instant, sleep_until, timeout},
};
use tonic::{Status, Streaming};

use self::hold::Hold;
use super::{Had, Relayed};
use crate::{
    elsewhere::Elsewhere,
    events::About,
    fleet::{Fleet, Placed},
    journal::{Bounds, Journal},
    onward,
    stream::Stream,
    streams::Streams,
    traces::{Span, TraceContext},
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

/// Key of errors that say where a stream goes on.
const CONTINUES_AT: &str = "continues_at";

/// When and how often one stream is offered to the other host.
#[derive(Clone)]
pub(super) struct Leaving<'a> {
    fleet: &'a Arc<Fleet>,
    model: &'a ModelName,
    out: &'a Stream,
    deadline: Option<Instant>,
    /// Where it is in its client's trace, in which it goes on there.
    trace: Option<TraceContext>,
    to: watch::Receiver<Option<Arc<Elsewhere>>>,
    tries: u32,
    next: Option<Instant>,
    pause: Duration,
    /// Whether it went already.
    gone: bool,
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
        let to = &self.to;
        let what = format!("the scheduler is shutting down; this request goes on at {to}");
        Error::new(Reason::Draining, what).with(CONTINUES_AT, to)
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

/// Whether nothing would be gained by going on here.
fn is_final(error: &Error) -> bool {
    matches!(
        error.reason(),
        Reason::RequestPoisoned | Reason::DeadlineExceeded | Reason::Cancelled | Reason::TakenOver
    )
}

/// The workers that the other host lost under a stream, out of an event that tells of them.
fn survived(event: &mut GenerateEvent) -> Result<Vec<Survived>, Error> {
    let told = match &mut event.event {
        Some(Event::Delta(delta)) => std::mem::take(&mut delta.survived),
        Some(Event::Finished(finished)) => std::mem::take(&mut finished.survived),
        _ => Vec::new(),
    };
    let word = |word: &String| word.len() <= limits::MAX_WORD;
    let sane = |s: &Survived| {
        let words = [&s.worker, &s.exit_kind, &s.continued_on];
        words.into_iter().all(word) && s.pause_ms.is_finite() && s.pause_ms >= 0.0
    };
    match told.len() <= limits::MAX_CONTINUATIONS as usize && told.iter().all(sane) {
        true => Ok(told),
        false => Err(strange("deaths that cannot be")),
    }
}

impl<'a> Leaving<'a> {
    /// For a stream that is to stay here until this host drains.
    pub fn new(
        (fleet, model): (&'a Arc<Fleet>, &'a ModelName),
        (out, streams): (&'a Stream, &Streams),
        (deadline, trace): (Option<Instant>, Option<TraceContext>),
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
    fn goes(&mut self, to: &Elsewhere, journal: &Journal) {
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
        let request = to.offering(bounded(request, self.deadline, &Span::passing(self.trace)));
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
                Some(error) if error.reason() != Reason::RequestExists => error,
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
    /// Where it goes on, if nobody reads it here.
    async fn hand_whole(&mut self, turn: Turn) -> Result<Option<(Journal, Box<Away>)>, Error> {
        let to = &turn.to;
        let Some(request) = self.out.asked_for() else {
            self.tries = 0;
            return Ok(None);
        };
        let offered = match self.offer(request.clone(), to).await {
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

    /// Goes on at the other host to the end, or else has a place here; `alone` as it had before.
    pub(super) async fn settle(
        &mut self,
        journal: &mut Journal,
        next: Next,
        alone: bool,
    ) -> Result<ControlFlow<Finished, Placed>, Error> {
        let away = match next {
            Next::Here(placed) => return Ok(ControlFlow::Continue(placed)),
            Next::There(away) => away,
        };
        if let Some(finished) = self.forward(journal, away).await? {
            return Ok(ControlFlow::Break(finished));
        }
        let placed = self.place(journal, onward::wish(journal, ""), alone);
        placed.await.map(ControlFlow::Continue)
    }

    /// Relays what the other host says; none if it cannot go on, and the stream is to go on here.
    async fn forward(
        &mut self,
        journal: &mut Journal,
        mut away: Box<Away>,
    ) -> Result<Option<Finished>, Error> {
        let mut said = false;
        loop {
            let event = tokio::select! {
                biased;
                event = away.events.message() => event,
                () = self.left() => return Err(away.leave()),
            };
            let event = match event {
                Ok(Some(event)) => event,
                Ok(None) => {
                    let error = strange("it ended the stream early");
                    return Ok(self.back(journal, away, &error));
                }
                Err(status) => match Error::typed(&status) {
                    Some(error) if is_final(&error) => return Err(error),
                    Some(error) => return Ok(self.back(journal, away, &error)),
                    None => return Ok(self.back(journal, away, &Error::from_status(&status))),
                },
            };
            let before = journal.generated();
            let (event, survived) = match heard(journal, event) {
                Ok(heard) => heard,
                // What it said before is in doubt as well, and was passed on.
                Err(error) if said => {
                    away.hold.cancel_soon();
                    let what = format!("{} broke the protocol: {error}", away.to);
                    return Err(Error::new(error.reason(), what));
                }
                Err(error) => return Ok(self.back(journal, away, &error)),
            };
            let tokens = journal.generated() - before;
            if tokens > 0 {
                self.count(tokens);
            }
            let Some(mut event) = event else { continue };
            let mut deaths = self.tell_losses_at(&away.to.to_string());
            deaths.extend(survived);
            match &mut event.event {
                Some(Event::Delta(delta)) => {
                    said = true;
                    delta.survived = deaths;
                }
                Some(Event::Finished(finished)) => {
                    let mut finished = std::mem::take(finished);
                    finished.survived = deaths;
                    finished.timings = Some(self.timings(finished.timings));
                    // Before the client hears of the end, so that it finds its place free when it comes back.
                    self.permit = None;
                    return Ok(Some(finished));
                }
                _ => {}
            }
            if !self.out.write(event) {
                self.streams.make_room();
                tokio::select! {
                    biased;
                    () = self.out.writable() => {}
                    () = self.left() => return Err(away.leave()),
                }
            }
        }
    }

    /// Returns once nobody reads a stream here that its client may come back to there.
    async fn left(&self) {
        match self.out.keeps() {
            true => self.out.forsaken(AWAY).await,
            false => std::future::pending().await,
        }
    }

    /// The other host could not go on.
    fn back(&mut self, journal: &Journal, mut away: Box<Away>, error: &Error) -> Option<Finished> {
        away.hold.cancel_soon();
        self.leaving.stays(&away.to, journal.request_id(), error);
        None
    }
}

/// Has the journal take an event of the other host's, which tells of its own workers' deaths.
fn heard(
    journal: &mut Journal,
    mut event: GenerateEvent,
) -> Result<(Option<GenerateEvent>, Vec<Survived>), Error> {
    let survived = survived(&mut event)?;
    if let Some(Event::Delta(delta)) = &event.event
        && let Some(class) = &delta.numerics
    {
        let crossed = journal.cross(class);
        crossed.map_err(|violation| strange(violation.to_string()))?;
    }
    for _ in &survived {
        journal.count_death();
    }
    let event = journal.take(event);
    let event = event.map_err(|violation| strange(violation.to_string()))?;
    Ok((event, survived))
}
