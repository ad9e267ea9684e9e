//! Token requests as all doors make them: one prompt, perhaps several continuations, and what comes of each.

use std::{future::ready, time::Duration};

use axum::response::Response;

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        Accepted, Chat, Delta, EmbedRequest, EmbedResponse, FinishReason, Finished,
        GenerateRequest, OutputPart, Prompt, TokenLogprob, Usage, generate_event::Event,
        output_part::Kind, prompt,
    },
};
use serde_json::{Map, Value};
use tokio::time::Instant;
use tokio_stream::{StreamExt, StreamMap};

use super::sse::{Framing, Gone, Out, respond};
use crate::{access::Caller, rarely::Patience, service::Shared, stream::EventStream};

/// How long a client waits for a word before it gets one that says nothing.
pub(super) const PING: Duration = Duration::from_secs(15);

/// What comes next of which continuation.
pub(super) type Next = Result<(u32, Event), Error>;

/// Vectors for as many prompts as clients of HTTP send at once, some at a time.
///
/// # Errors
/// [`Reason::LimitExceeded`] for more than [`limits::MAX_EMBED_INPUTS`], and why there are none.
pub(super) async fn embed(
    shared: &Shared,
    request: EmbedRequest,
    caller: &Caller,
) -> Result<EmbedResponse, Error> {
    let (count, most) = (request.prompts.len(), limits::MAX_EMBED_INPUTS);
    if count > most {
        let what = format!("{count} inputs are more than the limit of {most}");
        let error = Error::new(Reason::LimitExceeded, what).with("limit", most);
        return Err(error.with("field", "input"));
    }
    let mut rest = request.prompts;
    let mut whole: Option<EmbedResponse> = None;
    loop {
        let later = rest.split_off(rest.len().min(limits::MAX_EMBED_PROMPTS));
        let some = EmbedRequest {
            model: request.model.clone(),
            prompts: rest,
            ..EmbedRequest::default()
        };
        let answer = shared.embed(some, None, caller).await?;
        let all = match &mut whole {
            None => whole.insert(answer),
            // Vectors of two models are no answer.
            Some(all) if all.numerics != answer.numerics => {
                let what = format!("model {} was replaced meanwhile; send it again", all.model);
                return Err(Error::new(Reason::Overloaded, what));
            }
            Some(all) => {
                all.embeddings.extend(answer.embeddings);
                all
            }
        };
        if later.is_empty() {
            return Ok(std::mem::take(all));
        }
        rest = later;
    }
}

/// Refuses vectors of another length than was asked for: a model has one.
///
/// # Errors
/// [`Reason::InvalidArgument`].
pub(super) fn of_length(answer: &EmbedResponse, dimensions: Option<usize>) -> Result<(), Error> {
    let mut lengths = answer.embeddings.iter().map(|e| e.values.len());
    match dimensions.zip(lengths.next()) {
        Some((dimensions, length)) if dimensions != length => {
            let model = &answer.model;
            let why = format!(
                "dimensions is {dimensions}; {model} gives vectors of {length} and no others"
            );
            Err(Error::new(Reason::InvalidArgument, why).with("field", "dimensions"))
        }
        _ => Ok(()),
    }
}

/// The continuations of one prompt, as they come.
pub(super) struct Branches {
    streams: StreamMap<u32, EventStream>,
    /// Whether only the first call of a tool is told.
    one_call: bool,
}

impl Branches {
    /// Asks for `n` continuations of a prompt; their seed is one and their branches are 0 to `n`.
    ///
    /// # Errors
    /// Why the request may not come in.
    pub fn begin(
        shared: &Shared,
        request: GenerateRequest,
        n: u32,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<Self, Error> {
        Self::begin_all(shared, vec![request], n, deadline, caller)
    }

    /// The same of several prompts: branch `i * n + j` is continuation `j` of prompt `i`.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_all(
        shared: &Shared,
        requests: Vec<GenerateRequest>,
        n: u32,
        deadline: Option<Instant>,
        caller: &Caller,
    ) -> Result<Self, Error> {
        let all = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        let all = all.saturating_mul(n);
        if all == 0 || all > limits::MAX_CHOICES {
            let what = format!(
                "{all} continuations were asked for; between 1 and {} can be had",
                limits::MAX_CHOICES
            );
            return Err(Error::new(Reason::LimitExceeded, what).with("field", "n"));
        }
        let mut streams = StreamMap::new();
        let mut index = 0;
        for mut request in requests {
            shared.may_name(&request.model, caller)?;
            if request.seed.is_none() && n > 1 {
                request.seed = Some(random()?);
            }
            for branch in 0..n {
                let request = GenerateRequest {
                    branch,
                    ..request.clone()
                };
                streams.insert(index, shared.generate(request, deadline, caller)?);
                index += 1;
            }
        }
        Ok(Self {
            streams,
            one_call: false,
        })
    }

