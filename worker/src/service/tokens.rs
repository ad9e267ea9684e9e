//! `hotcell.v1.Tokens`: prompts in, streams of tokens out.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

use hotcell_proto::{
    deadline,
    error::{Error, Reason},
    ids::RequestId,
    limits,
    receipt::request_hash,
    v1::{self, tokens_server::Tokens},
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::{
    engine::Engine,
    entropy,
    error::of_sampling,
    generate::{
        fair::Class,
        sampler::SamplingParams,
        sequence::{self, Event, Outlet, Place, Sequence},
        task::Task,
    },
    host::{Host, Loaded},
};

use super::embed;

/// The service.
pub struct TokensService(pub Host);

/// Requests inside at once. More than the scheduler hands out, because it counts a cancelled one as gone
/// before the engine's next step sees it.
const PLACES: usize = limits::MAX_WORKER_REQUESTS + 64;

/// Tokens that are read on the event loop at a request's beginning; more are another thread's work, for others' events wait.
const AT_ONCE: usize = 2048;

/// A stream of events. Reading from it, or dropping it, wakes an engine that waits for room.
pub struct Events {
    events: mpsc::Receiver<Event>,
    paused: Arc<AtomicBool>,
    engine: Engine,
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = self.events.poll_recv(cx);
        if event.is_ready() && self.paused.swap(false, Ordering::SeqCst) {
            self.engine.wake();
        }
        event
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // Closed first, so that the engine sees nobody there when it wakes.
        self.events.close();
        self.engine.wake();
    }
}

fn keeps_nothing() -> Error {
    Error::new(
        Reason::RequestNotFound,
        "a worker keeps no streams: each ends when its reader leaves; a scheduler keeps them",
    )
}

pub(super) fn at_most(what: &str, count: usize, limit: usize) -> Result<(), Error> {
    if count > limit {
        return Err(Error::new(
            Reason::LimitExceeded,
            format!("{count} {what}; the limit is {limit}"),
        ));
    }
    Ok(())
}

fn sampling(request: &v1::GenerateRequest, seed: u64) -> SamplingParams {
    let neutral = SamplingParams::default();
    let s = request.sampling.clone().unwrap_or_default();
    SamplingParams {
        temperature: s.temperature.unwrap_or(neutral.temperature),
        top_k: s.top_k.unwrap_or(neutral.top_k),
        top_p: s.top_p.unwrap_or(neutral.top_p),
        min_p: s.min_p.unwrap_or(neutral.min_p),
        repetition_penalty: s.repetition_penalty.unwrap_or(neutral.repetition_penalty),
        presence_penalty: s.presence_penalty.unwrap_or(neutral.presence_penalty),
        frequency_penalty: s.frequency_penalty.unwrap_or(neutral.frequency_penalty),
        logit_bias: s.logit_bias.iter().map(|b| (b.token, b.bias)).collect(),
        seed,
        branch: request.branch,
        logprobs: request.logprobs,
        top_logprobs: request.top_logprobs,
    }
}

/// Every id must have an embedding.
pub(super) fn in_vocabulary(what: &str, ids: &[u32], model: &Loaded) -> Result<(), Error> {
    match ids.iter().find(|id| **id >= model.vocab) {
        Some(id) => Err(Error::new(
            Reason::InvalidArgument,
            format!(
                "{what} {id} is not in the vocabulary of {} tokens",
                model.vocab
            ),
        )),
        None => Ok(()),
    }
}

/// Checks a request against its model.
fn check(mut wire: v1::GenerateRequest, model: &Loaded) -> Result<sequence::Request, Error> {
    at_most("stop strings", wire.stop.len(), limits::MAX_STOP_STRINGS)?;
    at_most(
        "stop tokens",
        wire.stop_tokens.len(),
        limits::MAX_STOP_TOKENS,
    )?;
    for stop in &wire.stop {
        at_most("bytes in a stop string", stop.len(), limits::MAX_STOP_BYTES)?;
    }
    let prompt = model.text.prepare(wire.prompt.as_ref(), false)?.ids;
    if prompt.is_empty() {
        return Err(Error::new(
            Reason::InvalidArgument,
            "the prompt is empty; give at least one token",
        ));
    }
    in_vocabulary("prompt id", &prompt, model)?;
    let grammar = match &wire.grammar {
        Some(_) if wire.ignore_eos => {
            return Err(Error::new(
                Reason::InvalidArgument,
                "a text that follows a grammar ends where the grammar does; leave ignore_eos out",
            ));
        }
        Some(grammar) => {
            let (tokenizer, ends) = (&model.text.tokenizer, &model.end_tokens);
            let family = &model.text.family;
            Some(model.grammars.follow(grammar, tokenizer, ends, family)?)
        }
        None => None,
    };
    let parser = wire.parse_output.then(|| {
        let (family, tokenizer) = (&model.text.family, &model.text.tokenizer);
        let grammar = wire.grammar.as_ref().and_then(|g| g.kind.as_ref());
        (family.clone(), family.parser(tokenizer, &prompt, grammar))
    });
    let resume = wire.resume.clone().unwrap_or_default();
    at_most(
        "resumed ids",
        resume.generated_ids.len(),
        limits::MAX_PROMPT_TOKENS,
    )?;
    in_vocabulary("resumed id", &resume.generated_ids, model)?;
    let id = match wire.request_id.as_str() {
        "" => RequestId::random()?,
        id => RequestId::new(id)?,
    };
    let seed = match wire.seed {
        Some(seed) => seed,
        None => u64::from_ne_bytes(entropy::bytes()?),
    };
    let sampling = sampling(&wire, seed);
    sampling
        .validate(model.vocab)
        .map_err(|e| of_sampling(&e))?;
    let own = if wire.ignore_eos {
        &[][..]
    } else {
        &model.end_tokens[..]
    };
    let hash = request_hash(&prompt, seed, &wire);
    (wire.prompt, wire.resume) = (None, None);
    Ok(sequence::Request {
        id: id.as_str().to_owned(),
        hash,
        prompt,
        generated: resume.generated_ids,
        text_bytes_emitted: resume.text_bytes_emitted,
        sampling,
        max_tokens: (wire.max_tokens > 0).then_some(wire.max_tokens as usize),
        stop: wire.stop.clone(),
        grammar,
        parser,
        end_tokens: own.iter().chain(&wire.stop_tokens).copied().collect(),
        deadline: None,
        class: class(&wire.tenant, wire.priority)?,
        speculate: !wire.no_speculation,
        asked: Box::new(wire),
    })
}

