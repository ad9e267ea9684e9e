//! `/metrics` in Prometheus' text format: under our own names, and under those that dashboards and autoscalers made for
//! vLLM, TGI and Triton look for, and those of OpenTelemetry.
//!
//! [`TABLE`] is all there is; the reference page and the dashboard are made from it.

mod write;

use std::{collections::BTreeMap, sync::atomic::Ordering};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use hotcell_proto::v1::{CacheStatus, DeviceGauge, ModelInfo, ModelState, WorkerInfo, WorkerState};
use tokio::task::spawn_blocking;

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
    /// A histogram for each model, of its seconds in milliseconds.
    Millis(fn(&Meter) -> &Histogram),
    /// One for each model and end.
    Ends,
    /// One for each model and state.
    States,
    /// One for each worker.
    Worker(fn(&WorkerInfo) -> f64),
    /// One for each worker and kind of memory.
    Memory,
    /// One for each device of which somebody tells it.
    Device(fn(&DeviceGauge) -> Option<f64>),
    /// One for each device and fault that its driver told of.
    Faults,
    /// Always 1, for each model; its cache is in the labels.
    Cache,
    /// Always 0: there are no adapters, and the labels say so.
    Adapters,
}

/// Whose names and labels a metric is told with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Ours.
    Hotcell,
    /// vLLM's.
    Vllm,
    /// TGI's.
    Tgi,
    /// Triton's.
    Triton,
    /// That of OpenTelemetry's conventions for generative AI, as Prometheus writes them.
    GenAi,
}

impl Dialect {
    /// Whose name that is.
    pub fn of(name: &str) -> Self {
        match name {
            _ if name.starts_with("vllm:") => Self::Vllm,
            _ if name.starts_with("tgi_") => Self::Tgi,
            _ if name.starts_with("nv_") => Self::Triton,
            _ if name.starts_with("gen_ai_") => Self::GenAi,
            _ => Self::Hotcell,
        }
    }

    /// The label that names the model, and those that are always the same: one host is one engine.
    fn model(self) -> (&'static str, &'static [(&'static str, &'static str)]) {
        match self {
            Self::Hotcell | Self::Tgi => ("model", &[]),
            Self::Vllm => ("model_name", &[("engine", "0")]),
            Self::Triton => ("model", &[("version", "1")]),
            Self::GenAi => (
                "gen_ai_request_model",
                &[("gen_ai_provider_name", "hotcell")],
            ),
        }
    }
}

/// One metric.
pub struct Row {
    /// Our name; another's where that counts in another way.
    pub name: &'static str,
    /// Others' names for the same.
    pub also: &'static [&'static str],
    /// How it goes.
    pub kind: Kind,
    /// What it means.
    pub help: &'static str,
    read: Read,
}

impl Row {
    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.also.iter().copied())
    }

    /// The labels of its values under its first name.
    pub fn labels(&self) -> Vec<&'static str> {
        let dialect = Dialect::of(self.name);
        let (model, always) = dialect.model();
        let of_model = std::iter::once(model).chain(always.iter().map(|(name, _)| *name));
        let more: &[&str] = match self.read {
            Read::Host(_) => return Vec::new(),
            Read::Worker(_) => return vec!["worker", "device"],
            Read::Memory => return vec!["worker", "device", "kind"],
            Read::Device(_) => return vec!["device", "uuid"],
            Read::Faults => return vec!["device", "uuid", "code"],
            Read::Model(_) | Read::Times(_) | Read::Millis(_) => &[],
            Read::Ends => &["end"],
            Read::States => &["state"],
            Read::Cache => &["block_size", "blocks"],
            Read::Adapters => &ADAPTERS,
        };
        of_model.chain(more.iter().copied()).collect()
    }
}

