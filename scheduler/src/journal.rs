//! What one stream has said so far: enough to go on elsewhere, and to judge what a worker says next.
//!
//! Without effects. A worker's events are input from a stranger: each is checked against the request and
//! against what was said before, and what a client gets is made of the checked parts only.

use hotcell_proto::{
    limits,
    receipt::{Hash, Output, receipt, request_hash},
    v1::{
        Accepted, Delta, FinishReason, Finished, GenerateEvent, GenerateRequest, NumericsClass,
        OutputPart, Prompt, Receipt, Resume, Timings, TokenIds, Usage, generate_event::Event,
        output_part::Kind as Part, prompt::Kind,
    },
};

use crate::{
    placement::{Estimate, estimate},
    suspicion::Process,
};

/// Bytes of text that a token may stand for; those of known vocabularies stay far below.
const MAX_TOKEN_TEXT: u64 = limits::MAX_TOKEN_TEXT as u64;

/// How a worker broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

fn violation<T>(what: impl Into<String>) -> Result<T, Violation> {
    Err(Violation(what.into()))
}

/// What a model allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Tokens of prompt and continuation together.
    pub context: u32,
}

/// Where a worker's stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Accepted must come next.
    Greeting,
    Running,
    Finished,
}

/// Bytes of text in a delta's parts; none if one says nothing, or there are more than text of one delta has.
pub(crate) fn parts_bytes(parts: &[OutputPart]) -> Option<usize> {
    if parts.len() > limits::MAX_DELTA_TOKENS {
        return None;
    }
    let bytes = |part: &OutputPart| {
        let bytes = match part.kind.as_ref()? {
            Part::Content(text) | Part::Reasoning(text) => text.len(),
            Part::ToolCall(call) => {
                let fits = (call.index as usize) < limits::MAX_TOOL_CALLS
                    && call.name.len() <= limits::MAX_TOOL_NAME;
                fits.then(|| call.name.len() + call.arguments.len())?
            }
        };
        (bytes > 0).then_some(bytes)
    };
    parts.iter().map(bytes).sum()
}

/// One request and what its stream said.
#[derive(Clone, Debug)]
pub struct Journal {
    request: GenerateRequest,
    bounds: Bounds,
    prompt_ids: Vec<u32>,
    seed: u64,
    generated: Vec<u32>,
    request_hash: Hash,
    output: Output,
    text_bytes: u64,
    /// Bytes of all parts since this scheduler's part began.
    parts_bytes: u64,
    /// Of the text's, bytes that came before this scheduler's part.
    text_before: u64,
    /// Class in which the stream began, once a worker accepted it.
    numerics: Option<NumericsClass>,
    /// Class in which it went on last, if that is another one.
    across: Option<NumericsClass>,
    /// Whether the next delta is the first of its class.
    crossing: bool,
    /// Class of the worker that runs it now, as it declared when it loaded the model.
    declared: NumericsClass,
    stage: Stage,
    deaths: u32,
}

/// What the stream of a request said in another program.
#[derive(Clone, Debug)]
pub struct Past {
    /// How it was accepted.
    pub accepted: Accepted,
    /// All its tokens.
    pub generated: Vec<u32>,
    /// Hashes of them and their text.
    pub output: Output,
    /// All its bytes of text.
    pub text_bytes: u64,
    /// The class it goes on in, if that is not the one it began in.
    pub across: Option<NumericsClass>,
    /// Workers that died under it.
    pub deaths: u32,
    /// Those of them that speak against it.
    pub blamed: Vec<Process>,
}

impl Journal {
    /// A stream that said something already, which was checked then.
    pub fn restore(mut request: GenerateRequest, past: Past, bounds: Bounds) -> Self {
        let resume = request.resume.take().unwrap_or_default();
        request.prompt = None;
        let Past {
            accepted,
            generated,
            output,
            text_bytes,
            across,
            deaths,
            ..
        } = past;
        let seed = accepted.seed;
        Self {
            seed,
            request_hash: request_hash(&accepted.prompt_ids, seed, &request),
            output,
            request,
            bounds,
            prompt_ids: accepted.prompt_ids,
            generated,
            text_bytes,
            parts_bytes: 0,
            text_before: resume.text_bytes_emitted,
            numerics: accepted.numerics,
            across,
            crossing: false,
            declared: NumericsClass::default(),
            stage: Stage::Greeting,
            deaths,
        }
    }