/// Begins a request: its events, of which the first is there already.
pub(super) async fn begin(
    host: &Host,
    wire: v1::GenerateRequest,
    deadline: Option<Instant>,
) -> Result<Events, Error> {
    host.accepting()?;
    let model = host.model(&wire.model)?;
    let few_ids = match wire.prompt.as_ref().and_then(|p| p.kind.as_ref()) {
        Some(v1::prompt::Kind::Ids(all)) => all.ids.len() <= AT_ONCE,
        _ => false,
    };
    let mut checked = if few_ids && wire.grammar.is_none() && !wire.parse_output {
        check(wire, &model)?
    } else {
        let model = Arc::clone(&model);
        host.text_work(move || check(wire, &model)).await?
    };
    checked.deadline = deadline;
    let place = place(host)?;
    let (events, reader) = mpsc::channel(limits::STREAM_BUFFER);
    let paused = Arc::new(AtomicBool::new(false));
    let accepted = v1::Accepted {
        request_id: checked.id.clone(),
        model: model.name.clone(),
        prompt_ids: checked.prompt.clone(),
        seed: checked.sampling.seed,
        numerics: Some(model.numerics.clone()),
    };
    let outlet = Outlet {
        events: events.clone(),
        paused: Arc::clone(&paused),
        place,
    };
    let read = checked.prompt.len().saturating_add(checked.generated.len());
    let known = Arc::clone(&model);
    let make = move || {
        let numerics = known.numerics.clone();
        Sequence::new(
            checked,
            &known.text.tokenizer,
            known.context,
            numerics,
            outlet,
        )
    };
    let (sequence, end) = match read > AT_ONCE {
        true => host.text_work(make).await?,
        false => make()?,
    };
    let accepted = v1::GenerateEvent {
        event: Some(v1::generate_event::Event::Accepted(accepted)),
    };
    // The channel is new and has room.
    let _ = events.try_send(Ok(accepted));
    match end {
        Some(end) => sequence.finish(end, Instant::now()),
        None => {
            let task = Task::Generate(Box::new(sequence));
            host.engine().compute(model.name.clone(), task)?;
        }
    }
    Ok(Events {
        events: reader,
        paused,
        engine: host.engine().clone(),
    })
}

/// Checks whose a request is, and how urgent.
pub(super) fn class(tenant: &str, priority: u32) -> Result<Class, Error> {
    at_most(
        "characters in the tenant",
        tenant.chars().count(),
        limits::MAX_TENANT,
    )?;
    if priority > limits::MAX_PRIORITY {
        return Err(Error::new(
            Reason::InvalidArgument,
            format!(
                "priority is {priority}; it must be in [0, {}]",
                limits::MAX_PRIORITY
            ),
        ));
    }
    Ok(Class {
        tenant: tenant.into(),
        priority,
    })
}

/// A place for one more request.
pub(super) fn place(host: &Host) -> Result<Place, Error> {
    Place::take(host.places(), PLACES).ok_or_else(|| {
        let what = format!(
            "{} requests are in this worker already; try again later",
            limits::MAX_WORKER_REQUESTS
        );
        Error::new(Reason::Overloaded, what)
    })
}

#[tonic::async_trait]
impl Tokens for TokensService {
    type GenerateStream = Events;
    type AttachStream = Events;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Events>, Status> {
        let deadline = deadline::of(request.metadata())?;
        let events = begin(&self.0, request.into_inner(), deadline).await?;
        Ok(Response::new(events))
    }

    async fn attach(&self, _: Request<v1::AttachRequest>) -> Result<Response<Events>, Status> {
        Err(keeps_nothing().into())
    }

    async fn cancel(
        &self,
        _: Request<v1::CancelStreamRequest>,
    ) -> Result<Response<v1::CancelStreamResponse>, Status> {
        Err(keeps_nothing().into())
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let request = request.into_inner();
        let model = self.0.model(&request.model)?;
        let name = model.name.clone();
        let prepare = move || {
            model
                .text
                .prepare(request.prompt.as_ref(), request.without_special)
        };
        let prepared = self.0.text_work(prepare).await?;
        let response = v1::TokenizeResponse {
            model: name,
            ids: prepared.ids,
            text: prepared.text,
        };
        Ok(Response::new(response))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let model = self.0.model(&request.model)?;
        in_vocabulary("id", &request.ids, &model)?;
        let name = model.name.clone();
        let detokenize = move || model.text.detokenize(&request.ids, request.with_special);
        let text = self.0.text_work(detokenize).await?;
        Ok(Response::new(v1::DetokenizeResponse { model: name, text }))
    }

    async fn embed(
        &self,
        request: Request<v1::EmbedRequest>,
    ) -> Result<Response<v1::EmbedResponse>, Status> {
        let deadline = deadline::of(request.metadata())?;
        let response = embed::embed(&self.0, request.into_inner(), deadline).await?;
        Ok(Response::new(response))
    }
}
