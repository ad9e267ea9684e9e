//! What `--json` prints: the protocol's messages with plain names. Numbers stay numbers, enums become the
//! lower-case words of their constants, missing messages become null.

mod devices;

pub(crate) use devices::DeviceView;

use hotcell_proto::v1;
use serde::Serialize;

use crate::tokens::Event;

use super::receipt::Stamp;

/// `FINISH_REASON_MAX_TOKENS` → `max_tokens`; a number that this version does not know → its digits.
pub(crate) fn word(name: Result<&'static str, i32>, prefix: &str) -> String {
    match name {
        Ok(name) => name
            .strip_prefix(prefix)
            .unwrap_or(name)
            .to_ascii_lowercase(),
        Err(number) => number.to_string(),
    }
}

macro_rules! words {
    ($($(#[doc = $doc:literal])* $function:ident: $kind:ident $prefix:literal;)*) => {
        $($(#[doc = $doc])*
        pub(crate) fn $function(number: i32) -> String {
            word(v1::$kind::try_from(number).map(|k| k.as_str_name()).map_err(|_| number), $prefix)
        })*
    };
}

words! {
    /// A finish reason's word.
    finish_reason: FinishReason "FINISH_REASON_";
    /// A worker state's word.
    worker_state: WorkerState "WORKER_STATE_";
    /// A model state's word.
    model_state: ModelState "MODEL_STATE_";
    /// A packed copy's state in a word.
    packed_state: PackedState "PACKED_STATE_";
    /// How a layer of the confinement stands, in a word.
    layer_state: LayerState "LAYER_STATE_";
    /// A verdict on a model in a word.
    verdict: Verdict "VERDICT_";
    /// A request's state inside a worker.
    watched_state: WatchedState "WATCHED_STATE_";
    /// An event kind's word.
    event_kind: EventKind "EVENT_KIND_";
}

/// One event of a token stream.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum EventView<'a> {
    Accepted {
        request_id: &'a str,
        model: &'a str,
        prompt_ids: &'a [u32],
        seed: u64,
        numerics: Option<NumericsView<'a>>,
    },
    Delta {
        text: &'a str,
        token_ids: &'a [u32],
        #[serde(skip_serializing_if = "Vec::is_empty")]
        logprobs: Vec<LogprobView>,
        #[serde(skip_serializing_if = "Option::is_none")]
        numerics: Option<NumericsView<'a>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        survived: Vec<SurvivedView<'a>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        parts: Vec<PartView<'a>>,
    },
    Finished {
        reason: String,
        matched_stop: &'a str,
        usage: UsageView,
        timings: TimingsView,
        seed: u64,
        numerics: Option<NumericsView<'a>>,
        deaths_survived: u32,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        survived: Vec<SurvivedView<'a>>,
        receipt: Option<Box<Stamp>>,
    },
}

/// A piece of what the text means.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PartView<'a> {
    Content(&'a str),
    Reasoning(&'a str),
    ToolCall {
        index: u32,
        #[serde(skip_serializing_if = "str::is_empty")]
        name: &'a str,
        arguments: &'a str,
    },
}

fn part(part: &v1::OutputPart) -> Option<PartView<'_>> {
    use v1::output_part::Kind;
    Some(match part.kind.as_ref()? {
        Kind::Content(text) => PartView::Content(text),
        Kind::Reasoning(text) => PartView::Reasoning(text),
        Kind::ToolCall(call) => PartView::ToolCall {
            index: call.index,
            name: &call.name,
            arguments: &call.arguments,
        },
    })
}

/// A worker's death that the stream went on after.
#[derive(Serialize)]
pub(crate) struct SurvivedView<'a> {
    worker: &'a str,
    epoch: u64,
    exit_kind: &'a str,
    generated: u64,
    pause_ms: f64,
    continued_on: &'a str,
}

#[derive(Serialize)]
pub(crate) struct NumericsView<'a> {
    id: &'a str,
    reproducible: bool,
    model_hash: &'a str,
}

#[derive(Serialize)]
pub(crate) struct LogprobView {
    token: u32,
    logprob: f32,
    top: Vec<CandidateView>,
}

