//! `hotcell crashes replay`: the requests that ran when a worker died, each again in a throw-away worker of its own.

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    limits::STEPS_PER_CRUMB,
    plan_part::PlanPart,
    v1::{
        BlackBox, CaptureHeld, CaptureOptions, CapturedNode, CrashReport, GuardHit, ReplayRequest,
        captured, replay_request::Which,
    },
};
use serde_json::{Value, json};

use crate::{
    cli::{
        debug::{When, condition, hit_line, hit_view},
        exit::Failure,
        interrupt::Interrupt,
        session::Session,
        ui::{Ui, one_line},
    },
    connect::Client,
    debug::Recorder,
};

/// `hotcell crashes replay`.
#[derive(Args, Clone, Debug)]
pub struct CrashReplayFlags {
    /// The report's id, as `hotcell crashes list` shows it, for example w0.3
    pub id: String,
    /// On the device of this worker [default: one that has the model]
    #[arg(short, long, value_name = "NAME")]
    pub worker: Option<String>,
    /// Before a request is run, print the command that attaches a debugger to its process, and wait until one is, ten
    /// minutes at most; meanwhile, and while it stands still in there, nobody takes it for one that hangs
    #[arg(long)]
    pub gdb: bool,
    /// Take turns on the host's processors with those who serve there, instead of running on what time they leave
    #[arg(long)]
    pub hurry: bool,
    /// Tell where a value of the model's nodes is nan, inf, zero, above=X or rms=A,B; may be given several times. Looking at
    /// values is work between those of the model's steps: a request may die in another one of them then
    #[arg(long = "guard", value_name = "CONDITION", value_parser = condition)]
    pub guards: Vec<When>,
    /// With --guard, tell the numbers of rows that follow from one token alone as well
    #[arg(long, requires = "guards")]
    pub reveal: bool,
}

/// How long it waits for a debugger, milliseconds.
const HOLD: u32 = 600_000;

/// The command that attaches a debugger to a process on the scheduler's host, and lets that go on.
fn attach(held: &CaptureHeld) -> String {
    format!("gdb -p {} -ex continue", held.pid)
}

/// Where a process is, or was: what its black box says, and the model's node that this is, if that is known.
#[derive(Clone, Copy)]
struct Place<'a> {
    seen: &'a BlackBox,
    node: Option<&'a CapturedNode>,
}

impl Place<'_> {
    /// By its plan's step, and by the model's node; nothing where it is at no step.
    fn text(self) -> String {
        let Self { seen, node } = self;
        if seen.op.is_empty() {
            return String::new();
        }
        let name = node.map_or_else(String::new, |node| format!(", {}", node.name));
        format!(" at step {} of a plan, {}{name}", seen.node, seen.op)
    }

    /// The same for a program to read; nothing where it is at no step.
    fn view(self, request_id: &str) -> Option<Value> {
        let Self { seen, node } = self;
        (!seen.op.is_empty()).then(|| {
            json!({
                "request_id": request_id,
                "steps": seen.steps,
                "part": seen.part,
                "step": seen.node,
                "op": seen.op,
                "group": seen.group,
                "node": node.map(|node| &node.name),
                "layer": node.and_then(|node| node.layer),
                "weight": node.map(|node| &node.weight),
            })
        })
    }
}

/// What came of running a request again.
enum Outcome {
    /// It came to its end, or failed, after so many tokens.
    Lived { tokens: u64, failed: String },
    /// Its worker died, at this node of the model, if that is known.
    Died(Box<CrashReport>, Option<CapturedNode>),
    /// It could not be run.
    Not(Error),
}

