//! `hotcell debug reduce`: of a capture that fails somewhere, the smallest graph that still does, and running that again.

mod lab;
mod rerun;

use std::{collections::HashMap, path::PathBuf};

use clap::Args;
use hotcell_graph::{Graph, Value, wire};
use hotcell_proto::v1::{self, CaptureOptions, CapturedNode};
use prost::Message;
use serde_json::json;

use self::lab::{Lab, Trial, tokens_of};
use super::{
    compare::{Again, invalid},
    guard::range,
    sides::SideFlags,
    told::named,
};
use crate::{
    cli::{
        GlobalFlags,
        exit::Failure,
        interrupt::Interrupt,
        ui::{DIM, Ui, one_line},
    },
    debug::{Fault, Origin, Recorded, Recording, Reduced, bisect, liken, reduce::reduce as search},
    local::Bundled,
};

pub use rerun::RerunFlags;
pub(super) use rerun::rerun;

/// `hotcell debug reduce`.
#[derive(Args, Clone, Debug)]
pub struct ReduceFlags {
    /// A file that `hotcell debug capture --reveal` wrote
    pub capture: PathBuf,
    /// Where to write what is left of it
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Where it fails, and as the second of a kind where it does not.
    #[command(flatten)]
    pub sides: SideFlags,
    /// How it fails.
    #[command(flatten)]
    pub fault: FaultFlags,
    /// The node that fails, as `hotcell debug compare` names it [default: the first that does]
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
    /// The token at which it does [default: the first at which it does]
    #[arg(long, value_name = "TOKEN")]
    pub at: Option<u64>,
    /// Allow so many times what an op may be off
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub times: f64,
    /// Print it as a Rust test, too
    #[arg(long)]
    pub test: bool,
}

/// How something fails, unless it is that two sides differ.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "How it fails [default: two sides differ]")]
pub struct FaultFlags {
    /// A value is NaN
    #[arg(long, group = "fault")]
    pub nan: bool,
    /// A value is infinite
    #[arg(long, group = "fault")]
    pub inf: bool,
    /// An absolute value is above this
    #[arg(long, group = "fault", value_name = "X")]
    pub above: Option<f64>,
    /// The root of the values' mean square is outside of A to B
    #[arg(long, group = "fault", value_name = "A,B", value_parser = range)]
    pub rms_outside: Option<(f32, f32)>,
    /// All values are zero
    #[arg(long, group = "fault")]
    pub zero: bool,
    /// The worker dies; takes --node, a capture with --values all, and a scheduler of its own (--program)
    #[arg(long, group = "fault", requires = "node")]
    pub dies: bool,
}

impl FaultFlags {
    fn fault(&self) -> Option<Fault> {
        let (least, most) = self.rms_outside.unwrap_or_default();
        let (least, most) = (f64::from(least), f64::from(most));
        let above = self.above.map(|value| Fault::Above { value });
        let outside = self.rms_outside.is_some();
        let all = [
            self.nan.then_some(Fault::Nan),
            self.inf.then_some(Fault::Infinite),
            above,
            outside.then_some(Fault::RmsOutside { least, most }),
            self.zero.then_some(Fault::Zero),
            self.dies.then_some(Fault::Dies),
        ];
        all.into_iter().flatten().next()
    }
}

/// What is looked into: a node at a token, and what the values before it were.
struct Struck {
    recording: Recording,
    token: u64,
    /// Its number in the recording.
    node: usize,
    fault: Fault,
}

impl Struck {
    fn node(&self) -> Result<&CapturedNode, Failure> {
        let node = self.recording.head.nodes.get(self.node);
        node.ok_or_else(|| invalid("the capture lacks the node"))
    }

    fn row(&self) -> Result<&Recorded, Failure> {
        let mut tokens = self.recording.tokens.iter();
        let found = tokens.find(|token| token.index == self.token);
        found.ok_or_else(|| invalid(format!("nothing tells what token {} was", self.token)))
    }
}