#[derive(Serialize)]
pub(crate) struct CandidateView {
    token: u32,
    logprob: f32,
}

#[derive(Serialize)]
pub(crate) struct UsageView {
    prompt_tokens: u32,
    generated_tokens: u32,
    cached_tokens: u32,
}

/// The worker's times, and the client's: from the request to the first token, and to the end. The rate is that
/// of the tokens after the first.
#[derive(Serialize)]
pub(crate) struct TimingsView {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
    first_token_ms: Option<f64>,
    total_ms: f64,
    tokens_per_second: Option<f64>,
}

/// What the client measured.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    pub(crate) first_token_ms: Option<f64>,
    pub(crate) total_ms: f64,
    pub(crate) tokens_per_second: Option<f64>,
}

fn numerics(class: Option<&v1::NumericsClass>) -> Option<NumericsView<'_>> {
    class.map(|class| NumericsView {
        id: &class.id,
        reproducible: class.reproducible,
        model_hash: &class.model_hash,
    })
}

/// An event and what the client's clock says.
pub(crate) fn event<'a>(event: &'a Event, clock: &Clock) -> EventView<'a> {
    match event {
        Event::Accepted(accepted) => EventView::Accepted {
            request_id: &accepted.request_id,
            model: &accepted.model,
            prompt_ids: &accepted.prompt_ids,
            seed: accepted.seed,
            numerics: numerics(accepted.numerics.as_ref()),
        },
        Event::Delta(delta) => EventView::Delta {
            text: &delta.text,
            token_ids: &delta.token_ids,
            logprobs: delta.logprobs.iter().map(logprob).collect(),
            numerics: numerics(delta.numerics.as_ref()),
            survived: survived(&delta.survived),
            parts: delta.parts.iter().filter_map(part).collect(),
        },
        Event::Finished(finished) => {
            let usage = finished.usage.unwrap_or_default();
            let timings = finished.timings.unwrap_or_default();
            EventView::Finished {
                reason: finish_reason(finished.reason),
                matched_stop: &finished.matched_stop,
                usage: UsageView {
                    prompt_tokens: usage.prompt_tokens,
                    generated_tokens: usage.generated_tokens,
                    cached_tokens: usage.cached_tokens,
                },
                timings: TimingsView {
                    queue_ms: timings.queue_ms,
                    prefill_ms: timings.prefill_ms,
                    decode_ms: timings.decode_ms,
                    first_token_ms: clock.first_token_ms,
                    total_ms: clock.total_ms,
                    tokens_per_second: clock.tokens_per_second,
                },
                seed: finished.seed,
                numerics: numerics(finished.numerics.as_ref()),
                deaths_survived: finished.deaths_survived,
                survived: survived(&finished.survived),
                receipt: finished.receipt.as_ref().map(|r| Box::new(r.into())),
            }
        }
    }
}

fn survived(all: &[v1::Survived]) -> Vec<SurvivedView<'_>> {
    all.iter()
        .map(|s| SurvivedView {
            worker: &s.worker,
            epoch: s.epoch,
            exit_kind: &s.exit_kind,
            generated: s.generated,
            pause_ms: s.pause_ms,
            continued_on: &s.continued_on,
        })
        .collect()
}

fn logprob(entry: &v1::TokenLogprob) -> LogprobView {
    let top = entry.top.iter().map(|c| CandidateView {
        token: c.token,
        logprob: c.logprob,
    });
    LogprobView {
        token: entry.token,
        logprob: entry.logprob,
        top: top.collect(),
    }
}

/// One row of `hotcell ps`.
#[derive(Serialize)]
pub(crate) struct WorkerView<'a> {
    id: &'a str,
    device: &'a str,
    trust_domain: &'a str,
    memory_bytes: u64,
    cores: &'a [u32],
    pid: u32,
    state: String,
    epoch: u64,
    models: &'a [String],
    running_requests: u32,
    outstanding_tokens: u64,
    deaths: u32,
    last_exit: &'a str,
    last_exit_kind: &'a str,
    uptime_ms: u64,
    resident_bytes: u64,
    confinement: &'a str,
    caches: Vec<CacheView<'a>>,
    memory: Vec<MemoryView<'a>>,
}