    /// A stream that has said nothing, or what `request.resume` says it has. `request` has its id, model and
    /// seed filled in, and `prompt_ids` is its prompt.
    pub fn new(mut request: GenerateRequest, prompt_ids: Vec<u32>, bounds: Bounds) -> Self {
        let resume = request.resume.take().unwrap_or_default();
        request.prompt = None;
        let seed = request.seed.unwrap_or_default();
        Self {
            seed,
            request_hash: request_hash(&prompt_ids, seed, &request),
            output: Output::new(&resume.generated_ids, resume.text_bytes_emitted),
            request,
            bounds,
            prompt_ids,
            generated: resume.generated_ids,
            text_bytes: resume.text_bytes_emitted,
            parts_bytes: 0,
            text_before: resume.text_bytes_emitted,
            numerics: None,
            across: None,
            crossing: false,
            declared: NumericsClass::default(),
            stage: Stage::Greeting,
            deaths: 0,
        }
    }

    /// Begins with another worker, of the numerics class `declared`: its words start with Accepted again.
    pub fn begin(&mut self, declared: &NumericsClass) {
        self.declared = declared.clone();
        self.stage = Stage::Greeting;
    }

    /// What to send to a worker so that it goes on where the stream is.
    pub fn request(&self) -> GenerateRequest {
        let fresh = self.generated.is_empty() && self.text_bytes == 0;
        GenerateRequest {
            prompt: Some(Prompt {
                kind: Some(Kind::Ids(TokenIds {
                    ids: self.prompt_ids.clone(),
                })),
            }),
            seed: Some(self.seed),
            resume: (!fresh).then(|| Resume {
                generated_ids: self.generated.clone(),
                text_bytes_emitted: self.text_bytes,
            }),
            ..self.request.clone()
        }
    }

    /// The same from an earlier place on, which is as many tokens and bytes of text along.
    pub fn request_from(&self, tokens: u64, text: u64) -> GenerateRequest {
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        let said = self.generated.get(..tokens).unwrap_or(&self.generated);
        GenerateRequest {
            resume: (tokens > 0 || text > 0).then(|| Resume {
                generated_ids: said.to_vec(),
                text_bytes_emitted: text,
            }),
            ..self.request()
        }
    }

    /// Whether what was said would be said again, bit by bit.
    pub fn is_repeatable(&self) -> bool {
        let exact = self.numerics.as_ref().is_some_and(|n| n.reproducible);
        exact && self.across.is_none()
    }

    /// Whether a worker of this class would say it again so.
    pub fn is_repeated_by(&self, class: &NumericsClass) -> bool {
        let same = self.numerics.as_ref().is_some_and(|n| n.id == class.id);
        same && self.is_repeatable() && class.reproducible
    }

    /// What the rest may cost.
    pub fn estimate(&self) -> Estimate {
        estimate(
            self.prompt_ids.len(),
            self.generated.len(),
            self.request.max_tokens,
            self.bounds.context,
        )
    }

    /// The class that the stream has to stay in, once it has one.
    pub fn class(&self) -> Option<&NumericsClass> {
        self.across.as_ref().or(self.numerics.as_ref())
    }

    /// Whether it may go on in another class.
    pub fn may_cross(&self) -> bool {
        self.request.continue_across
    }

    /// The request's id.
    pub fn request_id(&self) -> &str {
        &self.request.request_id
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.generated.len()
    }

    /// Whether the worker that runs it now has not accepted it yet.
    pub fn is_greeting(&self) -> bool {
        self.stage == Stage::Greeting
    }

    /// Whether Finished was said.
    pub fn is_finished(&self) -> bool {
        self.stage == Stage::Finished
    }

    /// Counts a worker that died under the stream.
    pub fn count_death(&mut self) {
        self.deaths += 1;
    }

    /// Workers that died under the stream.
    pub fn deaths(&self) -> u32 {
        self.deaths
    }