    /// The same; of several calls of tools that a model makes, the first one only if there is to be one.
    pub fn one_call(self, one_call: bool) -> Self {
        Self { one_call, ..self }
    }

    /// What came next, and of which continuation. None once all are finished; nothing comes after an error.
    ///
    /// # Errors
    /// Why a continuation cannot go on, which ends all of them.
    pub async fn next(&mut self) -> Option<Next> {
        loop {
            let (index, item) = self.streams.next().await?;
            match item {
                Ok(event) => {
                    if let Some(mut event) = event.event {
                        if let Event::Delta(delta) = &mut event
                            && self.one_call
                        {
                            delta.parts.retain(|part| !is_further_call(part));
                        }
                        return Some(Ok((index, event)));
                    }
                }
                Err(status) => {
                    self.streams.clear();
                    return Some(Err(Error::from_status(&status)));
                }
            }
        }
    }

    /// As [`next`](Self::next), with a word that says nothing to the client whenever it takes long, so that no proxy
    /// between takes the silence for an end. Lines have no such word.
    ///
    /// # Errors
    /// If the client went away.
    async fn next_or_ping(
        &mut self,
        (out, framing): (&Out, Framing),
        patience: &mut Patience,
    ) -> Result<Option<Next>, Gone> {
        if framing == Framing::Lines {
            return Ok(self.next().await);
        }
        loop {
            match patience.of(self.next()).await {
                Ok(next) => return Ok(next),
                Err(_) => out.ping().await?,
            }
        }
    }

    /// Waits for the first word: what is refused is refused before anything is said.
    ///
    /// # Errors
    /// Why.
    pub async fn first(&mut self) -> Result<(u32, Event), Error> {
        self.next().await.unwrap_or_else(|| Err(nothing()))
    }
}

/// Whether a piece is one of a call after the first.
fn is_further_call(part: &OutputPart) -> bool {
    matches!(&part.kind, Some(Kind::ToolCall(call)) if call.index > 0)
}

fn nothing() -> Error {
    Error::new(Reason::Internal, "a stream ended without a word")
}

fn random() -> Result<u64, Error> {
    getrandom::u64()
        .map_err(|e| Error::new(Reason::Internal, format!("no random bytes for a seed: {e}")))
}

/// Tells a request's events in a protocol's form.
pub(super) trait Tell: Send + 'static {
    /// How its stream is framed.
    const FRAMING: Framing;

    /// Tells one of a continuation.
    fn tell(
        &mut self,
        out: &Out,
        next: (u32, Event),
    ) -> impl Future<Output = Result<(), Gone>> + Send;

    /// Tells why the stream cannot go on; nothing is told after that.
    fn fail(&mut self, out: &Out, error: &Error) -> impl Future<Output = Result<(), Gone>> + Send;

    /// Tells that all was told.
    fn end(&mut self, _: &Out) -> impl Future<Output = Result<(), Gone>> + Send {
        ready(Ok(()))
    }
}

/// A response that is told as it comes.
///
/// # Errors
/// What comes before the first word: that is no stream yet.
pub(super) async fn stream<T: Tell>(
    mut branches: Branches,
    mut telling: T,
) -> Result<Response, Error> {
    let first = branches.first().await?;
    Ok(respond(T::FRAMING, move |out| async move {
        telling.tell(&out, first).await?;
        let mut patience = Patience::new(PING);
        let to = (&out, T::FRAMING);
        while let Some(next) = branches.next_or_ping(to, &mut patience).await? {
            match next {
                Ok(next) => telling.tell(&out, next).await?,
                Err(error) => return telling.fail(&out, &error).await,
            }
        }
        telling.end(&out).await
    }))
}

/// A call of a tool that a model made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    pub id: String,
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

/// The id of a request's call.
pub(super) fn call_id(request: &str, index: u32) -> String {
    format!("call_{request}_{index}")
}