/// What a worker holds of one kind, and for which model.
#[derive(Serialize)]
pub(crate) struct MemoryView<'a> {
    kind: &'a str,
    model: &'a str,
    bytes: u64,
}

impl<'a> From<&'a v1::MemoryUse> for MemoryView<'a> {
    fn from(part: &'a v1::MemoryUse) -> Self {
        Self {
            kind: &part.kind,
            model: &part.model,
            bytes: part.bytes,
        }
    }
}

#[derive(Serialize)]
struct CacheView<'a> {
    model: &'a str,
    bytes: u64,
    block_tokens: u64,
    blocks: u64,
    used_blocks: u64,
    kept_blocks: u64,
    running: u64,
    waiting: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    preemptions: u64,
    guessed_tokens: u64,
    guessed_right: u64,
    layers: Vec<LayersView>,
    requests: Vec<RequestView<'a>>,
}

#[derive(Serialize)]
struct LayersView {
    layers: u32,
    window: u64,
    block_bytes: u64,
    blocks: u64,
    used_blocks: u64,
    kept_blocks: u64,
}

#[derive(Serialize)]
struct RequestView<'a> {
    request_id: &'a str,
    tokens: u64,
    blocks: u64,
    bytes: u64,
}

impl<'a> From<&'a v1::CacheStatus> for CacheView<'a> {
    fn from(c: &'a v1::CacheStatus) -> Self {
        Self {
            model: &c.model,
            bytes: c.bytes,
            block_tokens: c.block_tokens,
            blocks: c.blocks,
            used_blocks: c.used_blocks,
            kept_blocks: c.kept_blocks,
            running: c.running,
            waiting: c.waiting,
            prompt_tokens: c.prompt_tokens,
            cached_tokens: c.cached_tokens,
            preemptions: c.preemptions,
            guessed_tokens: c.guessed_tokens,
            guessed_right: c.guessed_right,
            layers: (c.layers.iter())
                .map(|l| LayersView {
                    layers: l.layers,
                    window: l.window,
                    block_bytes: l.block_bytes,
                    blocks: l.blocks,
                    used_blocks: l.used_blocks,
                    kept_blocks: l.kept_blocks,
                })
                .collect(),
            requests: (c.requests.iter())
                .map(|r| RequestView {
                    request_id: &r.request_id,
                    tokens: r.tokens,
                    blocks: r.blocks,
                    bytes: r.bytes,
                })
                .collect(),
        }
    }
}

impl<'a> From<&'a v1::WorkerInfo> for WorkerView<'a> {
    fn from(w: &'a v1::WorkerInfo) -> Self {
        let lease = w.lease.as_ref();
        Self {
            id: &w.id,
            device: lease.map_or("", |l| &l.device),
            trust_domain: lease.map_or("", |l| &l.trust_domain),
            memory_bytes: lease.map_or(0, |l| l.memory_bytes),
            cores: lease.map_or(&[], |l| &l.cores),
            pid: w.pid,
            state: worker_state(w.state),
            epoch: w.epoch,
            models: &w.models,
            running_requests: w.running_requests,
            outstanding_tokens: w.outstanding_tokens,
            deaths: w.deaths,
            last_exit: &w.last_exit,
            last_exit_kind: &w.last_exit_kind,
            uptime_ms: w.uptime_ms,
            resident_bytes: w.resident_bytes,
            confinement: &w.confinement,
            caches: w.caches.iter().map(CacheView::from).collect(),
            memory: w.memory.iter().map(MemoryView::from).collect(),
        }
    }
}

/// One row of `hotcell models`.
#[derive(Serialize)]
pub(crate) struct ModelView<'a> {
    name: &'a str,
    state: String,
    source: &'a str,
    is_default: bool,
    summary: Option<SummaryView<'a>>,
    file_bytes: u64,
    workers: &'a [String],
    problem: &'a str,
    packed: Vec<PackedView<'a>>,
    trust_domain: &'a str,
    serving: Option<ServingView<'a>>,
    running_requests: u32,
    idle_ms: u64,
    memory_bytes: u64,
}

