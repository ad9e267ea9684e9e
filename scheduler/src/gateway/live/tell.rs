//! What the live page is told, as JSON. Numbers only, names and reasons: nothing of prompts or answers.

use std::{
    sync::atomic::Ordering,
    time::{SystemTime, UNIX_EPOCH},
};

use hotcell_proto::v1::{
    CacheStatus, CrashReport, Event, EventKind, MemoryUse, ModelState, WatchSample, WatchedState,
    WorkerInfo, WorkerState,
};
use serde_json::{Value, json};

use crate::{
    meters::{Histogram, Meter},
    service::Shared,
};

/// Crash reports that are told each time, the newest first.
const CRASHES: usize = 20;

/// A variant's own word: `WORKER_STATE_READY` is `ready`.
fn word(name: &str, prefix: &str) -> String {
    name.trim_start_matches(prefix).to_ascii_lowercase()
}

/// How things are.
pub(super) fn state(shared: &Shared, workers: &[WorkerInfo]) -> Value {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let devices = shared.fleet.devices();
    let devices = devices.iter().map(|device| {
        json!({
            "id": device.id,
            "backend": device.backend,
            "description": device.description,
            "path": device.path,
            "memory_bytes": device.memory_bytes,
            "problem": device.problem,
            "members": device.members,
        })
    });
    let crashes = shared.fleet.crashes.latest(CRASHES);
    json!({
        "time_ms": since.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        "uptime_ms": u64::try_from(shared.fleet.uptime().as_millis()).unwrap_or(u64::MAX),
        "version": env!("CARGO_PKG_VERSION"),
        "serving": shared.is_serving(),
        "inside": shared.admission.count(),
        "devices": devices.collect::<Vec<_>>(),
        "workers": workers.iter().map(worker).collect::<Vec<_>>(),
        "models": models(shared),
        "crashes": crashes.iter().map(crash).collect::<Vec<_>>(),
    })
}

fn worker(worker: &WorkerInfo) -> Value {
    json!({
        "id": worker.id,
        "device": worker.lease.as_ref().map_or("", |lease| &lease.device),
        "state": word(WorkerState::as_str_name(&worker.state()), "WORKER_STATE_"),
        "pid": worker.pid,
        "epoch": worker.epoch,
        "deaths": worker.deaths,
        "last_exit": worker.last_exit,
        "uptime_ms": worker.uptime_ms,
        "resident_bytes": worker.resident_bytes,
        "models": worker.models,
        "confinement": worker.confinement,
        "caches": worker.caches.iter().map(cache).collect::<Vec<_>>(),
        "memory": worker.memory.iter().map(memory).collect::<Vec<_>>(),
    })
}

fn cache(cache: &CacheStatus) -> Value {
    json!({
        "model": cache.model,
        "bytes": cache.bytes,
        "blocks": cache.blocks,
        "used": cache.used_blocks,
        "kept": cache.kept_blocks,
        "running": cache.running,
        "waiting": cache.waiting,
    })
}

fn memory(part: &MemoryUse) -> Value {
    json!({ "kind": part.kind, "model": part.model, "bytes": part.bytes })
}

/// Upper ends of a histogram's buckets, and how often it was that or less.
fn histogram(of: &Histogram) -> Value {
    json!({ "bounds": of.bounds, "counts": of.read().0 })
}

fn models(shared: &Shared) -> Vec<Value> {
    let meters = shared.fleet.meters.all();
    let idle = Meter::default();
    let told = shared.fleet.models().into_iter().map(|info| {
        let meter = meters.iter().find(|(name, _)| name.as_str() == info.name);
        let meter = meter.map_or(&idle, |(_, meter)| meter);
        let ended = meter.ended();
        let ended = ended.into_iter().map(|(how, count)| (how, json!(count)));
        json!({
            "name": info.name,
            "state": word(ModelState::as_str_name(&info.state()), "MODEL_STATE_"),
            "workers": info.workers,
            "problem": info.problem,
            "running": info.running_requests,
            "waiting": shared.fleet.waiting_for(&info.name),
            "generated_tokens": meter.generated_tokens.load(Ordering::Relaxed),
            "prompt_tokens": meter.prompt_tokens.load(Ordering::Relaxed),
            "continuations": meter.continuations.load(Ordering::Relaxed),
            "ended": ended.map(|(k, v)| (k.to_owned(), v)).collect::<serde_json::Map<_, _>>(),
            "first_token": histogram(&meter.first_token),
            "between": histogram(&meter.between),
            "whole": histogram(&meter.whole),
        })
    });
    told.collect()
}