/// One continuation, put together.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub accepted: Accepted,
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
    pub logprobs: Vec<TokenLogprob>,
    pub finished: Finished,
    /// Tokens that came.
    pub tokens: u32,
    /// Those of them that came until its last thought was told: marks around thoughts count as thoughts.
    pub thought_tokens: u32,
}

impl Answer {
    /// Adds what came.
    fn push(&mut self, event: Event, parsed: bool) {
        match event {
            Event::Accepted(accepted) => self.accepted = accepted,
            Event::Delta(delta) => {
                self.count(&delta);
                for part in pieces(&delta, parsed) {
                    match part {
                        Piece::Content(text) => self.content.push_str(text),
                        Piece::Reasoning(text) => self.reasoning.push_str(text),
                        Piece::Call {
                            index,
                            name,
                            arguments,
                        } => self.call(index, name, arguments),
                    }
                }
                self.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finished) => self.finished = finished,
        }
    }

    /// Counts the tokens of what came.
    pub fn count(&mut self, delta: &Delta) {
        let came = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(came);
        if pieces(delta, true).any(|piece| matches!(piece, Piece::Reasoning(_))) {
            self.thought_tokens = self.tokens;
        }
    }

    /// Adds more of a call.
    pub fn call(&mut self, index: u32, name: &str, arguments: &str) {
        let place = index as usize;
        // A worker numbers them one after the other; one that does not is believed no more than that.
        if place > self.calls.len() {
            return;
        }
        if place == self.calls.len() {
            self.calls.push(Call {
                id: call_id(&self.accepted.request_id, index),
                ..Call::default()
            });
        }
        if let Some(call) = self.calls.get_mut(place) {
            call.name.push_str(name);
            call.arguments.push_str(arguments);
        }
    }

    /// What it took.
    pub fn usage(&self) -> Usage {
        self.finished.usage.unwrap_or_default()
    }
}

/// Whether a text was cut off before it came to an end of its own.
pub(super) fn is_cut(finished: &Finished) -> bool {
    matches!(
        finished.reason(),
        FinishReason::MaxTokens | FinishReason::ContextFull
    )
}

/// What a model called a tool with, as a value: what is no JSON is told as the text that it is.
pub(super) fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

/// What a template is told of how much its model should think before it answers; `none` is not at all.
pub(super) fn effort(effort: &str) -> Map<String, Value> {
    let mut told = Map::new();
    let thinks = effort != "none";
    told.insert("enable_thinking".to_owned(), Value::from(thinks));
    if thinks {
        told.insert("reasoning_effort".to_owned(), Value::from(effort));
    }
    told
}

/// A prompt of messages.
pub(super) fn chat(chat: Chat) -> Option<Prompt> {
    let kind = prompt::Kind::Chat(chat);
    Some(Prompt { kind: Some(kind) })
}

/// A piece of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    Content(&'a str),
    Reasoning(&'a str),
    Call {
        index: u32,
        name: &'a str,
        arguments: &'a str,
    },
}

/// What a delta means: its parts if those were asked for, its text otherwise.
pub(super) fn pieces(delta: &Delta, parsed: bool) -> impl Iterator<Item = Piece<'_>> {
    let text = (!parsed && !delta.text.is_empty()).then_some(Piece::Content(&delta.text));
    let parts = delta.parts.iter().filter(move |_| parsed);
    text.into_iter().chain(parts.filter_map(piece))
}

fn piece(part: &OutputPart) -> Option<Piece<'_>> {
    Some(match part.kind.as_ref()? {
        Kind::Content(text) => Piece::Content(text),
        Kind::Reasoning(text) => Piece::Reasoning(text),
        Kind::ToolCall(call) => Piece::Call {
            index: call.index,
            name: &call.name,
            arguments: &call.arguments,
        },
    })
}

/// All continuations, put together.
///
/// # Errors
/// Why one cannot go on.
pub(super) async fn complete(
    mut branches: Branches,
    count: usize,
    parsed: bool,
) -> Result<Vec<Answer>, Error> {
    let mut answers = vec![Answer::default(); count];
    while let Some(next) = branches.next().await {
        let (index, event) = next?;
        if let Some(answer) = answers.get_mut(index as usize) {
            answer.push(event, parsed);
        }
    }
    Ok(answers)
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