/// How the model is served.
#[derive(Serialize)]
struct ServingView<'a> {
    /// 0: on all devices.
    replicas: u32,
    keep_alive_ms: Option<u64>,
    pinned: bool,
    aliases: &'a [String],
    max_running: u32,
    max_context: u32,
}

/// A packed copy of the model.
#[derive(Serialize)]
struct PackedView<'a> {
    layout: &'a str,
    state: String,
    bytes_done: u64,
    bytes_total: u64,
    packings: u32,
    workers: &'a [String],
    problem: &'a str,
}

impl<'a> From<&'a v1::PackedInfo> for PackedView<'a> {
    fn from(p: &'a v1::PackedInfo) -> Self {
        Self {
            layout: &p.layout,
            state: packed_state(p.state),
            bytes_done: p.bytes_done,
            bytes_total: p.bytes_total,
            packings: p.packings,
            workers: &p.workers,
            problem: &p.problem,
        }
    }
}

#[derive(Serialize)]
struct SummaryView<'a> {
    architecture: &'a str,
    parameters: u64,
    context_length: u32,
    vocabulary: u32,
    weights_dtype: &'a str,
    model_hash: &'a str,
    has_chat_template: bool,
    thinks: bool,
}

impl<'a> From<&'a v1::ModelInfo> for ModelView<'a> {
    fn from(m: &'a v1::ModelInfo) -> Self {
        Self {
            name: &m.name,
            state: model_state(m.state),
            source: &m.source,
            is_default: m.is_default,
            summary: m.summary.as_ref().map(|s| SummaryView {
                architecture: &s.architecture,
                parameters: s.parameters,
                context_length: s.context_length,
                vocabulary: s.vocabulary,
                weights_dtype: &s.weights_dtype,
                model_hash: &s.model_hash,
                has_chat_template: s.has_chat_template,
                thinks: s.thinks,
            }),
            file_bytes: m.file_bytes,
            workers: &m.workers,
            problem: &m.problem,
            packed: m.packed.iter().map(PackedView::from).collect(),
            trust_domain: &m.trust_domain,
            serving: m.serving.as_ref().map(|s| ServingView {
                replicas: s.replicas,
                keep_alive_ms: s.keep_alive_ms,
                pinned: s.pinned,
                aliases: &s.aliases,
                max_running: s.max_running,
                max_context: s.max_context,
            }),
            running_requests: m.running_requests,
            idle_ms: m.idle_ms,
            memory_bytes: m.memory_bytes,
        }
    }
}

/// One step of loading; `model` comes with the last.
#[derive(Serialize)]
pub(crate) struct LoadView<'a> {
    event: &'static str,
    name: &'a str,
    worker: &'a str,
    stage: &'a str,
    bytes_done: u64,
    bytes_total: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<ModelView<'a>>,
}

impl<'a> From<&'a v1::LoadModelProgress> for LoadView<'a> {
    fn from(p: &'a v1::LoadModelProgress) -> Self {
        Self {
            event: if p.done { "loaded" } else { "loading" },
            name: &p.name,
            worker: &p.worker,
            stage: &p.stage,
            bytes_done: p.bytes_done,
            bytes_total: p.bytes_total,
            model: p.model.as_ref().map(ModelView::from),
        }
    }
}

/// One line of `hotcell watch`.
#[derive(Serialize)]
pub(crate) struct WatchView<'a> {
    event: String,
    time_ms: u64,
    worker: &'a str,
    epoch: u64,
    model: &'a str,
    message: &'a str,
    exit_kind: &'a str,
}

impl<'a> From<&'a v1::Event> for WatchView<'a> {
    fn from(e: &'a v1::Event) -> Self {
        Self {
            event: event_kind(e.kind),
            time_ms: e.time_ms,
            worker: &e.worker,
            epoch: e.epoch,
            model: &e.model,
            message: &e.message,
            exit_kind: &e.exit_kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enums_become_plain_words() {
        let full = v1::FinishReason::ContextFull.into();
        assert_eq!(finish_reason(full), "context_full");
        assert_eq!(finish_reason(99), "99");
    }
}
