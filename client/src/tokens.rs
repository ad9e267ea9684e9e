//! Token requests: options in, a stream of typed events out.

mod back;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    limits, v1,
};
use tokio::time::{Instant, Sleep};
use tokio_stream::{Stream, StreamExt};
use tonic::{
    Streaming,
    metadata::{Ascii, MetadataValue},
};

use crate::connect::{Client, read_status};
use back::{Back, Held};

/// What a stream continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text; the model's own special tokens are added.
    Text(String),
    /// Token ids, taken as they are.
    Ids(Vec<u32>),
    /// Messages, rendered with the model's chat template.
    Chat(Vec<v1::ChatMessage>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Prompt> for v1::Prompt {
    fn from(prompt: Prompt) -> Self {
        use v1::prompt::Kind;
        let kind = match prompt {
            Prompt::Text(text) => Kind::Text(text),
            Prompt::Ids(ids) => Kind::Ids(v1::TokenIds { ids }),
            Prompt::Chat(messages) => Kind::Chat(v1::Chat {
                messages,
                ..v1::Chat::default()
            }),
        };
        Self { kind: Some(kind) }
    }
}

/// What a text has to be: valid against a JSON schema, matched by a regular expression, of a Lark grammar, or a JSON object.
/// One that cannot be read is [`Reason::GrammarInvalid`](crate::Reason::GrammarInvalid).
pub use v1::grammar::Kind as Grammar;

/// How to continue a prompt. The default is the neutral value of everything: the default model, greedy,
/// until the model stops or its context is full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// Name of a model; empty: the scheduler's default.
    pub model: String,
    /// How tokens are chosen.
    pub sampling: v1::Sampling,
    /// Tokens to generate at most; 0: no limit of ours.
    pub max_tokens: u32,
    /// Strings before which the stream ends.
    pub stop: Vec<String>,
    /// Tokens that end the stream, besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Go on past the model's own end tokens.
    pub ignore_eos: bool,
    /// Seed of the sampling noise; none: the scheduler draws one.
    pub seed: Option<u64>,
    /// Which of several continuations of one prompt and seed this is.
    pub branch: u32,
    /// Report each token's log probability.
    pub logprobs: bool,
    /// Report this many alternatives of each token.
    pub top_logprobs: u32,
    /// An id of your own, under which the request is run once, and whose stream goes on for a while when this
    /// process is gone; others who know it can read the stream. Empty: a random one, whose stream ends when the
    /// [`Generation`] is dropped.
    pub request_id: String,
    /// How long to try to come back to the stream when the connection breaks; none: 10 s, zero: not at all.
    pub reattach: Option<Duration>,
    /// Go on with a stream that began elsewhere.
    pub resume: Option<v1::Resume>,
    /// Rather than fail, go on in another numerics class when none of the stream's own is left.
    pub continue_across: bool,
    /// Whose request it is: tenants share workers fairly, and no cached prompts.
    pub tenant: String,
    /// How urgent among the tenant's own, 0 to 7.
    pub priority: u32,
    /// Draw one token at a time, also where guessing would be faster.
    pub no_speculation: bool,
    /// What the text has to be. It ends where that ends, so not together with `ignore_eos`.
    pub grammar: Option<Grammar>,
    /// Tell in the deltas' parts what the text is: answer, thoughts, calls of tools.
    pub parse_output: bool,
    /// The whole stream must be complete after this long. Sent along, and kept here as well.
    pub deadline: Option<Duration>,
    /// The span that the request is made in, as W3C's `traceparent`: its trace goes on in the scheduler. Empty: none.
    pub traceparent: String,
}

impl GenerateOptions {
    fn into_request(self, prompt: Prompt) -> v1::GenerateRequest {
        v1::GenerateRequest {
            model: self.model,
            prompt: Some(prompt.into()),
            sampling: Some(self.sampling),
            max_tokens: self.max_tokens,
            stop: self.stop,
            stop_tokens: self.stop_tokens,
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            branch: self.branch,
            logprobs: self.logprobs,
            top_logprobs: self.top_logprobs,
            request_id: self.request_id,
            resume: self.resume,
            continue_across: self.continue_across,
            tenant: self.tenant,
            priority: self.priority,
            no_speculation: self.no_speculation,
            grammar: self.grammar.map(|kind| v1::Grammar { kind: Some(kind) }),
            parse_output: self.parse_output,
        }
    }
}