/// Whether two workers died of the same, by the same signal, at the same op as far as both reports name one. One of several
/// threads may be at a step already while the black box still names the one before it. A device that computes by itself, as
/// CUDA's do, was at that step or past it, and of a plan that its host may have given it others after.
fn is_same(crash: &CrashReport, again: &CrashReport) -> bool {
    fn signal(crash: &CrashReport) -> &str {
        let seen = crash.blackbox.as_ref();
        let signal = seen.and_then(|seen| seen.signal.as_ref());
        signal.map_or("", |signal| &signal.name)
    }
    fn is_behind(device: &str) -> bool {
        device.starts_with("cuda:")
    }
    // What was noted is the last step at which the device noted any.
    fn is_from(noted: u32, step: u32) -> bool {
        step.checked_sub(noted)
            .is_some_and(|further| further < STEPS_PER_CRUMB)
    }
    // A step's plans in their order, whoever looks at them.
    fn comes_before(part: &str, other: &str) -> bool {
        let place = |part: &str| match PlanPart::from_name(part)? {
            PlanPart::Body | PlanPart::Looked => Some(0),
            PlanPart::Logits | PlanPart::LookedLogits => Some(1),
            PlanPart::Draws | PlanPart::States => Some(2),
        };
        place(part)
            .zip(place(other))
            .is_some_and(|(part, other)| part <= other)
    }
    fn place(crash: &CrashReport) -> Option<&BlackBox> {
        crash.blackbox.as_ref().filter(|seen| !seen.op.is_empty())
    }
    let same_place = match (place(crash), place(again)) {
        (Some(one), Some(other)) => {
            let same_part = one.part == other.part && !one.part.is_empty();
            match is_behind(&crash.device) && is_behind(&again.device) {
                true if same_part => is_from(one.node, other.node),
                true => comes_before(&other.part, &one.part),
                false => one.op == other.op || same_part && one.node.abs_diff(other.node) <= 1,
            }
        }
        _ => true,
    };
    crash.kind == again.kind && signal(crash) == signal(again) && same_place
}