    /// Takes a worker's next event, and returns what the client gets for it: nothing for the greeting of a
    /// second worker.
    ///
    /// # Errors
    /// [`Violation`] if the event does not follow from the request and the events before it.
    pub fn take(&mut self, event: GenerateEvent) -> Result<Option<GenerateEvent>, Violation> {
        let out = match (self.stage, event.event) {
            (_, None) => return violation("an empty event"),
            (Stage::Finished, _) => return violation("an event after Finished"),
            (Stage::Greeting, Some(Event::Accepted(accepted))) => {
                let first = self.numerics.is_none();
                let accepted = self.greet(accepted)?;
                self.stage = Stage::Running;
                first.then_some(Event::Accepted(accepted))
            }
            (Stage::Greeting, _) => return violation("its first event is not Accepted"),
            (Stage::Running, Some(Event::Accepted(_))) => return violation("Accepted twice"),
            (Stage::Running, Some(Event::Delta(delta))) => Some(Event::Delta(self.delta(delta)?)),
            (Stage::Running, Some(Event::Finished(finished))) => {
                let finished = self.finish(finished)?;
                self.stage = Stage::Finished;
                Some(Event::Finished(finished))
            }
        };
        Ok(out.map(|event| GenerateEvent { event: Some(event) }))
    }

    /// Whether another host that accepted the rest of the stream may go on with it, and in which class.
    ///
    /// # Errors
    /// [`Violation`] if that would be another stream, or another class without the request's leave.
    pub fn fits(&self, accepted: &Accepted) -> Result<NumericsClass, Violation> {
        if accepted.prompt_ids != self.prompt_ids || accepted.seed != self.seed {
            return violation("Accepted with another prompt or seed");
        }
        let Some(class) = &accepted.numerics else {
            return violation("Accepted without a numerics class");
        };
        self.may_be_of(class)?;
        Ok(class.clone())
    }

    fn may_be_of(&self, class: &NumericsClass) -> Result<(), Violation> {
        if class.id.len() > limits::MAX_WORD || class.model_hash.len() > limits::MAX_WORD {
            return violation("a numerics class of too long a name");
        }
        match self.class() {
            Some(own) if own.id != class.id && !self.may_cross() => violation(format!(
                "it would go on in numerics class {}, and began in {}",
                class.id, own.id
            )),
            _ => Ok(()),
        }
    }

    /// Another host goes on in another class from the next delta on.
    ///
    /// # Errors
    /// [`Violation`] if the request does not let it.
    pub fn cross(&mut self, class: &NumericsClass) -> Result<(), Violation> {
        self.may_be_of(class)?;
        if self.class().is_some_and(|own| own.id != class.id) {
            self.declared = class.clone();
            self.across = Some(class.clone());
            self.crossing = true;
        }
        Ok(())
    }

    fn greet(&mut self, accepted: Accepted) -> Result<Accepted, Violation> {
        if accepted.prompt_ids != self.prompt_ids {
            return violation("Accepted with another prompt");
        }
        if accepted.seed != self.seed {
            return violation("Accepted with another seed");
        }
        let Some(numerics) = accepted.numerics else {
            return violation("Accepted without a numerics class");
        };
        if numerics.id != self.declared.id {
            return violation("Accepted with another numerics class than it declared");
        }
        // What it declared was checked; only the id of what it says now was.
        match self.class() {
            Some(class) if class.id != self.declared.id => {
                self.across = Some(self.declared.clone());
                self.crossing = true;
            }
            Some(_) => {}
            None => self.numerics = Some(self.declared.clone()),
        }
        Ok(Accepted {
            request_id: self.request.request_id.clone(),
            model: self.request.model.clone(),
            prompt_ids: accepted.prompt_ids,
            seed: self.seed,
            numerics: self.numerics.clone(),
        })
    }

    fn known(&self, token: u32) -> bool {
        token < self.bounds.vocabulary
    }