/// One event of a stream. The first is `Accepted`, the last `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request is valid and will run.
    Accepted(v1::Accepted),
    /// Tokens, and the text that became final with them.
    Delta(v1::Delta),
    /// The stream is complete.
    Finished(v1::Finished),
}

/// A whole answer; see [`Generation::complete`].
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// How the request was understood.
    pub accepted: v1::Accepted,
    /// All text.
    pub text: String,
    /// All generated tokens.
    pub token_ids: Vec<u32>,
    /// Their log probabilities, if asked for.
    pub logprobs: Vec<v1::TokenLogprob>,
    /// Why it ended, and what it took.
    pub finished: v1::Finished,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opened,
    Accepted,
    /// Come back to; greeted again.
    Returned {
        resumed: bool,
    },
    Over,
}

/// Where events come from.
enum Source {
    Open(Box<Streaming<v1::GenerateEvent>>),
    Coming(Pin<Box<dyn Future<Output = Result<Back, Error>> + Send>>),
    Over,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open(_) => "open",
            Self::Coming(_) => "coming back",
            Self::Over => "over",
        })
    }
}

/// A running stream of events. Dropping it cancels the request, unless that has an id of its own.
///
/// When the connection breaks, it comes back to where it was, and goes on.
///
/// It keeps the order that was promised: an event out of order, or an end without `Finished`, is an error with
/// [`Reason::ProtocolViolation`]. After an error or `Finished` it is over.
#[derive(Debug)]
pub struct Generation {
    // Dropped at the end, so that a server that is still busy learns of it.
    source: Source,
    held: Option<Held>,
    deadline: Option<Deadline>,
    stage: Stage,
    returns: u32,
    survived: Vec<v1::Survived>,
    peer: String,
    traceparent: Option<String>,
}

#[derive(Debug)]
struct Deadline {
    after: Duration,
    timer: Pin<Box<Sleep>>,
}

impl Deadline {
    fn error(after: Duration) -> Error {
        Error::new(
            Reason::DeadlineExceeded,
            format!(
                "the deadline of {after:?} passed before the stream was complete; \
                 allow more time or fewer tokens"
            ),
        )
        .with("deadline_ms", after.as_millis())
    }
}

impl Generation {
    /// The next event; `None` when the stream is over.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        StreamExt::next(self).await
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The stream's.
    pub async fn complete(mut self) -> Result<Completion, Error> {
        let mut accepted = None;
        let mut text = String::new();
        let mut token_ids = Vec::new();
        let mut logprobs = Vec::new();
        while let Some(event) = self.next().await {
            match event? {
                Event::Accepted(event) => accepted = Some(event),
                Event::Delta(delta) => {
                    text.push_str(&delta.text);
                    token_ids.extend(delta.token_ids);
                    logprobs.extend(delta.logprobs);
                }
                Event::Finished(finished) => {
                    return Ok(Completion {
                        accepted: accepted.unwrap_or_default(),
                        text,
                        token_ids,
                        logprobs,
                        finished,
                    });
                }
            }
        }
        Err(self.violation("ended early"))
    }

    fn violation(&self, what: &str) -> Error {
        Error::new(
            Reason::ProtocolViolation,
            format!(
                "the token stream from {} {what}; please report it",
                self.peer
            ),
        )
    }

    /// How often the connection broke and was made again.
    pub fn returns(&self) -> u32 {
        self.returns
    }

    /// Where the request is in its trace, as W3C's `traceparent`, if the scheduler makes traces.
    pub fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// The workers that died under this stream so far, of which its events tell nothing but a pause: as many as the
    /// last event's `deaths_survived`, less those that came before a stream that was attached to began here.
    pub fn survived(&self) -> &[v1::Survived] {
        &self.survived
    }

    /// Ends the request, also one with an id of its own, and waits a moment until the server knows.
    pub async fn cancel(mut self) {
        let over = matches!(self.source, Source::Over);
        self.source = Source::Over;
        if let Some(held) = self.held.as_mut().filter(|_| !over) {
            held.cancel().await;
        }
    }