/// What vLLM says of adapters.
const ADAPTERS: [&str; 3] = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"];

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
    devices: Vec<DeviceSeen>,
    inside: usize,
    waiting: usize,
    sessions: usize,
    handed: (u64, u64),
    uptime: f64,
    spans_sent: u64,
    spans_dropped: u64,
}

/// A device of which a management library tells.
struct DeviceSeen {
    id: String,
    gauge: DeviceGauge,
    /// How often each fault was told.
    faults: BTreeMap<u64, u64>,
}

impl DeviceSeen {
    /// Its labels under one of a row's names.
    fn labels(&self, name: &str) -> Vec<(&'static str, &str)> {
        match Dialect::of(name) {
            Dialect::Triton => vec![("gpu_uuid", &self.gauge.uuid)],
            _ => vec![("device", &self.id), ("uuid", &self.gauge.uuid)],
        }
    }
}

/// A model, with its caches in all workers.
struct Model<'a> {
    info: &'a ModelInfo,
    meter: &'a Meter,
    caches: Vec<&'a CacheStatus>,
    /// Requests that wait in the scheduler.
    waiting: usize,
}

impl Model<'_> {
    fn sum(&self, of: fn(&CacheStatus) -> u64) -> f64 {
        self.caches.iter().map(|cache| of(cache) as f64).sum()
    }

    /// Requests that ended well, or that did not.
    fn ended(&self, well: bool) -> f64 {
        let ended = self.meter.ended();
        let such = ended.iter().filter(|(end, _)| is_success(end) == well);
        such.map(|(_, count)| *count as f64).sum()
    }
}

fn is_success(end: &str) -> bool {
    matches!(end, "stop" | "length")
}

/// Blocks for all layers that see everything; those of all kinds where there are none.
fn whole_blocks(cache: &CacheStatus) -> u64 {
    let whole = cache.layers.iter().filter(|kind| kind.window == 0);
    whole.map(|kind| kind.blocks).max().unwrap_or(cache.blocks)
}