/// A death in short.
fn crash(crash: &CrashReport) -> Value {
    let seen = crash.blackbox.as_ref();
    let requests = crash.requests.iter().map(|request| {
        json!({
            "id": request.request_id,
            "model": request.model,
            "generated": request.generated,
            "outcome": request.outcome,
        })
    });
    let running = seen.iter().flat_map(|seen| &seen.running);
    let running = running.map(|one| json!({ "id": one.request_id, "tokens": one.tokens }));
    json!({
        "id": crash.id,
        "time_ms": crash.time_ms,
        "worker": crash.worker,
        "epoch": crash.epoch,
        "device": crash.device,
        "kind": crash.kind,
        "reason": crash.reason,
        "uptime_ms": crash.uptime_ms,
        "doing": seen.map_or("", |seen| &seen.doing),
        "model": seen.map_or("", |seen| &seen.model),
        "steps": seen.map_or(0, |seen| seen.steps),
        "node": seen.map_or(0, |seen| seen.node),
        "op": seen.map_or("", |seen| &seen.op),
        "running": running.collect::<Vec<_>>(),
        "requests": requests.collect::<Vec<_>>(),
    })
}

/// All of it.
pub(super) fn crash_whole(of: &CrashReport) -> Value {
    let mut told = crash(of);
    let seen = of.blackbox.as_ref();
    let signal = seen.and_then(|seen| seen.signal.as_ref()).map(|site| {
        let frames = site.frames.iter().map(|frame| format!("{frame:#x}"));
        json!({
            "name": site.name,
            "code": site.code,
            "address": format!("{:#x}", site.address),
            "frames": frames.collect::<Vec<_>>(),
        })
    });
    told["signal"] = json!(signal);
    told["error"] = json!(seen.map_or("", |seen| &seen.error));
    told["blackbox_problem"] = json!(of.blackbox_problem);
    told["peak_bytes"] = json!(seen.map_or(0, |seen| seen.peak_bytes));
    told["models"] = json!(of.models);
    told["log"] = json!(of.log);
    told
}

/// What one worker did in the last second.
pub(super) fn sample(sample: &WatchSample) -> Value {
    let steps = sample.steps.unwrap_or_default();
    let requests = sample.requests.iter().map(|request| {
        json!({
            "id": request.request_id,
            "model": request.model,
            "state": word(WatchedState::as_str_name(&request.state()), "WATCHED_STATE_"),
            "tokens": request.tokens,
            "computed": request.computed,
            "prompt_tokens": request.prompt_tokens,
            "age_ms": request.age_ms,
            "preempted": request.preempted,
        })
    });
    let nodes = sample.nodes.iter().map(|node| {
        let op = if node.group { "…" } else { "" };
        json!({
            "op": format!("{op}{}", node.op),
            "name": node.name,
            "step": node.step,
            "seen": node.seen,
        })
    });
    let tensors = sample.tensors.clone().unwrap_or_default();
    json!({
        "worker": sample.worker,
        "epoch": sample.epoch,
        "time_ms": sample.time_ms,
        "span_ms": sample.span_ms,
        "doing": sample.doing,
        "busy": sample.busy,
        "queue": sample.queue,
        "steps": {
            "count": steps.count,
            "rows": steps.rows,
            "drawn": steps.drawn,
            "busy_ms": steps.busy_ms,
            "computing_ms": steps.computing_ms,
            "p50_ms": steps.p50_ms,
            "p99_ms": steps.p99_ms,
        },
        "requests": requests.collect::<Vec<_>>(),
        "nodes": nodes.take(5).collect::<Vec<_>>(),
        "looks": sample.looks,
        "sessions": tensors.sessions,
        "tensors": tensors.tensors,
        "plans": tensors.plans,
        "plans_compiled": tensors.compiled,
        "plans_executed": tensors.executed,
    })
}

/// Something happened.
pub(super) fn event(event: &Event) -> Value {
    json!({
        "kind": word(EventKind::as_str_name(&event.kind()), "EVENT_KIND_"),
        "time_ms": event.time_ms,
        "worker": event.worker,
        "epoch": event.epoch,
        "model": event.model,
        "message": event.message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_without_their_prefix() {
        let ready = WorkerState::as_str_name(&WorkerState::Ready);
        assert_eq!(word(ready, "WORKER_STATE_"), "ready");
        let told = event(&Event {
            kind: EventKind::WorkerDied.into(),
            worker: "w0".into(),
            ..Event::default()
        });
        assert_eq!(
            (&told["kind"], &told["worker"]),
            (&json!("worker_died"), &json!("w0"))
        );
    }
}