    /// Checks one message against the promised order; nothing for the greeting of a stream come back to.
    fn check(&mut self, message: v1::GenerateEvent) -> Option<Result<Event, Error>> {
        use v1::generate_event::Event as Wire;
        let event = match (self.stage, message.event) {
            (Stage::Opened, Some(Wire::Accepted(accepted))) => {
                self.stage = Stage::Accepted;
                Event::Accepted(accepted)
            }
            (Stage::Returned { resumed }, Some(Wire::Accepted(accepted))) => {
                self.stage = Stage::Accepted;
                let held = self.held.as_mut()?;
                let error = held.recognise(&accepted, resumed).err()?;
                held.cancel_soon();
                return Some(Err(error));
            }
            (Stage::Accepted, Some(Wire::Delta(delta))) => Event::Delta(delta),
            (Stage::Accepted, Some(Wire::Finished(finished))) => Event::Finished(finished),
            (_, None) => return Some(Err(self.violation("holds an event of no known kind"))),
            (_, Some(_)) => return Some(Err(self.violation("is out of order"))),
        };
        if let Some(held) = &mut self.held {
            held.note(&event);
        }
        let survived = match &event {
            Event::Accepted(_) => &[][..],
            Event::Delta(delta) => &delta.survived,
            Event::Finished(finished) => &finished.survived,
        };
        let room = (limits::MAX_CONTINUATIONS as usize).saturating_sub(self.survived.len());
        self.survived.extend(survived.iter().take(room).cloned());
        Some(Ok(event))
    }

    /// What comes next from where it comes from now; nothing: look again.
    fn advance(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Event, Error>>> {
        match &mut self.source {
            Source::Over => Poll::Pending,
            Source::Open(stream) => {
                match std::task::ready!(Pin::new(stream.as_mut()).poll_next(context)) {
                    Some(Ok(message)) => Poll::Ready(self.check(message)),
                    Some(Err(status)) => {
                        let error = read_status(&self.peer, &status);
                        let way = self.held.as_mut().and_then(|held| held.way_back(&error));
                        let Some(way) = way else {
                            // A server's own words, or nobody is there: nothing is left to cancel.
                            self.held.iter_mut().for_each(Held::release);
                            return Poll::Ready(Some(Err(error)));
                        };
                        self.source = Source::Coming(Box::pin(way));
                        Poll::Ready(None)
                    }
                    None => Poll::Ready(Some(Err(self.violation("ended without its last event")))),
                }
            }
            Source::Coming(way) => {
                let back = std::task::ready!(way.as_mut().poll(context));
                match back {
                    Ok(Back {
                        stream,
                        resumed,
                        moved,
                    }) => {
                        if let Some(client) = moved {
                            client.peer().clone_into(&mut self.peer);
                            self.held.iter_mut().for_each(|h| h.move_to(client.clone()));
                        }
                        self.source = Source::Open(Box::new(stream));
                        self.returns += 1;
                        if self.stage != Stage::Opened {
                            self.stage = Stage::Returned { resumed };
                        }
                        Poll::Ready(None)
                    }
                    Err(error) => {
                        self.held.iter_mut().for_each(Held::release);
                        Poll::Ready(Some(Err(error)))
                    }
                }
            }
        }
    }
}

impl Stream for Generation {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if matches!(this.source, Source::Over) {
            return Poll::Ready(None);
        }
        // An event that is there already counts even if the deadline has just passed.
        let result = loop {
            match this.advance(context) {
                Poll::Ready(Some(result)) => break result,
                Poll::Ready(None) => {}
                Poll::Pending => {
                    let Some(deadline) = this.deadline.as_mut() else {
                        return Poll::Pending;
                    };
                    if deadline.timer.as_mut().poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    break Err(Deadline::error(deadline.after));
                }
            }
        };
        if !matches!(result, Ok(Event::Accepted(_) | Event::Delta(_))) {
            if let Some(mut held) = this.held.take()
                && result.is_ok()
            {
                held.release();
            }
            this.stage = Stage::Over;
            this.source = Source::Over;
            this.deadline = None;
        }
        Poll::Ready(Some(result))
    }
}

/// W3C's header.
const TRACEPARENT: &str = "traceparent";

/// The header that names the span which a request is made in.
type TraceHeader = MetadataValue<Ascii>;

fn trace_header(parent: &str) -> Result<Option<TraceHeader>, Error> {
    if parent.is_empty() {
        return Ok(None);
    }
    let header = parent.parse().map_err(|_| {
        let what = format!("{parent:?} is no traceparent");
        Error::new(Reason::InvalidArgument, what).with("field", TRACEPARENT)
    });
    header.map(Some)
}

/// A request that carries it.
fn traced<T>(message: T, parent: Option<TraceHeader>) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    if let Some(parent) = parent {
        request.metadata_mut().insert(TRACEPARENT, parent);
    }
    request
}

