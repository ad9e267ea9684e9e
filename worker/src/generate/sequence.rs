//! One request as the engine sees it: its tokens, what it draws with, and the stream it fills.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    receipt::{Hash, Output, receipt},
    v1::{self, FinishReason},
};
use tokio::sync::mpsc;
use tonic::Status;

use super::{
    fair::Class,
    grammar::Follower,
    masks::Masks,
    meaning::Meaning,
    sampler::{self, PenaltyState, Sampled, SamplingParams},
};
use crate::{
    error::{of_sampling, of_text},
    model::run::Draw,
    text::{Detokenizer, Family, Parser, StopStrings, Tokenizer},
};

/// What a stream's reader gets.
pub type Event = Result<v1::GenerateEvent, Status>;

/// A checked request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its id.
    pub id: String,
    /// What its receipt calls it.
    pub hash: Hash,
    /// Token ids of the prompt; at least one, all in the vocabulary.
    pub prompt: Vec<u32>,
    /// Tokens that it drew elsewhere already.
    pub generated: Vec<u32>,
    /// Bytes of their text that its reader has.
    pub text_bytes_emitted: u64,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Tokens to draw at most, those drawn elsewhere included; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// What its text follows, at the text's beginning.
    pub grammar: Option<Follower>,
    /// Says what its text means, if that was asked for.
    pub parser: Option<(Family, Parser)>,
    /// Tokens that end it: the model's own unless ignored, and the request's.
    pub end_tokens: HashSet<u32>,
    /// When it must be over.
    pub deadline: Option<Instant>,
    /// Whose it is, and how urgent.
    pub class: Class,
    /// Whether tokens may be guessed.
    pub speculate: bool,
    /// As it was asked, without its prompt and what it goes on from.
    pub asked: Box<v1::GenerateRequest>,
}

