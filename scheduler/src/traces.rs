//! Traces: what a token request went through, as spans that a collector of OpenTelemetry gets, in the trace that its
//! client began.
//!
//! [`SPANS`], [`EVENTS`] and [`ATTRIBUTES`] are all that is told, each defined once; the reference page is made from them.
//! No prompt and no answer is ever among it. Without a collector nothing is recorded: a client's `traceparent` is passed on,
//! and that is all.

mod context;
mod export;
mod request;
mod span;

pub use context::{Place, State, TRACEPARENT, TraceContext};
pub use export::{Collector, Traces};
pub(crate) use request::{
    died, filled_in, finished, of_generate, of_model, of_text, part_of, timed,
};
pub use span::{Arrival, Span, Value};

/// On whose behalf a span is, in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Somebody else's call is answered.
    Server,
    /// Somebody else is called.
    Client,
    /// Neither.
    Internal,
}

impl Kind {
    /// OpenTelemetry's word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
            Self::Internal => "internal",
        }
    }
}

/// Something that spans and events tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Its name: OpenTelemetry's, if there is one.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
}

/// A kind of span.
#[derive(Clone, Copy, Debug)]
pub struct SpanRow {
    /// Its name.
    pub name: &'static str,
    /// On whose behalf it is.
    pub kind: Kind,
    /// What it lasts for.
    pub help: &'static str,
    /// What it may tell.
    pub attributes: &'static [Attribute],
}

/// A kind of event in a span.
#[derive(Clone, Copy, Debug)]
pub struct EventRow {
    /// Its name.
    pub name: &'static str,
    /// What happened.
    pub help: &'static str,
    /// What it tells.
    pub attributes: &'static [Attribute],
}

macro_rules! attributes {
    ($($key:ident $name:literal $help:literal;)*) => {
        $(#[doc = $help] pub const $key: Attribute = Attribute { name: $name, help: $help };)*
        /// Every attribute there is.
        pub const ATTRIBUTES: &[Attribute] = &[$($key,)*];
    };
}

macro_rules! spans {
    ($($key:ident $name:literal $kind:ident $help:literal: $($attribute:ident),*;)*) => {
        $(#[doc = $help] pub const $key: SpanRow = SpanRow {
            name: $name,
            kind: Kind::$kind,
            help: $help,
            attributes: &[$($attribute,)*],
        };)*
        /// Every span there is.
        pub const SPANS: &[SpanRow] = &[$($key,)*];
    };
}

macro_rules! events {
    ($($key:ident $name:literal $help:literal: $($attribute:ident),*;)*) => {
        $(#[doc = $help] pub const $key: EventRow = EventRow {
            name: $name,
            help: $help,
            attributes: &[$($attribute,)*],
        };)*
        /// Every event there is.
        pub const EVENTS: &[EventRow] = &[$($key,)*];
    };
}

attributes! {
    OPERATION "gen_ai.operation.name" "What was asked for: `chat`, `text_completion`, `embeddings`, `tokenize` or `detokenize`.";
    PROVIDER "gen_ai.provider.name" "`hotcell`.";
    REQUEST_MODEL "gen_ai.request.model" "The model's name as the client wrote it.";
    MAX_TOKENS "gen_ai.request.max_tokens" "Tokens to generate at most, if the client said so.";
    TEMPERATURE "gen_ai.request.temperature" "If the client gave one.";
    TOP_P "gen_ai.request.top_p" "If the client gave one.";
    TOP_K "gen_ai.request.top_k" "If the client gave one.";
    FREQUENCY_PENALTY "gen_ai.request.frequency_penalty" "If the client gave one.";
    PRESENCE_PENALTY "gen_ai.request.presence_penalty" "If the client gave one.";
    SEED "gen_ai.request.seed" "The seed, drawn or given; one above 2^63 - 1 is told as text.";
    RESPONSE_MODEL "gen_ai.response.model" "The model that the name meant.";
    FINISH_REASONS "gen_ai.response.finish_reasons" "Why the stream ended: `stop` or `length`.";
    INPUT_TOKENS "gen_ai.usage.input_tokens" "Tokens of the prompt.";
    CACHED_TOKENS "gen_ai.usage.cache_read.input_tokens" "Those of them that the worker had in its cache.";
    OUTPUT_TOKENS "gen_ai.usage.output_tokens" "Tokens that were generated.";
    ERROR "error.type" "Why it failed: the reason of the error, or how the worker died.";
    REQUEST_ID "hotcell.request_id" "The request's id.";
    BRANCH "hotcell.branch" "Which of several continuations of one prompt it is, if not the first.";
    DEATHS_SURVIVED "hotcell.deaths_survived" "Workers that died under the stream before it was complete.";
    NUMERICS "hotcell.numerics" "The numerics class in which the stream began.";
    TAKEN_OVER "hotcell.taken_over" "True if the stream began in the program before this one.";
    WORKER_ID "hotcell.worker" "The worker.";
    EPOCH "hotcell.epoch" "Which of the worker's processes, counted from 1.";
    TOKENS "hotcell.tokens" "Tokens that came from this worker.";
}