    fn delta(&mut self, delta: Delta) -> Result<Delta, Violation> {
        if delta.text.len() > limits::MAX_DELTA_BYTES {
            return violation(format!("{} bytes of text at once", delta.text.len()));
        }
        if delta.token_ids.len() > limits::MAX_DELTA_TOKENS {
            return violation(format!("{} tokens at once", delta.token_ids.len()));
        }
        if let Some(id) = delta.token_ids.iter().find(|&&id| !self.known(id)) {
            return violation(format!("token {id} is not in the vocabulary"));
        }
        let count = self.generated.len() + delta.token_ids.len();
        let asked = self.request.max_tokens;
        if asked > 0 && count > asked as usize {
            return violation("more tokens than asked for");
        }
        // The last token is never read by the model, so it may stand outside the context.
        if self.prompt_ids.len() + count > self.bounds.context as usize + 1 {
            return violation("more tokens than the context holds");
        }
        if delta.logprobs.len() > delta.token_ids.len() {
            return violation("more logprobs than tokens");
        }
        for (of, &id) in delta.logprobs.iter().zip(&delta.token_ids) {
            let bounded = of.top.len() <= limits::MAX_TOP_LOGPROBS as usize;
            let mut texts = of.top.iter().map(|c| &c.text).chain([&of.text]);
            let bounded = bounded && texts.all(|text| text.len() <= limits::MAX_TOKEN_TEXT);
            if of.token != id || !bounded || of.top.iter().any(|c| !self.known(c.token)) {
                return violation("logprobs that do not belong to its tokens");
            }
        }
        if delta.token_ids.is_empty() && delta.text.is_empty() {
            return violation("a delta with neither token nor text");
        }
        let text = self.text_bytes.saturating_add(delta.text.len() as u64);
        if text.saturating_sub(self.text_before) > count as u64 * MAX_TOKEN_TEXT {
            return violation("more text than its tokens can have");
        }
        if !delta.parts.is_empty() && !self.request.parse_output {
            return violation("parts that were not asked for");
        }
        let parts = parts_bytes(&delta.parts)
            .ok_or_else(|| Violation("parts that say nothing, or too many".into()))?;
        // They are pieces of the text; what came before this scheduler's part may have been held back.
        let parts = self.parts_bytes.saturating_add(parts as u64);
        if parts > text {
            return violation("parts that say more than its text");
        }
        self.parts_bytes = parts;
        self.generated.extend_from_slice(&delta.token_ids);
        self.output.push(&delta.token_ids, &delta.text);
        self.text_bytes = text;
        let first = std::mem::take(&mut self.crossing);
        Ok(Delta {
            numerics: self.across.clone().filter(|_| first),
            // Not a worker's to tell.
            survived: Vec::new(),
            ..delta
        })
    }

    fn finish(&self, finished: Finished) -> Result<Finished, Violation> {
        let reason = FinishReason::try_from(finished.reason).unwrap_or_default();
        if reason == FinishReason::Unspecified {
            return violation(format!("finish reason {}", finished.reason));
        }
        if finished.matched_stop.len() > limits::MAX_WORD {
            return violation("a matched stop that is too long");
        }
        if finished.seed != self.seed {
            return violation("Finished with another seed");
        }
        let said = finished.usage.map(|usage| usage.generated_tokens as usize);
        if said.is_some_and(|said| said != self.generated.len()) {
            return violation("Finished after another number of tokens than it counts");
        }
        let sane = |ms: f64| if ms.is_finite() && ms >= 0.0 { ms } else { 0.0 };
        let timings = finished.timings.unwrap_or_default();
        let hashes = self.output.clone().finish(reason, &finished.matched_stop);
        let receipt = Receipt {
            deaths_survived: self.deaths,
            continued_across: self.across.is_some(),
            ..receipt(self.numerics.clone(), self.seed, self.request_hash, hashes)
        };
        Ok(Finished {
            reason: finished.reason,
            matched_stop: finished.matched_stop,
            // Counted here: whatever happened on the way, it agrees with what the client got.
            usage: Some(Usage {
                prompt_tokens: u32::try_from(self.prompt_ids.len()).unwrap_or(u32::MAX),
                generated_tokens: u32::try_from(self.generated.len()).unwrap_or(u32::MAX),
                cached_tokens: finished
                    .usage
                    .map_or(0, |usage| usage.cached_tokens)
                    .min(u32::try_from(self.prompt_ids.len()).unwrap_or(u32::MAX)),
            }),
            timings: Some(Timings {
                queue_ms: sane(timings.queue_ms),
                prefill_ms: sane(timings.prefill_ms),
                decode_ms: sane(timings.decode_ms),
            }),
            seed: self.seed,
            numerics: self.numerics.clone(),
            deaths_survived: self.deaths,
            receipt: Some(receipt),
            survived: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests;