/// Counts the requests inside a worker; one is a place in the queue, given back when dropped.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Place {
    /// A place, unless `limit` are taken.
    pub fn take(counter: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let free = |n: usize| (n < limit).then_some(n + 1);
        let taken = counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, free);
        taken.ok().map(|_| Self(Arc::clone(counter)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Why and how a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Why.
    pub reason: FinishReason,
    /// The stop string or token.
    pub matched: String,
}

/// A request in the engine.
pub struct Sequence {
    request: Request,
    /// It has a grammar, which another thread computes a mask of.
    grammar_is_away: bool,
    /// Prompt and what was drawn.
    tokens: Vec<u32>,
    /// How many of the prompt's were in the cache when it began.
    cached: Option<usize>,
    penalties: PenaltyState,
    detokenizer: Detokenizer,
    stops: StopStrings,
    meaning: Option<Meaning>,
    /// Text that became final and was not sent yet.
    text: String,
    /// Hashes what was said.
    output: Output,
    context: usize,
    events: mpsc::Sender<Event>,
    /// Set when the sequence waits for its reader, who then wakes the engine.
    paused: Arc<AtomicBool>,
    numerics: v1::NumericsClass,
    arrived: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    _place: Place,
}

/// What a sequence is made with besides its request.
pub struct Outlet {
    /// Where events go.
    pub events: mpsc::Sender<Event>,
    /// Tells the reader that the engine waits for it.
    pub paused: Arc<AtomicBool>,
    /// The place in the queue.
    pub place: Place,
}

/// Events that must fit into the channel before a sequence may compute a token: a delta and an end.
const ROOM: usize = 2;

impl Sequence {
    /// A sequence at its beginning, or after the tokens it drew elsewhere. If those already end it,
    /// the end comes with it.
    ///
    /// # Errors
    /// When the stop strings are refused or the prompt leaves no room in the context.
    pub fn new(
        mut request: Request,
        tokenizer: &Tokenizer,
        context: usize,
        numerics: v1::NumericsClass,
        outlet: Outlet,
    ) -> Result<(Self, Option<End>), Error> {
        if request.prompt.len() >= context {
            return Err(Error::new(
                Reason::PromptTooLong,
                format!(
                    "the prompt has {} tokens and the model's context {context}; shorten it by {}",
                    request.prompt.len(),
                    request.prompt.len() + 1 - context
                ),
            ));
        }
        let mut detokenizer = tokenizer.detokenizer(true).map_err(|e| of_text(&e))?;
        detokenizer.prime(&request.prompt);
        let mut stops = StopStrings::new(request.stop.clone()).map_err(|e| of_text(&e))?;
        let skip = request.text_bytes_emitted;
        let parser = request.parser.take();
        let meaning = parser.map(|(family, p)| Meaning::new(family, p, stops.clone(), skip));
        stops.skip(skip);
        let penalties = match request.sampling.repeats() {
            true => PenaltyState::new(&request.prompt, &[]),
            // Counting a long prompt takes its time.
            false => PenaltyState::default(),
        };
        let mut sequence = Self {
            tokens: request.prompt.clone(),
            cached: None,
            penalties,
            detokenizer,
            stops,
            meaning,
            text: String::new(),
            output: Output::new(&request.generated, request.text_bytes_emitted),
            context,
            events: outlet.events,
            paused: outlet.paused,
            numerics,
            arrived: Instant::now(),
            started: None,
            first_token: None,
            _place: outlet.place,
            request,
            grammar_is_away: false,
        };
        // What was drawn elsewhere goes the same way as what will be drawn here, so that no state can differ.
        let generated = std::mem::take(&mut sequence.request.generated);
        let mut end = None;
        for token in generated {
            if end.is_some() {
                let what = "the resumed stream goes on after its end";
                return Err(Error::new(Reason::InvalidArgument, what));
            }
            end = sequence.note(token);
        }
        if let Some(meaning) = &mut sequence.meaning {
            meaning.resumed();
        }
        if let Some(grammar) = &sequence.request.grammar {
            grammar.check()?;
        }
        if sequence.text.len() > limits::MAX_DELTA_BYTES {
            let what = format!(
                "text_bytes_emitted is {} bytes behind the resumed ids; resume with what was received",
                sequence.text.len()
            );
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        Ok((sequence, end))
    }

    /// Tokens known so far, prompt first.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The request's id.
    pub fn id(&self) -> &str {
        &self.request.id
    }

    /// When it must be over.
    pub fn deadline(&self) -> Option<Instant> {
        self.request.deadline
    }

    /// Whether nobody reads it any more.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether its reader has room for what a step gives. If not, the reader is asked to wake the engine.
    pub fn has_room(&self) -> bool {
        let room = || self.events.capacity() >= ROOM.min(self.events.max_capacity());
        if room() {
            return true;
        }
        self.paused.store(true, Ordering::SeqCst);
        // The reader may have made room before it could see the flag.
        let late = room();
        if late {
            self.paused.store(false, Ordering::SeqCst);
        }
        late
    }

    /// It takes part in steps from now on; so many of its tokens are in the cache.
    pub fn start(&mut self, cached: usize, now: Instant) {
        self.started.get_or_insert(now);
        let cached = cached.min(self.request.prompt.len());
        self.cached.get_or_insert(cached);
    }

    /// Whose it is.
    pub fn class(&self) -> &Class {
        &self.request.class
    }

    /// Whether tokens may be guessed.
    pub fn speculates(&self) -> bool {
        self.request.speculate
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// All that it takes to go on from here elsewhere.
    pub fn asked(&self) -> v1::GenerateRequest {
        let generated = self.tokens.get(self.prompt_len()..).unwrap_or_default();
        let ids = self.request.prompt.clone();
        v1::GenerateRequest {
            prompt: Some(v1::Prompt {
                kind: Some(v1::prompt::Kind::Ids(v1::TokenIds { ids })),
            }),
            seed: Some(self.request.sampling.seed),
            request_id: self.request.id.clone(),
            resume: Some(v1::Resume {
                generated_ids: generated.to_vec(),
                text_bytes_emitted: 0,
            }),
            ..(*self.request.asked).clone()
        }
    }

    /// How long it has been in this worker.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.arrived)
    }

    /// How many tokens it may draw in one step besides the first: its limits and its reader have room for them.
    pub fn more(&self) -> usize {
        let generated = self.tokens.len() - self.request.prompt.len();
        let asked = self.request.max_tokens.unwrap_or(usize::MAX);
        let asked = asked.saturating_sub(generated);
        let context = self.context.saturating_sub(self.tokens.len());
        let reader = self.events.capacity().saturating_sub(ROOM);
        asked.min(context).saturating_sub(1).min(reader)
    }

    /// Its grammar, to be brought back before the next draw; none if it has none, or the next mask is soon computed.
    pub fn lend_grammar(&mut self) -> Option<Follower> {
        let lent = self.request.grammar.take_if(|grammar| Masks::pays(grammar));
        self.grammar_is_away = lent.is_some();
        lent
    }

    /// Brings it back.
    pub fn return_grammar(&mut self, grammar: Follower) {
        self.request.grammar = Some(grammar);
        self.grammar_is_away = false;
    }

    /// Draws its next token, for this position, from the model's logits, which are scratch meanwhile.
    ///
    /// # Errors
    /// When no token can be drawn, or its text cannot follow its grammar.
    pub fn draw(&mut self, logits: &mut [f32]) -> Result<Sampled, Error> {
        let position = self.position(0);
        let allowed = match &mut self.request.grammar {
            Some(grammar) => Some(grammar.allowed()?),
            // The thread that had it is gone. Nothing is said that its grammar might not allow.
            None if self.grammar_is_away => {
                return Err(Error::new(
                    Reason::Internal,
                    "the request's grammar was lost",
                ));
            }
            None => None,
        };
        let (params, state) = (&self.request.sampling, &mut self.penalties);
        let drawn = sampler::sample_among(params, state, allowed, logits, position);
        drawn.map_err(|e| of_sampling(&e))
    }

    /// Where its `i`-th token from here goes.
    fn position(&self, i: usize) -> u32 {
        u32::try_from(self.tokens.len() + i).unwrap_or(u32::MAX)
    }

    /// How to draw its `i`-th token from here, if nothing but the model's own logits decides it: what a device can do.
    pub fn plain_draw(&self, i: usize) -> Option<Draw> {
        let sampling = &self.request.sampling;
        let is_free = self.request.grammar.is_none() && !self.grammar_is_away;
        let (temperature, limits) = sampling.plain_draw().filter(|_| is_free)?;
        Some(Draw {
            temperature,
            limits,
            seed: sampling.seed,
            branch: sampling.branch,
            position: self.position(i),
        })
    }

    /// Takes a token into tokens, penalties, grammar and text; says whether it ends the sequence.
    fn note(&mut self, token: u32) -> Option<End> {
        self.tokens.push(token);
        self.penalties.push(token);
        let generated = self.tokens.len() - self.request.prompt.len();
        let end = |reason, matched: String| Some(End { reason, matched });
        let mut ended = if self.request.end_tokens.contains(&token) {
            end(FinishReason::EndToken, token.to_string())
        } else {
            if let Some(grammar) = &mut self.request.grammar {
                grammar.advance(token);
            }
            let mut piece = String::new();
            self.detokenizer.push_into(token, &mut piece);
            let outcome = self.stops.push(&piece);
            self.text.push_str(&outcome.text);
            if let Some(meaning) = &mut self.meaning {
                meaning.push(token, &piece);
            }
            if let Some(stop) = outcome.stopped {
                // Nothing after the stop string is text: what is held back stays back.
                return end(FinishReason::StopString, self.stop_string(stop));
            }
            None
        };
        if ended.is_none() {
            ended = if self.request.max_tokens.is_some_and(|max| generated >= max) {
                end(FinishReason::MaxTokens, String::new())
            } else if self.tokens.len() >= self.context {
                end(FinishReason::ContextFull, String::new())
            } else {
                None
            };
        }
        if ended.is_some() {
            let rest = self.detokenizer.finish();
            let outcome = self.stops.push(&rest);
            self.text.push_str(&outcome.text);
            if let Some(meaning) = &mut self.meaning {
                meaning.finish(&rest);
            }
            match outcome.stopped {
                Some(stop) => return end(FinishReason::StopString, self.stop_string(stop)),
                None => self.text.push_str(&self.stops.finish()),
            }
        }
        ended
    }

    fn stop_string(&self, index: usize) -> String {
        self.request.stop.get(index).cloned().unwrap_or_default()
    }

    /// Takes a drawn token, sends what became final, and says whether that was the end.
    pub fn accept(&mut self, sampled: &Sampled, now: Instant) -> Option<End> {
        self.first_token.get_or_insert(now);
        let end = self.note(sampled.token);
        let text = |token| {
            let piece = self.detokenizer.piece(token, limits::MAX_TOKEN_TEXT);
            piece.to_vec()
        };
        let top = sampled.top.iter().map(|&(token, logprob)| v1::Candidate {
            token,
            logprob,
            text: text(token),
        });
        let logprobs = sampled.logprob.map(|logprob| v1::TokenLogprob {
            token: sampled.token,
            logprob,
            top: top.collect(),
            text: text(sampled.token),
        });
        let text = std::mem::take(&mut self.text);
        let parts = self.parts();
        self.send(v1::Delta {
            text,
            token_ids: vec![sampled.token],
            logprobs: logprobs.into_iter().collect(),
            parts,
            ..v1::Delta::default()
        });
        end
    }

    /// What its text turned out to mean since it was last asked.
    fn parts(&mut self) -> Vec<v1::OutputPart> {
        let meaning = self.meaning.as_mut();
        meaning.map(Meaning::take).unwrap_or_default()
    }

    fn send(&mut self, delta: v1::Delta) {
        self.output.push(&delta.token_ids, &delta.text);
        let event = v1::GenerateEvent {
            event: Some(v1::generate_event::Event::Delta(delta)),
        };
        // `has_room` was asked before the step; a reader that went away is noticed at the next step.
        let _ = self.events.try_send(Ok(event));
    }

    /// Sends the end.
    pub fn finish(mut self, end: End, now: Instant) {
        if !self.text.is_empty() {
            let text = std::mem::take(&mut self.text);
            let parts = self.parts();
            self.send(v1::Delta {
                text,
                parts,
                ..v1::Delta::default()
            });
        }
        let started = self.started.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let ms =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let numerics = Some(self.numerics.clone());
        let seed = self.request.sampling.seed;
        let hashes = self.output.finish(end.reason, &end.matched);
        let receipt = receipt(numerics.clone(), seed, self.request.hash, hashes);
        let finished = v1::Finished {
            reason: end.reason.into(),
            matched_stop: end.matched,
            usage: Some(v1::Usage {
                prompt_tokens: self.request.prompt.len() as u32,
                generated_tokens: (self.tokens.len() - self.request.prompt.len()) as u32,
                cached_tokens: self.cached.unwrap_or(0) as u32,
            }),
            timings: Some(v1::Timings {
                queue_ms: ms(self.arrived, started),
                prefill_ms: ms(started, first),
                decode_ms: ms(first, now),
            }),
            seed,
            numerics,
            deaths_survived: 0,
            receipt: Some(receipt),
            survived: Vec::new(),
        };
        let event = v1::GenerateEvent {
            event: Some(v1::generate_event::Event::Finished(finished)),
        };
        let _ = self.events.try_send(Ok(event));
    }

    /// Ends it with an error.
    pub fn fail(self, error: Error) {
        let _ = self.events.try_send(Err(error.into()));
    }
}
