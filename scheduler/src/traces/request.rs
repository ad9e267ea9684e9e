//! What spans tell of requests and answers: never what they say.

use std::time::Duration;

use hotcell_proto::{
    ids::ModelName,
    v1::{FinishReason, Finished, GenerateRequest, Timings, prompt::Kind as Prompt},
};

use super::{
    Arrival, BRANCH, CACHED_TOKENS, DEATHS_SURVIVED, DECODE, EPOCH, ERROR, FINISH_REASONS,
    FREQUENCY_PENALTY, INPUT_TOKENS, MAX_TOKENS, NUMERICS, OPERATION, OUTPUT_TOKENS, PREFILL,
    PRESENCE_PENALTY, PROVIDER, QUEUE, REQUEST_ID, REQUEST_MODEL, RESPONSE_MODEL, SEED, Span,
    TEMPERATURE, TOP_K, TOP_P, Value, WORKER, WORKER_DIED, WORKER_ID,
};
use crate::{death::DeathKind, discover::clip, fleet::Link};

/// The span of a request that asks for this; `asked` is the model's name as its client wrote it.
pub(crate) fn of_text(arrival: &Arrival, operation: &'static str, asked: &str) -> Span {
    let mut span = arrival.begin();
    if span.is_recorded() {
        // Until it is known which model is meant: names that anybody could choose are no spans' names.
        span.name(|| operation.to_owned());
        span.set(&OPERATION, Value::Text(operation));
        span.set(&PROVIDER, Value::Text("hotcell"));
        let asked = clip(asked);
        span.set_some(
            &REQUEST_MODEL,
            (!asked.is_empty()).then_some(Value::Text(&asked)),
        );
    }
    span
}

/// What a request for tokens is called.
fn operation(request: &GenerateRequest) -> &'static str {
    match request.prompt.as_ref().and_then(|p| p.kind.as_ref()) {
        Some(Prompt::Chat(_)) => "chat",
        _ => "text_completion",
    }
}

/// The span of a request for tokens, as its client sent it.
pub(crate) fn of_generate(arrival: &Arrival, request: &GenerateRequest) -> Span {
    let mut span = of_text(arrival, operation(request), &request.model);
    if !span.is_recorded() {
        return span;
    }
    let whole = |number: u32| (number > 0).then(|| Value::Whole(number.into()));
    span.set_some(&MAX_TOKENS, whole(request.max_tokens));
    span.set_some(&BRANCH, whole(request.branch));
    if let Some(how) = &request.sampling {
        span.set_some(&TEMPERATURE, how.temperature.map(Value::Number));
        span.set_some(&TOP_P, how.top_p.map(Value::Number));
        span.set_some(&TOP_K, how.top_k.and_then(whole));
        span.set_some(&FREQUENCY_PENALTY, how.frequency_penalty.map(Value::Number));
        span.set_some(&PRESENCE_PENALTY, how.presence_penalty.map(Value::Number));
    }
    span
}

/// The name means this model.
pub(crate) fn of_model(span: &mut Span, operation: &'static str, model: &ModelName) {
    span.name(|| format!("{operation} {model}"));
    span.set(&RESPONSE_MODEL, Value::Text(model.as_str()));
}

/// The request for tokens, with all filled in that its client left open.
pub(crate) fn filled_in(span: &mut Span, request: &GenerateRequest, model: &ModelName) {
    of_model(span, operation(request), model);
    span.set(&REQUEST_ID, Value::Text(&request.request_id));
    span.set_some(&SEED, request.seed.map(Value::Whole));
}

/// A request for tokens ended well.
pub(crate) fn finished(span: &mut Span, finished: &Finished) {
    let reason = match finished.reason() {
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
        FinishReason::EndToken | FinishReason::StopString | FinishReason::Unspecified => "stop",
    };
    span.set(&FINISH_REASONS, Value::One(reason));
    let usage = finished.usage.unwrap_or_default();
    for (attribute, tokens) in [
        (&INPUT_TOKENS, usage.prompt_tokens),
        (&CACHED_TOKENS, usage.cached_tokens),
        (&OUTPUT_TOKENS, usage.generated_tokens),
        (&DEATHS_SURVIVED, finished.deaths_survived),
    ] {
        span.set(attribute, Value::Whole(tokens.into()));
    }
    let class = finished.numerics.as_ref();
    span.set_some(&NUMERICS, class.map(|class| Value::Text(&class.id)));
}

/// A worker's part took so long, as it says itself.
pub(crate) fn timed(part: &Span, timings: &Timings) {
    // A stranger's numbers: what is no time is none.
    let time = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    part.past([
        (&QUEUE, time(timings.queue_ms)),
        (&PREFILL, time(timings.prefill_ms)),
        (&DECODE, time(timings.decode_ms)),
    ]);
}

/// The part of a request that this worker has.
pub(crate) fn part_of(trace: &Span, link: &Link) -> Span {
    let mut part = trace.child(&WORKER);
    part.set(&WORKER_ID, Value::Text(&link.worker));
    part.set(&EPOCH, Value::Whole(link.epoch));
    part
}

/// The worker that had this part died.
pub(crate) fn died(trace: &mut Span, mut part: Span, link: &Link) {
    let kind = link.fate.kind().map_or("lost", DeathKind::name);
    part.fail(kind);
    // It is over before what comes next begins.
    drop(part);
    let told = [
        (&WORKER_ID, Value::Text(&link.worker)),
        (&EPOCH, Value::Whole(link.epoch)),
        (&ERROR, Value::Text(kind)),
    ];
    trace.event(&WORKER_DIED, told);
}
