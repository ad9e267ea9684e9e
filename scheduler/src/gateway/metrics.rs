//! `/metrics` in Prometheus' text format: under our own names, and under those that dashboards and autoscalers made for
//! vLLM look for.
//!
//! [`TABLE`] is all there is; the reference page and the dashboard are made from it.

use std::{fmt::Write, sync::atomic::Ordering};

use axum::{
    Router,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
    routing::get,
};
use hotcell_proto::v1::{CacheStatus, ModelInfo, ModelState, WorkerInfo, WorkerState};

use crate::{
    meters::{Histogram, Meter},
    service::Shared,
};

/// Its path.
pub(super) fn routes() -> Router<Shared> {
    Router::new().route("/metrics", get(metrics))
}

/// How a value goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Up only, until the process ends.
    Counter,
    /// Up and down.
    Gauge,
    /// How often something took how long.
    Histogram,
}

impl Kind {
    /// Prometheus' word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Where a row's values come from.
enum Read {
    /// One for the host.
    Host(fn(&Seen) -> f64),
    /// One for each model.
    Model(fn(&Model<'_>) -> f64),
    /// A histogram for each model.
    Times(fn(&Meter) -> &Histogram),
    /// One for each model and end.
    Ends,
    /// One for each model and state.
    States,
    /// One for each worker.
    Worker(fn(&WorkerInfo) -> f64),
}

/// One metric.
pub struct Row {
    /// Our name.
    pub name: &'static str,
    /// vLLM's, if it has one.
    pub vllm: Option<&'static str>,
    /// How it goes.
    pub kind: Kind,
    /// What it means.
    pub help: &'static str,
    read: Read,
}

impl Row {
    /// The labels of its values.
    pub fn labels(&self) -> &'static [&'static str] {
        match self.read {
            Read::Host(_) => &[],
            Read::Model(_) | Read::Times(_) => &["model"],
            Read::Ends => &["model", "end"],
            Read::States => &["model", "state"],
            Read::Worker(_) => &["worker", "device"],
        }
    }
}

/// The states of models, in words.
const STATES: &[(ModelState, &str)] = &[
    (ModelState::Available, "available"),
    (ModelState::Loading, "loading"),
    (ModelState::Loaded, "loaded"),
    (ModelState::Asleep, "asleep"),
    (ModelState::Retiring, "retiring"),
    (ModelState::Failed, "failed"),
];

/// What there is to be told of at one moment.
struct Seen {
    workers: Vec<WorkerInfo>,
    inside: usize,
    waiting: usize,
    sessions: usize,
    handed: (u64, u64),
    uptime: f64,
    spans_sent: u64,
    spans_dropped: u64,
}

/// A model, with its caches in all workers.
struct Model<'a> {
    info: &'a ModelInfo,
    meter: &'a Meter,
    caches: Vec<&'a CacheStatus>,
}

impl Model<'_> {
    fn sum(&self, of: fn(&CacheStatus) -> u64) -> f64 {
        self.caches.iter().map(|cache| of(cache) as f64).sum()
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

macro_rules! rows {
    ($($name:literal $vllm:expr, $kind:ident $help:literal, $read:ident $(($of:expr))?;)*) => {
        /// Every metric there is.
        pub const TABLE: &[Row] = &[$(Row {
            name: $name,
            vllm: $vllm,
            kind: Kind::$kind,
            help: $help,
            read: Read::$read$(($of))?,
        },)*];
    };
}

rows! {
    "hotcell_requests_running" Some("vllm:num_requests_running"), Gauge "Requests in workers' batches.",
        Model(|m| m.sum(|c| c.running));
    "hotcell_requests_waiting" Some("vllm:num_requests_waiting"), Gauge "Requests that wait in workers for a place in the batch.",
        Model(|m| m.sum(|c| c.waiting));
    "hotcell_kv_cache_used_ratio" Some("vllm:kv_cache_usage_perc"), Gauge "Share of the KV cache's blocks that requests have now, 0 to 1.",
        Model(|m| share(m.sum(|c| c.used_blocks), m.sum(|c| c.blocks)));
    "hotcell_kv_cache_kept_ratio" None, Gauge "Share of the KV cache's blocks that are kept for prompts that begin alike, 0 to 1.",
        Model(|m| share(m.sum(|c| c.kept_blocks), m.sum(|c| c.blocks)));
    "hotcell_kv_cache_bytes" None, Gauge "Bytes of all blocks of the KV cache.",
        Model(|m| m.sum(|c| c.bytes));
    "hotcell_preemptions_total" Some("vllm:num_preemptions_total"), Counter "Requests that were put back for want of cache since their workers loaded the model.",
        Model(|m| m.sum(|c| c.preemptions));
    "hotcell_guessed_tokens_total" None, Counter "Tokens that were guessed (speculative decoding) since the workers loaded the model.",
        Model(|m| m.sum(|c| c.guessed_tokens));
    "hotcell_guessed_right_total" None, Counter "Tokens that were guessed right.",
        Model(|m| m.sum(|c| c.guessed_right));
    "hotcell_prompt_tokens_total" Some("vllm:prompt_tokens_total"), Counter "Tokens of finished requests' prompts.",
        Model(|m| m.meter.prompt_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_prompt_tokens_cached_total" Some("vllm:prefix_cache_hits_total"), Counter "Those of them that a worker had in its cache.",
        Model(|m| m.meter.cached_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_generated_tokens_total" Some("vllm:generation_tokens_total"), Counter "Tokens that were generated.",
        Model(|m| m.meter.generated_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_requests_total" Some("vllm:request_success_total"), Counter "Requests that ended, by how: stop, length, or the reason of the error.",
        Ends;
    "hotcell_first_token_seconds" Some("vllm:time_to_first_token_seconds"), Histogram "From a request's arrival to its first token.",
        Times(|m| &m.first_token);
    "hotcell_inter_token_seconds" Some("vllm:inter_token_latency_seconds"), Histogram "Between tokens of a request.",
        Times(|m| &m.between);
    "hotcell_request_seconds" Some("vllm:e2e_request_latency_seconds"), Histogram "From a request's arrival to its end, if it finished.",
        Times(|m| &m.whole);
    "hotcell_model_state" None, Gauge "1 for the state that the model is in, 0 for the others.",
        States;
    "hotcell_model_workers" None, Gauge "Workers that have the model and serve.",
        Model(|m| m.info.workers.len() as f64);
    "hotcell_model_requests" None, Gauge "Requests for the model that are under way, those that wait included.",
        Model(|m| f64::from(m.info.running_requests));
    "hotcell_model_memory_bytes" None, Gauge "What the model takes on one device, by a dry run; 0 before that is known.",
        Model(|m| m.info.memory_bytes as f64);
    "hotcell_continuations_total" None, Counter "Times that a stream went on after its worker's death.",
        Model(|m| m.meter.continuations.load(Ordering::Relaxed) as f64);
    "hotcell_continuation_pause_seconds" None, Histogram "From a worker's death to the next event of a stream that ran on it.",
        Times(|m| &m.pause);
    "hotcell_workers_ready" None, Gauge "Workers that serve.",
        Host(|s| s.workers.iter().filter(|w| w.state() == WorkerState::Ready).count() as f64);
    "hotcell_requests_inside" None, Gauge "Requests that the scheduler has let in and not answered yet.",
        Host(|s| s.inside as f64);
    "hotcell_requests_queued" None, Gauge "Requests that wait in the scheduler because every worker is full.",
        Host(|s| s.waiting as f64);
    "hotcell_tensor_sessions" None, Gauge "Tensor sessions that are open.",
        Host(|s| s.sessions as f64);
    "hotcell_handed_over_total" None, Counter "Streams that another host took over while this one drained.",
        Host(|s| s.handed.0 as f64);
    "hotcell_handover_refusals_total" None, Counter "Times that the other host did not take a stream over, or could not go on with it.",
        Host(|s| s.handed.1 as f64);
    "hotcell_uptime_seconds" None, Gauge "Since the scheduler began.",
        Host(|s| s.uptime);
    "hotcell_spans_sent_total" None, Counter "Spans of traces that the collector took.",
        Host(|s| s.spans_sent as f64);
    "hotcell_spans_dropped_total" None, Counter "Spans that were dropped, because the collector did not take them or too many waited.",
        Host(|s| s.spans_dropped as f64);
    "hotcell_worker_up" None, Gauge "1 if the worker serves, 0 if not.",
        Worker(|w| f64::from(u8::from(w.state() == WorkerState::Ready)));
    "hotcell_worker_deaths_total" None, Counter "Times that a worker of this place died.",
        Worker(|w| f64::from(w.deaths));
    "hotcell_worker_epoch" None, Gauge "How many processes this place has had.",
        Worker(|w| w.epoch as f64);
    "hotcell_worker_resident_bytes" None, Gauge "Memory of the worker's process, weights that it shares included.",
        Worker(|w| w.resident_bytes as f64);
    "hotcell_worker_outstanding_tokens" None, Gauge "Tokens that the worker still has to compute.",
        Worker(|w| w.outstanding_tokens as f64);
}

/// A label's value as the format wants it.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// Labels in braces.
fn braced(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let all = labels
        .iter()
        .map(|(k, v)| format!("{k}=\"{}\"", escaped(v)));
    format!("{{{}}}", all.collect::<Vec<_>>().join(","))
}

/// A model's labels under a name of ours or of vLLM's.
fn model_labels(theirs: bool, model: &str) -> Vec<(&'static str, &str)> {
    match theirs {
        // One host is one engine.
        true => vec![("model_name", model), ("engine", "0")],
        false => vec![("model", model)],
    }
}

fn histogram(to: &mut String, name: &str, labels: &[(&str, &str)], values: &Histogram) {
    let (counts, sum) = values.read();
    let ends = values.bounds.iter().map(f64::to_string);
    for (count, end) in counts.iter().zip(ends.chain(["+Inf".to_owned()])) {
        let mut labels = labels.to_vec();
        labels.push(("le", &end));
        // Writing into a string cannot fail.
        let _ = writeln!(to, "{name}_bucket{} {count}", braced(&labels));
    }
    let labels = braced(labels);
    let all = counts.last().copied().unwrap_or(0);
    let _ = writeln!(to, "{name}_sum{labels} {sum}\n{name}_count{labels} {all}");
}

fn write_row(to: &mut String, row: &Row, name: &str, seen: &Seen, models: &[(String, Model<'_>)]) {
    let theirs = name != row.name;
    let _ = writeln!(to, "# HELP {name} {}", row.help);
    let _ = writeln!(to, "# TYPE {name} {}", row.kind.name());
    match &row.read {
        Read::Host(value) => {
            let _ = writeln!(to, "{name} {}", value(seen));
        }
        Read::Model(value) => {
            for (model, values) in models {
                let labels = braced(&model_labels(theirs, model));
                let _ = writeln!(to, "{name}{labels} {}", value(values));
            }
        }
        Read::Times(of) => {
            for (model, values) in models {
                histogram(to, name, &model_labels(theirs, model), of(values.meter));
            }
        }
        Read::Ends => {
            for (model, values) in models {
                for (end, count) in values.meter.ended() {
                    let successful = matches!(end, "stop" | "length");
                    if theirs && !successful {
                        continue;
                    }
                    let mut labels = model_labels(theirs, model);
                    labels.push((if theirs { "finished_reason" } else { "end" }, end));
                    let _ = writeln!(to, "{name}{} {count}", braced(&labels));
                }
            }
        }
        Read::States => {
            for (model, values) in models {
                for (state, word) in STATES {
                    let mut labels = model_labels(theirs, model);
                    labels.push(("state", word));
                    let now = u8::from(values.info.state() == *state);
                    let _ = writeln!(to, "{name}{} {now}", braced(&labels));
                }
            }
        }
        Read::Worker(value) => {
            for worker in &seen.workers {
                let device = worker.lease.as_ref().map_or("", |l| l.device.as_str());
                let labels = braced(&[("worker", &worker.id), ("device", device)]);
                let _ = writeln!(to, "{name}{labels} {}", value(worker));
            }
        }
    }
}

/// `GET /metrics`.
async fn metrics(State(shared): State<Shared>) -> Response {
    let seen = Seen {
        workers: shared.fleet.workers_and_caches().await,
        inside: shared.admission.count(),
        waiting: shared.fleet.waiting(),
        sessions: shared.tensors.count(),
        handed: shared.streams.handed(),
        uptime: shared.fleet.uptime().as_secs_f64(),
        spans_sent: shared.traces.sent(),
        spans_dropped: shared.traces.dropped(),
    };
    let meters = shared.fleet.meters.all();
    let loaded = shared.fleet.models();
    // One that was never asked for is there, too: its numbers are 0.
    let idle = Meter::default();
    let mut models = Vec::new();
    for info in &loaded {
        let meter = meters.iter().find(|(name, _)| name.as_str() == info.name);
        let caches = seen.workers.iter().flat_map(|w| &w.caches);
        models.push((
            info.name.clone(),
            Model {
                info,
                meter: meter.map_or(&idle, |(_, meter)| meter),
                caches: caches.filter(|c| c.model == info.name).collect(),
            },
        ));
    }
    let mut text = String::new();
    for row in TABLE {
        for name in [Some(row.name), row.vllm].into_iter().flatten() {
            write_row(&mut text, row, name, &seen, &models);
        }
    }
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_the_formats_and_each_is_there_once() {
        let mut names = std::collections::BTreeSet::new();
        for row in TABLE {
            for name in [Some(row.name), row.vllm].into_iter().flatten() {
                assert!(names.insert(name), "{name} twice");
                let plain =
                    |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
                assert!(name.chars().all(plain), "{name}");
            }
            assert_eq!(
                row.name.ends_with("_total"),
                row.kind == Kind::Counter,
                "{}",
                row.name
            );
            assert!(row.help.ends_with('.'), "{}", row.help);
        }
    }

    #[test]
    fn a_histogram_ends_with_all() {
        let meter = Meter::default();
        meter.pause.observe(Duration::from_millis(20), 2);
        let mut text = String::new();
        histogram(&mut text, "x", &[("model", "a\"b")], &meter.pause);
        assert!(
            text.contains("x_bucket{model=\"a\\\"b\",le=\"0.025\"} 2\n"),
            "{text}"
        );
        assert!(
            text.contains("le=\"+Inf\"} 2\n") && text.ends_with("x_count{model=\"a\\\"b\"} 2\n")
        );
    }
}