/// The number of the node of this name.
fn number_of(recording: &Recording, name: &str) -> Result<usize, Failure> {
    let mut nodes = recording.head.nodes.iter();
    let found = nodes.position(|node| node.name == name);
    found.ok_or_else(|| {
        let what =
            format!("no node is named {name}; `hotcell debug replay --show` tells their names");
        invalid(what)
    })
}

/// Whether what is told of a row says that it has a fault.
fn is_told(fault: Fault, row: &v1::NodeValues) -> bool {
    match fault {
        Fault::Nan => row.nan > 0,
        Fault::Infinite => row.infinite > 0,
        Fault::Above { value } => row.infinite > 0 || row.greatest.max(-row.least) > value,
        Fault::RmsOutside { least, most } => {
            row.nan > 0 || row.infinite > 0 || !(least..=most).contains(&row.rms)
        }
        Fault::Zero => row.zero > 0 && row.nan + row.infinite == 0 && row.rms == 0.0,
        Fault::Differs { .. } | Fault::Dies => false,
    }
}

/// Which node is the first that has a fault at a token, as statistics tell.
async fn strikes(
    again: &mut Again<'_>,
    (fault, name): (Fault, Option<&str>),
    at: u64,
    interrupt: &mut Interrupt,
) -> Result<Option<usize>, Failure> {
    let look = CaptureOptions {
        values: 0,
        tokens: 1,
        ..again.options.clone()
    };
    let [told, _] = again.from(at, &look, interrupt).await?;
    let named = match name {
        Some(name) => Some(number_of(&told, name)?),
        None => None,
    };
    let rows = told
        .tokens
        .first()
        .map(|token| token.nodes.iter().enumerate());
    let mut rows = rows
        .into_iter()
        .flatten()
        .filter(|(number, row)| named.is_none_or(|named| named == *number) && is_told(fault, row));
    Ok(rows.next().map(|(number, _)| number))
}

/// Where two sides first differ, or one first has the fault.
async fn struck(
    again: &mut Again<'_>,
    flags: &ReduceFlags,
    capture: &Recording,
    range: (u64, u64),
    interrupt: &mut Interrupt,
) -> Result<Struck, Failure> {
    let one = |options: &CaptureOptions| CaptureOptions {
        tokens: 1,
        ..options.clone()
    };
    let Some(fault) = flags.fault.fault() else {
        let recordings = match flags.at {
            Some(at) => again.from(at, &one(&again.options), interrupt).await?,
            None => again.compared(true, range, interrupt).await?.0,
        };
        let [ours, reference] = recordings;
        let likeness = liken(&ours, &reference, flags.times);
        let (token, node, nmse) = match (&flags.node, likeness.first_beyond()) {
            (None, Some((token, found))) => (
                token,
                number_of(&reference, &found.node.name)?,
                found.tolerance,
            ),
            (Some(name), _) => {
                let node = number_of(&reference, name)?;
                let mut nodes = likeness.nodes.iter();
                let found = nodes.find(|one| one.node.name == *name);
                let nmse = found.map_or(0.0, |one| one.tolerance);
                let token = reference.tokens.first().map_or(0, |token| token.index);
                (token, node, nmse)
            }
            (None, None) => {
                return Err(invalid(
                    "it does not fail: no node is beyond its bound on these sides",
                ));
            }
        };
        return Ok(Struck {
            recording: reference,
            token,
            node,
            fault: Fault::Differs { nmse },
        });
    };
    if fault == Fault::Dies {
        let name = flags.node.as_deref().unwrap_or_default();
        return Ok(Struck {
            node: number_of(capture, name)?,
            token: flags.at.unwrap_or(range.1.saturating_sub(1)),
            recording: capture.clone(),
            fault,
        });
    }
    let name = flags.node.as_deref();
    let (from, to) = match flags.at {
        Some(at) => (at, at.saturating_add(1)),
        None => range,
    };
    let found = bisect(from, to, async |at| {
        let found = strikes(again, (fault, name), at, interrupt).await?;
        Ok::<_, Failure>(found.is_some())
    });
    let mut first = match found.await?.first {
        Some(at) => strikes(again, (fault, name), at, interrupt)
            .await?
            .map(|n| (at, n)),
        None => None,
    };
    // It need not go on in those after it, and the last one has been looked at.
    for at in from..to.saturating_sub(1) {
        if first.is_none() {
            let found = strikes(again, (fault, name), at, interrupt).await?;
            first = found.map(|number| (at, number));
        }
    }
    let Some((token, node)) = first else {
        return Err(invalid(format!(
            "it does not fail: no value {}",
            fault.words()
        )));
    };
    let [recording, _] = again.from(token, &one(&again.options), interrupt).await?;
    Ok(Struck {
        recording,
        token,
        node,
        fault,
    })
}

