//! `hotcell debug watch`: samples of what a worker does, a line each.

use std::{fmt::Write as _, time::Duration};

use clap::Args;
use hotcell_proto::v1::{NodeShare, WatchSample, WatchedSteps};
use serde_json::{Value, json};

use crate::cli::{
    exit::Failure,
    flags::watch_interval,
    interrupt::Interrupt,
    json::watched_state,
    session::Session,
    table::{bytes, span, time_of_day},
    ui::{BOLD, Ui, one_line},
};

/// Lines between two headings.
const PAGE: u64 = 20;

/// `hotcell debug watch`.
#[derive(Args, Clone, Debug)]
pub struct DebugWatchFlags {
    /// The worker's name, as `hotcell ps` shows it; the only one if missing
    pub worker: Option<String>,
    /// How long each line covers: 200ms, 1s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = watch_interval)]
    pub every: Duration,
    /// End after so many lines
    #[arg(short = 'n', long, value_name = "N")]
    pub samples: Option<u64>,
}

const HEADING: &str = "TIME          DOING     STEPS/S  TOKENS/S    ROWS     P50     P99   BUSY  COMPUTE  RUN  WAIT  CACHE  WHERE";

pub(super) async fn watch(
    ui: &mut Ui,
    session: &Session,
    flags: &DebugWatchFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let worker = flags.worker.as_deref().unwrap_or_default();
    let mut samples = session.client.watch_worker(worker, flags.every).await?;
    let mut lines = 0;
    while flags.samples.is_none_or(|most| lines < most) {
        let sample = tokio::select! {
            sample = samples.next() => sample.transpose()?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        let Some(sample) = sample else { break };
        if ui.manner.json {
            ui.print_json(&view(&sample))?;
        } else {
            if lines % PAGE == 0 {
                let heading = ui.styled(BOLD, HEADING);
                ui.print(&format!("{heading}\n"))?;
            }
            let mut text = line(&sample);
            if ui.manner.verbose {
                more(&sample, &mut text);
            }
            ui.print(&text)?;
        }
        lines += 1;
    }
    Ok(())
}

/// A step that began before the interval counts for all of its time where it ended: no more than all of it is shown.
pub(in crate::cli) fn share(part: f64, whole: f64) -> String {
    match whole > 0.0 {
        true => format!("{:.0}%", (100.0 * part / whole).min(100.0)),
        false => "-".to_owned(),
    }
}

/// An op as it is shown: a fused group by its last one.
fn op(name: &str, group: bool) -> String {
    match (name, group) {
        ("", _) => "?".to_owned(),
        (name, true) => format!("…{name}"),
        (name, false) => name.to_owned(),
    }
}

fn line(sample: &WatchSample) -> String {
    let steps = sample.steps.unwrap_or_default();
    let per_second = |count: u64| match sample.span_ms > 0.0 {
        true => format!("{:.0}", count as f64 * 1e3 / sample.span_ms),
        false => "-".to_owned(),
    };
    let rows = match steps.count {
        0 => "-".to_owned(),
        count => format!("{:.1}", steps.rows as f64 / count as f64),
    };
    let time = |ms: f64| match steps.count {
        0 => "-".to_owned(),
        _ if ms < 10.0 => format!("{ms:.2}ms"),
        _ => format!("{ms:.0}ms"),
    };
    let sum = |of: fn(&hotcell_proto::v1::CacheStatus) -> u64| {
        let all = sample.caches.iter().map(of);
        all.fold(0, u64::saturating_add)
    };
    let found = sample.nodes.first().map(|node| {
        let share = share(f64::from(node.seen), f64::from(sample.looks));
        format!("{} {share}", place(node))
    });
    let told = |count: u64| match sample.busy {
        true => "?".to_owned(),
        false => count.to_string(),
    };
    let mut text = format!(
        "{}  {:8}  {:>7}  {:>8}  {rows:>6}  {:>6}  {:>6}  {:>5}  {:>7}  {:>3}  {:>4}  {:>5}  {}",
        time_of_day(sample.time_ms),
        sample.doing,
        per_second(steps.count),
        per_second(steps.drawn),
        time(steps.p50_ms),
        time(steps.p99_ms),
        share(steps.busy_ms, sample.span_ms),
        share(steps.computing_ms, sample.span_ms),
        told(sum(|c| c.running)),
        told(sum(|c| c.waiting)),
        share(sum(|c| c.used_blocks) as f64, sum(|c| c.blocks) as f64),
        found.as_deref().unwrap_or("-"),
    );
    if sample.missed > 0 {
        let _ = write!(text, "  ({} lines missed)", sample.missed);
    }
    format!("{}\n", one_line(&text))
}

/// What does not fit into the line. Writing to a string cannot fail.
fn more(sample: &WatchSample, text: &mut String) {
    let mut say = |what: String| {
        let _ = writeln!(text, "    {}", one_line(&what));
    };
    for request in &sample.requests {
        let id = match request.request_id.as_str() {
            "" => "(embedding)",
            id => id,
        };
        say(format!(
            "request {id} of {}: {}, {} of {} tokens computed, {} of them its prompt's, here for {}",
            request.model,
            watched_state(request.state),
            request.computed,
            request.tokens,
            request.prompt_tokens,
            span(request.age_ms.max(0.0) as u64),
        ));
    }
    for part in &sample.memory {
        let whose = match part.model.as_str() {
            "" => String::new(),
            model => format!(" of {model}"),
        };
        say(format!(
            "memory {}{whose}: {}",
            part.kind,
            bytes(part.bytes)
        ));
    }
    let tensors = sample.tensors.clone().unwrap_or_default();
    if tensors.sessions > 0 {
        say(format!(
            "sessions {}, with {} tensors and {} plans",
            tensors.sessions, tensors.tensors, tensors.plans
        ));
        say(format!(
            "{} plans made so far, called {} times",
            tensors.compiled, tensors.executed
        ));
        for one in &tensors.holders {
            let (held, tensors, plans) = (bytes(one.bytes), one.tensors, one.plans);
            say(format!(
                "session {}: {held} in {tensors} tensors, {plans} plans",
                one.number
            ));
        }
    }
    for node in sample.nodes.iter().skip(1).take(5) {
        let share = share(f64::from(node.seen), f64::from(sample.looks));
        let ms = node.ms;
        say(format!(
            "at {} (step {}) {share}, {ms:.1} ms",
            place(node),
            node.step
        ));
    }
}

/// A plan's step: by its node, if that has a name, or its op.
pub(in crate::cli) fn place(node: &NodeShare) -> String {
    match node.name.as_str() {
        "" => op(&node.op, node.group),
        name => op(name, node.group),
    }
}

fn steps_view(steps: &WatchedSteps) -> Value {
    json!({
        "count": steps.count,
        "rows": steps.rows,
        "sequences": steps.sequences,
        "drawn": steps.drawn,
        "busy_ms": steps.busy_ms,
        "computing_ms": steps.computing_ms,
        "p50_ms": steps.p50_ms,
        "p99_ms": steps.p99_ms,
        "max_ms": steps.max_ms,
        "missed": steps.missed,
    })
}

fn view(sample: &WatchSample) -> Value {
    let caches = sample.caches.iter().map(|cache| {
        json!({
            "model": cache.model,
            "bytes": cache.bytes,
            "blocks": cache.blocks,
            "used_blocks": cache.used_blocks,
            "kept_blocks": cache.kept_blocks,
            "running": cache.running,
            "waiting": cache.waiting,
        })
    });
    let requests = sample.requests.iter().map(|request| {
        json!({
            "request_id": request.request_id,
            "model": request.model,
            "state": watched_state(request.state),
            "tokens": request.tokens,
            "computed": request.computed,
            "prompt_tokens": request.prompt_tokens,
            "age_ms": request.age_ms,
            "preempted": request.preempted,
        })
    });
    let memory = sample
        .memory
        .iter()
        .map(|part| json!({ "kind": part.kind, "model": part.model, "bytes": part.bytes }));
    let nodes = sample.nodes.iter().map(|node| {
        json!({
            "step": node.step,
            "op": node.op,
            "group": node.group,
            "seen": node.seen,
            "name": node.name,
            "part": node.part,
            "ms": node.ms,
        })
    });
    let tensors = sample.tensors.clone().unwrap_or_default();
    let holders = tensors.holders.iter().map(|one| {
        json!({
            "number": one.number,
            "tensors": one.tensors,
            "plans": one.plans,
            "bytes": one.bytes,
        })
    });
    json!({
        "worker": sample.worker,
        "epoch": sample.epoch,
        "time_ms": sample.time_ms,
        "span_ms": sample.span_ms,
        "doing": sample.doing,
        "busy": sample.busy,
        "missed": sample.missed,
        "queue": sample.queue,
        "steps": sample.steps.as_ref().map(steps_view),
        "caches": caches.collect::<Vec<_>>(),
        "requests": requests.collect::<Vec<_>>(),
        "memory": memory.collect::<Vec<_>>(),
        "tensors": {
            "sessions": tensors.sessions,
            "tensors": tensors.tensors,
            "plans": tensors.plans,
            "compiled": tensors.compiled,
            "executed": tensors.executed,
            "holders": holders.collect::<Vec<_>>(),
        },
        "looks": sample.looks,
        "nodes": nodes.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{CacheStatus, WatchedRequest};

    use super::*;

    #[test]
    fn a_sample_is_one_line_that_steers_no_terminal() {
        let mut sample = WatchSample {
            worker: "w0".into(),
            time_ms: 3_723_004,
            span_ms: 500.0,
            doing: "stepping".into(),
            steps: Some(WatchedSteps {
                count: 10,
                rows: 25,
                drawn: 20,
                busy_ms: 250.0,
                computing_ms: 125.0,
                p50_ms: 2.5,
                p99_ms: 40.0,
                ..WatchedSteps::default()
            }),
            caches: vec![CacheStatus {
                blocks: 200,
                used_blocks: 50,
                running: 3,
                ..CacheStatus::default()
            }],
            nodes: vec![NodeShare {
                op: "mul_mat\u{1b}[2J".into(),
                seen: 30,
                ..NodeShare::default()
            }],
            looks: 40,
            missed: 2,
            ..WatchSample::default()
        };
        let text = line(&sample);
        let words: Vec<&str> = text.split_whitespace().collect();
        let expected = [
            "01:02:03.004",
            "stepping",
            "20",
            "40",
            "2.5",
            "2.50ms",
            "40ms",
            "50%",
            "25%",
            "3",
            "0",
            "25%",
        ];
        assert_eq!(words[..12], expected, "{text}");
        assert!(
            text.contains("75%  (2 lines missed)") && !text.contains('\u{1b}'),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
        sample.busy = true;
        sample.steps = None;
        assert!(line(&sample).contains('?'));
    }

    #[test]
    fn json_has_what_the_line_leaves_out() {
        let sample = WatchSample {
            requests: vec![WatchedRequest {
                request_id: "r".into(),
                state: 2,
                ..WatchedRequest::default()
            }],
            ..WatchSample::default()
        };
        assert_eq!(view(&sample)["requests"][0]["state"], "reading");
        let mut text = String::new();
        more(&sample, &mut text);
        assert!(text.contains("request r of : reading"), "{text}");
    }
}