/// What happens while a request is run again.
enum News<'a> {
    /// A process waits for a debugger.
    Held(&'a CaptureHeld),
    /// It is there now.
    At(Place<'a>),
    /// A condition held.
    Hit(&'a GuardHit),
}

/// Runs a request again, and tells what happens meanwhile. Without watchpoints if none are asked for: they are steps of the
/// plan, too, and the request could die in another one than it did.
///
/// # Errors
/// What cannot be shown; then it need not run on.
async fn run_again(
    client: &Client,
    id: &str,
    flags: &CrashReplayFlags,
    mut show: impl FnMut(News<'_>) -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    let request = ReplayRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        hold_ms: if flags.gdb { HOLD } else { 0 },
        hurry: flags.hurry,
        conditions: flags.guards.iter().map(When::wire).collect(),
        which: Some(Which::RequestId(id.to_owned())),
        follow: true,
        options: Some(CaptureOptions {
            only_logits: true,
            reveal: flags.reveal,
            ..CaptureOptions::default()
        }),
        ..ReplayRequest::default()
    };
    let mut recorder = Recorder::default();
    let mut shown = Ok(());
    let run = async {
        let mut told = client.replay(request).await?;
        let mut tokens = 0;
        while let (Ok(()), Some(message)) = (&shown, told.next().await) {
            let waited = recorder.held().is_some();
            let message = message?;
            let is_place = matches!(message.kind, Some(captured::Kind::Seen(_)));
            if let Some(captured::Kind::Hit(hit)) = &message.kind {
                // There it goes by a name of its own.
                shown = show(News::Hit(&GuardHit {
                    request_id: id.to_owned(),
                    ..hit.clone()
                }));
            }
            tokens += u64::from(recorder.push(message)?.is_some());
            if let Some(held) = recorder.held().filter(|_| !waited) {
                shown = show(News::Held(held));
            }
            if let Some(seen) = recorder.seen().filter(|_| is_place) {
                let node = recorder.node_of(seen);
                shown = show(News::At(Place { seen, node }));
            }
        }
        if shown.is_err() {
            return Ok((tokens, String::new()));
        }
        let end = recorder.end().ok_or_else(|| {
            let what = "what was told broke off before its end; ask again";
            Error::new(Reason::Internal, what)
        })?;
        Ok::<_, Error>((tokens, end.failed.clone()))
    };
    let run = run.await;
    shown?;
    let error = match run {
        Ok((tokens, failed)) => return Ok(Outcome::Lived { tokens, failed }),
        Err(error) => error,
    };
    let its = error.get("worker").zip(error.get("epoch"));
    if let (Reason::WorkerLost, Some((worker, epoch))) = (error.reason(), its)
        && let Ok(crash) = client.crash(&format!("{worker}.{epoch}")).await
    {
        let seen = crash.blackbox.as_ref();
        let node = seen.and_then(|seen| recorder.node_of(seen)).cloned();
        return Ok(Outcome::Died(Box::new(crash), node));
    }
    Ok(Outcome::Not(error))
}

fn line(id: &str, crash: &CrashReport, outcome: &Outcome) -> String {
    let text = match outcome {
        Outcome::Died(again, node) => {
            let verdict = match is_same(crash, again) {
                true => "died the same way",
                false => "died in another way",
            };
            let node = node.as_ref();
            let place = again.blackbox.as_ref().map(|seen| Place { seen, node });
            let at = place.map_or_else(String::new, Place::text);
            format!("{verdict}: {}{at}, report {}", again.reason, again.id)
        }
        Outcome::Lived { tokens, failed } if failed.is_empty() => {
            format!("lived, for all of its {tokens} tokens")
        }
        Outcome::Lived { tokens, failed } => {
            format!("lived, and failed after {tokens} tokens: {failed}")
        }
        Outcome::Not(error) => format!("could not be run again: {}", error.message()),
    };
    format!("{}\n", one_line(&format!("request {id}: {text}")))
}

fn view(id: &str, crash: &CrashReport, outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Died(again, node) => json!({
            "request_id": id,
            "outcome": "died",
            "same": is_same(crash, again),
            "node": node.as_ref().map(|node| &node.name),
            "crash": again,
        }),
        Outcome::Lived { tokens, failed } => json!({
            "request_id": id,
            "outcome": "lived",
            "tokens": tokens,
            "failed": failed,
        }),
        Outcome::Not(error) => json!({
            "request_id": id,
            "outcome": "not_run",
            "reason": error.reason().name(),
            "message": error.message(),
        }),
    }
}

/// The requests that ran when a worker died.
///
/// # Errors
/// [`Reason::RequestNotFound`] if none did.
pub(in crate::cli) fn ran(crash: &CrashReport) -> Result<Vec<String>, Error> {
    let running = crash.blackbox.iter().flat_map(|seen| &seen.running);
    let mut ids: Vec<String> = running.map(|request| request.request_id.clone()).collect();
    if ids.is_empty() {
        let all = crash.requests.iter();
        ids = all.map(|request| request.request_id.clone()).collect();
    }
    if ids.is_empty() {
        let what = format!(
            "no request ran when {} died; there is nothing to run again",
            crash.worker
        );
        return Err(Error::new(Reason::RequestNotFound, what));
    }
    Ok(ids)
}

pub(super) async fn replay(
    ui: &mut Ui,
    session: &Session,
    flags: &CrashReplayFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let crash = session.client.crash(&flags.id).await?;
    let ids = ran(&crash)?;
    for id in &ids {
        let mut before = None;
        let json = ui.manner.json;
        let bar = ui.progress(&format!("request {}", one_line(id)));
        let show = |news: News<'_>| {
            match news {
                News::Held(held) if json => {
                    ui.print_json(&json!({
                        "request_id": id,
                        "worker": held.worker,
                        "pid": held.pid,
                        "attach": attach(held),
                    }))?;
                }
                News::Held(held) => {
                    let command = attach(held);
                    let text = format!("on the scheduler's host, as its user or root: {command}");
                    ui.print(&format!("{}\n", one_line(&text)))?;
                }
                News::Hit(hit) => {
                    let guard = flags.guards.get(hit.condition as usize);
                    let name = guard.map_or("?", |guard| &guard.1);
                    match json {
                        true => ui.print_json(&hit_view(hit, name))?,
                        false => ui.print(&hit_line(hit, name))?,
                    }
                }
                // It may be seen there again, with more memory or tokens.
                News::At(place) if json => {
                    if let Some(now) = place.view(id).filter(|now| before.as_ref() != Some(now)) {
                        ui.print_json(&now)?;
                        before = Some(now);
                    }
                }
                // A line that changes, where somebody sits before it.
                News::At(place) => {
                    let text = format!("step {} of its batch{}", place.seen.steps, place.text());
                    bar.set_message(one_line(&text));
                }
            }
            Ok(())
        };
        let outcome = tokio::select! {
            outcome = run_again(&session.client, id, flags, show) => outcome?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        bar.finish_and_clear();
        match ui.manner.json {
            true => ui.print_json(&view(id, &crash, &outcome))?,
            false => ui.print(&line(id, &crash, &outcome))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::SignalSite;

    use super::*;

    fn crash(op: &str, signal: &str) -> CrashReport {
        CrashReport {
            id: "w0.replay1.1".into(),
            kind: "signal".into(),
            reason: format!("killed by {signal}"),
            blackbox: Some(BlackBox {
                op: op.into(),
                node: 4,
                signal: Some(SignalSite {
                    name: signal.into(),
                    ..SignalSite::default()
                }),
                ..BlackBox::default()
            }),
            ..CrashReport::default()
        }
    }

    #[test]
    fn a_death_is_the_same_if_its_signal_and_op_are() {
        let one = crash("mul_mat", "SIGSEGV");
        let died = |again| line("r", &one, &Outcome::Died(Box::new(again), None));
        let text = died(crash("mul_mat", "SIGSEGV"));
        assert!(
            text.contains("died the same way: killed by SIGSEGV at step 4 of a plan, mul_mat"),
            "{text}"
        );
        assert!(died(crash("", "SIGSEGV")).contains("the same way"));
        assert!(died(crash("add", "SIGSEGV")).contains("another way"));
        assert!(died(crash("mul_mat", "SIGABRT")).contains("another way"));
        let at = |op, part: &str, step| {
            let mut crash = crash(op, "SIGSEGV");
            if let Some(seen) = &mut crash.blackbox {
                (seen.part, seen.node) = (part.into(), step);
            }
            crash
        };
        let one = at("mul_mat", "body", 7);
        assert!(is_same(&one, &at("swiglu", "body", 6)));
        assert!(!is_same(&one, &at("swiglu", "body", 5)));
        assert!(!is_same(&one, &at("swiglu", "looked", 6)));
        // Of a device that is behind: it was at that step or past it, maybe of a plan that it had been given after.
        let on_cuda = |op, part: &str, step| CrashReport {
            device: "cuda:0".into(),
            ..at(op, part, step)
        };
        let behind = on_cuda("softmax", "logits", 16);
        assert!(is_same(&behind, &on_cuda("add", "logits", 21)));
        assert!(is_same(&behind, &on_cuda("add", "body", 40)));
        assert!(is_same(&behind, &on_cuda("add", "logits", 31)));
        assert!(!is_same(&behind, &on_cuda("add", "logits", 32)));
        assert!(!is_same(&behind, &on_cuda("add", "logits", 12)));
        assert!(!is_same(&behind, &on_cuda("add", "draws", 1)));
        // Other devices have other steps.
        assert!(!is_same(&behind, &at("add", "logits", 21)));
        let node = CapturedNode {
            name: "layers.1.q".into(),
            layer: Some(1),
            ..CapturedNode::default()
        };
        let named = crash("mul_mat", "SIGSEGV");
        let named = Outcome::Died(Box::new(named), Some(node));
        let text = line("r", &one, &named);
        assert!(
            text.contains("at step 4 of a plan, mul_mat, layers.1.q, report"),
            "{text}"
        );
    }
    #[test]
    fn a_place_is_told_where_there_is_one() {
        let node = CapturedNode {
            name: "layers.1.mul_mat.0".into(),
            layer: Some(1),
            ..CapturedNode::default()
        };
        let seen = crash("mul_mat", "SIGSEGV").blackbox.unwrap();
        let place = Place {
            seen: &seen,
            node: Some(&node),
        };
        assert_eq!(
            place.text(),
            " at step 4 of a plan, mul_mat, layers.1.mul_mat.0"
        );
        let view = place.view("r").unwrap();
        assert_eq!((&view["step"], &view["layer"]), (&4.into(), &1.into()));
        assert_eq!(view["node"], "layers.1.mul_mat.0");
        let unnamed = Place {
            node: None,
            ..place
        };
        let view = unnamed.view("r").unwrap();
        assert!(view["op"] == "mul_mat" && view["node"].is_null());
        let idle = BlackBox::default();
        let nowhere = Place {
            seen: &idle,
            node: None,
        };
        assert!(nowhere.text().is_empty() && nowhere.view("r").is_none());
    }
}