spans! {
    REQUEST "{operation} {model}" Server "A request, from its arrival until its end. Where a call asks for several continuations or prompts, those after the first are children of the first, and internal.":
        OPERATION, PROVIDER, REQUEST_MODEL, MAX_TOKENS, TEMPERATURE, TOP_P, TOP_K, FREQUENCY_PENALTY, PRESENCE_PENALTY, SEED,
        RESPONSE_MODEL, FINISH_REASONS, INPUT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, ERROR, REQUEST_ID, BRANCH, DEATHS_SURVIVED,
        NUMERICS, TAKEN_OVER;
    ADMISSION "admission" Internal "Until the request was let in, or not: it was read and checked, and held against its tenant's limits.": ;
    TOKENIZE "tokenize" Internal "A prompt of text or messages becomes tokens, in a worker whose part is a child of this.":
        ERROR;
    PLACEMENT "placement" Internal "Until there was a worker with a place for it; after a death, until there was another one.":
        ERROR;
    WORKER "worker" Client "A worker's part. If the worker dies, it ends as an error, and where the stream goes on there is another one.":
        WORKER_ID, EPOCH, TOKENS, ERROR;
    QUEUE "queue" Internal "Child of the last `worker`, by that worker's clock: from arrival in the worker until its first step.": ;
    PREFILL "prefill" Internal "Child of the last `worker`: from there until its first token.": ;
    DECODE "decode" Internal "Child of the last `worker`: from there until its last token.": ;
}

events! {
    FIRST_TOKEN "first_token" "In the request's span: the first token came since it began.": ;
    WORKER_DIED "worker_died" "A worker died under the request: in its span, or in `tokenize`.": WORKER_ID, EPOCH, ERROR;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use http::{HeaderMap, HeaderValue};

    use super::*;

    #[test]
    fn a_clients_trace_is_passed_on_with_its_state_where_nothing_is_recorded() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(parent));
        headers.insert("tracestate", HeaderValue::from_static("a=1"));
        let arrival = Traces::default().arrive(&headers);
        let span = arrival.begin();
        for span in [span.child(&WORKER), Span::passing(span.place())] {
            let mut call = tonic::Request::new(());
            span.carry(&mut call);
            let carried = |key| call.metadata().get(key).unwrap().to_str().unwrap();
            assert_eq!(carried("traceparent"), parent);
            assert_eq!(carried("tracestate"), "a=1");
        }
        assert_eq!(arrival.parent(), span.place());
    }

    #[test]
    fn each_name_is_there_once_and_each_attribute_is_of_use() {
        let names: BTreeSet<_> = ATTRIBUTES.iter().map(|a| a.name).collect();
        assert_eq!(names.len(), ATTRIBUTES.len());
        let spans: BTreeSet<_> = SPANS.iter().map(|s| s.name).collect();
        assert_eq!(spans.len(), SPANS.len());
        let of_spans = SPANS.iter().flat_map(|s| s.attributes);
        let used: BTreeSet<_> = of_spans
            .chain(EVENTS.iter().flat_map(|e| e.attributes))
            .map(|a| a.name)
            .collect();
        assert_eq!(used, names);
        for help in SPANS
            .iter()
            .map(|s| s.help)
            .chain(ATTRIBUTES.iter().map(|a| a.help))
        {
            assert!(help.ends_with('.'), "{help}");
        }
    }
}