/// A histogram's sum in millionths.
fn micros(histogram: &Histogram) -> f64 {
    (histogram.read().1 * 1e6).round()
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

macro_rules! rows {
    ($($name:literal [$($also:literal),*] $kind:ident $help:literal, $read:ident $(($of:expr))?;)*) => {
        /// Every metric there is.
        pub const TABLE: &[Row] = &[$(Row {
            name: $name,
            also: &[$($also),*],
            kind: Kind::$kind,
            help: $help,
            read: Read::$read$(($of))?,
        },)*];
    };
}

rows! {
    "hotcell_requests_running" ["vllm:num_requests_running", "tgi_batch_current_size"] Gauge "Requests in workers' batches.",
        Model(|m| m.sum(|c| c.running));
    "hotcell_requests_waiting" ["vllm:num_requests_waiting", "tgi_queue_size", "nv_inference_pending_request_count"] Gauge
        "Requests that wait for a place in a batch, in the scheduler because every worker is full or in workers.",
        Model(|m| m.sum(|c| c.waiting) + m.waiting as f64);
    "hotcell_kv_cache_used_ratio" ["vllm:kv_cache_usage_perc", "nv_trt_llm_kv_cache_block_metrics"] Gauge
        "Share of the KV cache's blocks that requests have now, 0 to 1.",
        Model(|m| share(m.sum(|c| c.used_blocks), m.sum(|c| c.blocks)));
    "hotcell_kv_cache_tokens" ["tgi_batch_current_max_tokens"] Gauge "Tokens for which the KV cache has room.",
        Model(|m| m.sum(|c| whole_blocks(c).saturating_mul(c.block_tokens)));
    "hotcell_kv_cache_info" ["vllm:cache_config_info"] Gauge "1, with the size of the KV cache in its labels: tokens of a block, and blocks in all workers.",
        Cache;
    "vllm:lora_requests_info" [] Gauge "0: adapters are not served, which its labels say.",
        Adapters;
    "hotcell_kv_cache_kept_ratio" [] Gauge "Share of the KV cache's blocks that are kept for prompts that begin alike, 0 to 1.",
        Model(|m| share(m.sum(|c| c.kept_blocks), m.sum(|c| c.blocks)));
    "hotcell_kv_cache_bytes" [] Gauge "Bytes of all blocks of the KV cache.",
        Model(|m| m.sum(|c| c.bytes));
    "hotcell_preemptions_total" ["vllm:num_preemptions_total"] Counter "Requests that were put back for want of cache or a place since their workers loaded the model.",
        Model(|m| m.sum(|c| c.preemptions));
    "hotcell_guessed_tokens_total" [] Counter "Tokens that were guessed (speculative decoding) since the workers loaded the model.",
        Model(|m| m.sum(|c| c.guessed_tokens));
    "hotcell_guessed_right_total" [] Counter "Tokens that were guessed right.",
        Model(|m| m.sum(|c| c.guessed_right));
    "hotcell_prompt_tokens_total" ["vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"] Counter "Tokens of finished requests' prompts.",
        Model(|m| m.meter.prompt_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_prompt_tokens_cached_total" ["vllm:prefix_cache_hits_total"] Counter "Those of them that a worker had in its cache.",
        Model(|m| m.meter.cached_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_generated_tokens_total" ["vllm:generation_tokens_total"] Counter "Tokens that were generated.",
        Model(|m| m.meter.generated_tokens.load(Ordering::Relaxed) as f64);
    "hotcell_requests_total" ["vllm:request_success_total"] Counter "Requests that ended, by how: stop, length, or the reason of the error.",
        Ends;
    "nv_inference_request_success" ["nv_inference_count", "tgi_request_success"] Counter "Requests that ended well.",
        Model(|m| m.ended(true));
    "nv_inference_request_failure" [] Counter "Requests that failed, those that were cancelled included.",
        Model(|m| m.ended(false));
    "tgi_request_count" [] Counter "Requests that ended, well or not.",
        Model(|m| m.ended(true) + m.ended(false));
    "hotcell_request_queue_seconds" ["vllm:request_queue_time_seconds", "tgi_request_queue_duration"] Histogram
        "What a request that finished had waited: for a worker, and there for its first step.",
        Times(|m| &m.queue);
    "nv_inference_queue_duration_us" [] Counter "The same together, in microseconds.",
        Model(|m| micros(&m.meter.queue));
    "hotcell_first_token_seconds" ["vllm:time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds"] Histogram "From a request's arrival to its first token.",
        Times(|m| &m.first_token);
    "nv_inference_first_response_histogram_ms" [] Histogram "The same in milliseconds.",
        Millis(|m| &m.first_token);
    "hotcell_inter_token_seconds"
        ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds"] Histogram "Between tokens of a request.",
        Times(|m| &m.between);
    "hotcell_request_token_seconds" ["vllm:request_time_per_output_token_seconds", "tgi_request_mean_time_per_token_duration"] Histogram
        "Between tokens of a request that finished, on average over it.",
        Times(|m| &m.each_token);
    "hotcell_request_seconds"
        ["vllm:e2e_request_latency_seconds", "tgi_request_duration", "gen_ai_server_request_duration_seconds"] Histogram "From a request's arrival to its end, if it finished.",
        Times(|m| &m.whole);
    "nv_inference_request_duration_us" [] Counter "The same together, in microseconds.",
        Model(|m| micros(&m.meter.whole));
    "hotcell_request_prompt_tokens" ["vllm:request_prompt_tokens", "tgi_request_input_length"] Histogram "Tokens of a finished request's prompt.",
        Times(|m| &m.prompt_length);
    "hotcell_request_generated_tokens" ["vllm:request_generation_tokens", "tgi_request_generated_tokens"] Histogram
        "Tokens that a finished request was answered with.",
        Times(|m| &m.answer_length);
    "hotcell_model_state" [] Gauge "1 for the state that the model is in, 0 for the others.",
        States;
    "hotcell_model_workers" [] Gauge "Workers that have the model and serve.",
        Model(|m| m.info.workers.len() as f64);
    "hotcell_model_requests" [] Gauge "Requests for the model that are under way, those that wait included.",
        Model(|m| f64::from(m.info.running_requests));
    "hotcell_model_memory_bytes" [] Gauge "What the model takes on one device, by a dry run; 0 before that is known.",
        Model(|m| m.info.memory_bytes as f64);
    "hotcell_continuations_total" [] Counter "Times that a stream went on after its worker's death.",
        Model(|m| m.meter.continuations.load(Ordering::Relaxed) as f64);
    "hotcell_continuation_pause_seconds" [] Histogram "From a worker's death to the next event of a stream that ran on it.",
        Times(|m| &m.pause);
    "hotcell_workers_ready" [] Gauge "Workers that serve.",
        Host(|s| s.workers.iter().filter(|w| w.state() == WorkerState::Ready).count() as f64);
    "hotcell_requests_inside" [] Gauge "Requests that the scheduler has let in and not answered yet.",
        Host(|s| s.inside as f64);
    "hotcell_requests_queued" [] Gauge "Requests that wait in the scheduler because every worker is full.",
        Host(|s| s.waiting as f64);
    "hotcell_tensor_sessions" [] Gauge "Tensor sessions that are open.",
        Host(|s| s.sessions as f64);
    "hotcell_handed_over_total" [] Counter "Streams that another host took over while this one drained.",
        Host(|s| s.handed.0 as f64);
    "hotcell_handover_refusals_total" [] Counter "Times that the other host did not take a stream over, or could not go on with it.",
        Host(|s| s.handed.1 as f64);
    "hotcell_uptime_seconds" [] Gauge "Since the scheduler began.",
        Host(|s| s.uptime);
    "hotcell_spans_sent_total" [] Counter "Spans of traces that the collector took.",
        Host(|s| s.spans_sent as f64);
    "hotcell_spans_dropped_total" [] Counter "Spans that were dropped, because the collector did not take them or too many waited.",
        Host(|s| s.spans_dropped as f64);
    "hotcell_worker_up" [] Gauge "1 if the worker serves, 0 if not.",
        Worker(|w| f64::from(u8::from(w.state() == WorkerState::Ready)));
    "hotcell_worker_deaths_total" [] Counter "Times that a worker of this place died.",
        Worker(|w| f64::from(w.deaths));
    "hotcell_worker_epoch" [] Gauge "How many processes this place has had.",
        Worker(|w| w.epoch as f64);
    "hotcell_worker_resident_bytes" [] Gauge "Memory of the worker's process, weights that it shares included.",
        Worker(|w| w.resident_bytes as f64);
    "hotcell_worker_memory_bytes" [] Gauge
        "What the worker holds, by kind: weights and packed (mapped, shared by workers), weights_kept (on the device, and outlive the worker), cache, plans, tensors (of sessions), tensors_kept (freed by them), library and library_kept (the same, by the device's library's count).",
        Memory;
    "hotcell_device_utilization_ratio" ["nv_gpu_utilization"] Gauge
        "Share of the last moments in which the device computed, 0 to 1, as its management library tells, for whatever process.",
        Device(|d| d.utilization);
    "hotcell_device_memory_bytes" ["nv_gpu_memory_total_bytes"] Gauge "Memory of the device.",
        Device(|d| d.memory_bytes.map(|n| n as f64));
    "hotcell_device_memory_used_bytes" ["nv_gpu_memory_used_bytes"] Gauge "Memory of the device that is in use, by whatever process.",
        Device(|d| d.memory_used_bytes.map(|n| n as f64));
    "hotcell_device_power_watts" ["nv_gpu_power_usage"] Gauge "What the device takes, watts.",
        Device(|d| d.power_watts);
    "hotcell_device_power_limit_watts" ["nv_gpu_power_limit"] Gauge "What it may take at most, watts.",
        Device(|d| d.power_limit_watts);
    "hotcell_device_energy_joules_total" ["nv_energy_consumption"] Counter "What it has taken since its driver was loaded, joules.",
        Device(|d| d.energy_joules);
    "hotcell_device_temperature_celsius" [] Gauge "How warm the device is.",
        Device(|d| d.temperature);
    "hotcell_device_memory_errors_corrected_total" [] Counter "Errors of the device's memory that were corrected, since its driver was loaded.",
        Device(|d| d.ecc_corrected.map(|n| n as f64));
    "hotcell_device_memory_errors_uncorrected_total" [] Counter "Errors of the device's memory that could not be corrected, since its driver was loaded.",
        Device(|d| d.ecc_uncorrected.map(|n| n as f64));
    "hotcell_device_faults_total" [] Counter "Faults of the device that its driver told of, by its number for them (NVIDIA's Xid).",
        Faults;
    "hotcell_worker_outstanding_tokens" [] Gauge "Tokens that the worker still has to compute.",
        Worker(|w| w.outstanding_tokens as f64);
}

fn devices(shared: &Shared) -> Vec<DeviceSeen> {
    let gauges = &shared.fleet.gauges;
    let seen = shared.fleet.devices().into_iter().filter_map(|device| {
        Some(DeviceSeen {
            gauge: gauges.of(&device)?,
            faults: gauges.faults(&device),
            id: device.id,
        })
    });
    seen.collect()
}

/// `GET /metrics`.
async fn metrics(State(shared): State<Shared>) -> Response {
    let seen = Seen {
        workers: shared.fleet.workers_and_caches().await,
        devices: devices(&shared),
        inside: shared.admission.count(),
        waiting: shared.fleet.waiting(),
        sessions: shared.tensors.count(),
        handed: shared.streams.handed(),
        uptime: shared.fleet.uptime().as_secs_f64(),
        spans_sent: shared.traces.sent(),
        spans_dropped: shared.traces.dropped(),
    };
    // Beside those who pass tokens on: of many models it is a long text.
    let text = spawn_blocking(move || written(&shared, &seen)).await;
    let Ok(text) = text else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// All rows as text.
fn written(shared: &Shared, seen: &Seen) -> String {
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
                waiting: shared.fleet.waiting_for(&info.name),
            },
        ));
    }
    let mut text = String::new();
    for row in TABLE {
        for name in row.names() {
            write::row(&mut text, row, name, seen, &models);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_the_formats_and_each_is_there_once() {
        let mut names = std::collections::BTreeSet::new();
        for row in TABLE {
            for name in row.names() {
                assert!(names.insert(name), "{name} twice");
                let plain =
                    |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
                assert!(name.chars().all(plain), "{name}");
            }
            // Others have habits of their own.
            let ours = Dialect::of(row.name) == Dialect::Hotcell;
            let counts = row.kind == Kind::Counter;
            assert!(
                !ours || row.name.ends_with("_total") == counts,
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
        write::histogram(&mut text, "x", &[("model", "a\"b")], (&meter.pause, 1.0));
        assert!(
            text.contains("x_bucket{model=\"a\\\"b\",le=\"0.025\"} 2\n"),
            "{text}"
        );
        text.clear();
        write::histogram(&mut text, "nv_ms", &[], (&meter.pause, 1e3));
        assert!(text.contains("nv_ms_bucket{le=\"25\"} 2\n"), "{text}");
        assert!(text.contains("nv_ms_sum 40\n"), "{text}");
        text.clear();
        write::histogram(&mut text, "x", &[("model", "a\"b")], (&meter.pause, 1.0));
        assert!(
            text.contains("le=\"+Inf\"} 2\n") && text.ends_with("x_count{model=\"a\\\"b\"} 2\n")
        );
    }
}