fn check(flags: &ReduceFlags) -> Result<(), Failure> {
    let usage = |what: &str| Err(Failure::Usage(what.to_owned()));
    if !(flags.times > 0.0 && flags.times.is_finite()) {
        return usage("--times must be above 0");
    }
    match (flags.fault.fault(), flags.sides.count()) {
        (None, 2) => Ok(()),
        (None, _) => usage(
            "where does it fail, and where not? Give --backend, --worker, --program, --model-path or --kv-cache twice, or say with --nan, --inf, --above, --rms-outside, --zero or --dies how it fails on one side",
        ),
        (Some(Fault::Dies), 1) if flags.sides.is_private(0) => Ok(()),
        (Some(Fault::Dies), _) => usage(
            "a worker that is to die needs a scheduler of its own: give --program, --model-path or --kv-cache once",
        ),
        (Some(_), 0 | 1) => Ok(()),
        (Some(_), _) => {
            usage("with --nan, --inf, --above, --rms-outside and --zero there is one side")
        }
    }
}

pub(super) async fn reduce(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &ReduceFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    check(flags)?;
    let capture = Recording::read(&flags.capture)?;
    let mut sides = flags.sides.clone();
    if sides.count() == 0 {
        // Any worker of the scheduler that runs.
        sides.workers.push(String::new());
    }
    let which = (&sides, &capture);
    let (mut again, range) =
        Again::prepare(ui, global, which, (&[], &[]), (flags.times, bundled)).await?;
    let mut pressed = interrupt.clone();
    let done = tokio::select! {
        done = found(ui, global, (flags, &sides), &capture, (&mut again, range), bundled, interrupt) => done,
        () = pressed.pressed() => Err(Failure::Interrupted),
    };
    again.end().await;
    let (reduced, tries) = done?;
    reduced.write(&flags.output)?;
    told(ui, flags, &reduced, tries)
}

/// A graph of the capture's head, which may be anybody's.
fn decoded(graph: &[u8]) -> Result<Graph, Failure> {
    let unread = |e: &dyn std::fmt::Display| {
        invalid(format!(
            "a graph of the capture cannot be read, as by another version of Hotcell: {e}"
        ))
    };
    let graph = v1::Graph::decode(graph).map_err(|e| unread(&e))?;
    wire::decode(&graph).map_err(|e| unread(&e))
}