impl Client {
    /// Continues `prompt`. The request runs until the stream is over or dropped.
    ///
    /// # Errors
    /// The server's, where it refuses the request before the first event; [`Reason::DeadlineExceeded`];
    /// [`Reason::InvalidArgument`] for a `traceparent` that is no text of a header; one for which [`crate::connect::is_unreachable`] holds.
    pub async fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Result<Generation, Error> {
        let after = options.deadline;
        // tonic keeps a deadline for the response's head only; the stream's is ours.
        let end = after.and_then(|after| Instant::now().checked_add(after));
        let patience = match self.reconnects() {
            true => options.reattach.unwrap_or(back::PATIENCE),
            false => Duration::ZERO,
        };
        let own = !options.request_id.is_empty();
        let parent = trace_header(&options.traceparent)?;
        let mut message = options.into_request(prompt.into());
        if !own && !patience.is_zero() {
            RequestId::random()?
                .as_str()
                .clone_into(&mut message.request_id);
        }
        let named = !message.request_id.is_empty();
        // Made before the call, which may be dropped when the request is on its way.
        let mut held =
            named.then(|| Held::of_request(self, &message, parent.clone(), patience, !own));
        let mut request = traced(message, parent);
        if let Some(after) = after {
            // gRPC writes at most eight digits; more than about three years is no deadline.
            request.set_timeout(after.min(Duration::from_secs(99_999_999)));
        }
        let mut client = self.tokens_client();
        let call = client.generate(request);
        let mut deadline = end.zip(after).map(|(end, after)| Deadline {
            after,
            timer: Box::pin(tokio::time::sleep_until(end)),
        });
        let response = match &mut deadline {
            None => call.await,
            Some(deadline) => tokio::select! {
                biased;
                response = call => response,
                () = deadline.timer.as_mut() => return Err(Deadline::error(deadline.after)),
            },
        };
        let read = |status| {
            let error = read_status(self.peer(), &status);
            match (error.reason(), end.zip(after)) {
                // tonic's own timer, which is set to the same time, says CANCELLED.
                (Reason::Cancelled, Some((end, after))) if Instant::now() >= end => {
                    Deadline::error(after)
                }
                _ => error,
            }
        };
        let response = response.map_err(read);
        let place = response.as_ref().ok();
        let place = place.and_then(|response| response.metadata().get(TRACEPARENT));
        let traceparent = place.and_then(|place| Some(place.to_str().ok()?.to_owned()));
        let source = match response {
            Ok(response) => Source::Open(Box::new(response.into_inner())),
            // The connection may have broken long ago, unnoticed.
            Err(error) => match held.as_mut().and_then(|held| held.way_back(&error)) {
                Some(way) => Source::Coming(Box::pin(way)),
                None => {
                    // Refused: nothing is left to cancel.
                    held.iter_mut().for_each(Held::release);
                    return Err(error);
                }
            },
        };
        Ok(Generation {
            source,
            held,
            deadline,
            stage: Stage::Opened,
            returns: 0,
            survived: Vec::new(),
            peer: self.peer().to_owned(),
            traceparent,
        })
    }

    /// Goes on with a stream that another process, or this one before, began under an id of its own: after
    /// `next_token` tokens and so many bytes of their text; none: all that came with them. The events begin with
    /// `Accepted` again. Whoever reads it now is told so and reads it no more.
    ///
    /// # Errors
    /// [`Reason::RequestNotFound`] if the scheduler does not know it (any more), [`Reason::TokensForgotten`] if it
    /// does not hold what comes next.
    pub async fn attach(
        &self,
        request_id: &str,
        next_token: u64,
        text_bytes: Option<u64>,
    ) -> Result<Generation, Error> {
        let from = v1::AttachRequest {
            request_id: request_id.to_owned(),
            next_token,
            text_bytes,
        };
        let patience = match self.reconnects() {
            true => back::PATIENCE,
            false => Duration::ZERO,
        };
        let held = Held::of_stream(self, &from, patience);
        let response = self.tokens_client().attach(from).await;
        Ok(Generation {
            source: Source::Open(Box::new(self.answer(response)?)),
            held: Some(held),
            deadline: None,
            stage: Stage::Opened,
            returns: 0,
            survived: Vec::new(),
            peer: self.peer().to_owned(),
            traceparent: None,
        })
    }
}