/// What is left of it, and how often something was tried.
async fn found(
    ui: &mut Ui,
    global: &GlobalFlags,
    (flags, sides): (&ReduceFlags, &SideFlags),
    capture: &Recording,
    (again, range): (&mut Again<'_>, (u64, u64)),
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(Reduced, u64), Failure> {
    let struck = struck(again, flags, capture, range, interrupt).await?;
    let node = struck.node()?.clone();
    if !ui.manner.json {
        let what = format!(
            "token {}, node {} {}; making it smaller",
            struck.token,
            named(&node),
            struck.fault.words()
        );
        ui.note(DIM, &one_line(&what));
    }
    let body = decoded(&struck.recording.head.graph)?;
    let value = |node: &CapturedNode| {
        node.place.map(|place| Value::Node {
            node: place,
            output: node.output,
        })
    };
    let numbered = struck.recording.head.nodes.iter().enumerate();
    let numbers = numbered.filter_map(|(number, node)| Some((value(node)?, number)));
    let mut numbers: HashMap<Value, usize> = numbers.collect();
    // The logits have a graph of their own, which reads the last node of the body.
    let (graph, target, hidden) = match value(&node) {
        Some(target) => (body, target, None),
        None => {
            let graph = decoded(&struck.recording.head.logits_graph)?;
            let target = graph.outputs().first().copied();
            let hidden = body.outputs().first();
            let hidden = hidden.and_then(|value| numbers.get(value)).copied();
            numbers = HashMap::new();
            (graph, target.unwrap_or(Value::Absent), hidden)
        }
    };
    let [first, second] = [again.sides.first(), again.sides.get(1)];
    let first = first.ok_or_else(|| invalid("there is no side to compute it on"))?;
    let trial = match (struck.fault, second) {
        (Fault::Dies, _) => Trial::Thrown {
            ui,
            global,
            sides,
            bundled,
        },
        (_, Some(second)) => Trial::Both(first.tensors().await?, second.tensors().await?),
        (_, None) => Trial::One(first.tensors().await?),
    };
    let labels = [first, second.unwrap_or(first)].map(|side| side.label.clone());
    let weights = second.unwrap_or(first).tensors().await?;
    let mut lab = Lab {
        graph: &graph,
        struck: &struck,
        numbers,
        hidden,
        tokens: tokens_of(&again.request),
        weights,
        again,
        interrupt,
        trial,
        tries: 0,
    };
    let case = search((&graph, 1), target, &mut lab)
        .await?
        .ok_or_else(|| {
            invalid(format!(
                "{} does not fail by itself, nor with as many nodes before it as can be had",
                node.name
            ))
        })?;
    let expected = lab
        .trial
        .outcome(&case)
        .await?
        .and_then(|(_, expected)| expected);
    let [failed_on, reference] = labels;
    let reduced = Reduced {
        case,
        fault: struck.fault,
        origin: Origin {
            model: struck.recording.head.model.clone(),
            node: node.name,
            weight: node.weight,
            token: struck.token,
            failed_on,
            expected_from: expected.as_ref().map_or_else(String::new, |_| reference),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        },
        expected,
    };
    Ok((reduced, lab.tries))
}

fn view(reduced: &Reduced) -> serde_json::Value {
    let inputs = reduced.case.tensors();
    let inputs = inputs.map(|(input, value)| {
        json!({
            "name": input.name,
            "dtype": value.spec().dtype.name(),
            "shape": value.shape(),
            "constant": input.constant,
        })
    });
    json!({
        "ops": reduced.case.graph.nodes().iter().map(|node| node.op.name).collect::<Vec<_>>(),
        "inputs": inputs.collect::<Vec<_>>(),
        "fault": reduced.fault,
        "origin": reduced.origin,
    })
}

fn told(ui: &mut Ui, flags: &ReduceFlags, reduced: &Reduced, tries: u64) -> Result<(), Failure> {
    let path = flags.output.display().to_string();
    if ui.manner.json {
        let mut view = view(reduced);
        view["file"] = json!(path);
        view["tries"] = json!(tries);
        if flags.test {
            view["test"] = json!(reduced.test()?);
        }
        return ui.print_json(&view);
    }
    let text = format!(
        "{path}: {}, which {}, after {tries} tries",
        reduced.words(),
        reduced.fault.words()
    );
    ui.print(&format!("{}\n", one_line(&text)))?;
    match flags.test {
        true => ui.print_text(&reduced.test()?),
        false => Ok(()),
    }
}
