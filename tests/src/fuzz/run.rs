//! Runs a graph that decoding accepted, within bounds.

use std::rc::Rc;

use anyhow::Result;
use hotcell_graph::{CacheSpec, Graph, TensorSpec, dtype::Kind, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, path::CpuPath},
    plan::{Plan, PlanHints, Slot},
};

use super::{Outcome, choices::Choices};
use crate::conformance::{Check, difference};

/// Bytes a plan may allocate.
const PLAN_BYTES: usize = 64 << 20;
/// Elements of all inputs and results together: a bound on time.
const ELEMENTS: u128 = 1 << 20;
/// The same for graphs that nobody grew, whose windows and products may be as large as their tensors; and their nodes.
const FOREIGN_ELEMENTS: u128 = 1 << 14;
const FOREIGN_NODES: usize = 512;

/// Ways to run a graph, which all give the same bits: on one thread, on two, and with every op by itself.
pub struct Runner {
    ways: Vec<Way>,
}

struct Way {
    device: Rc<dyn Device>,
    fuse: bool,
}

impl Runner {
    /// Opens the devices.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new() -> Result<Self> {
        let open = |threads| -> Result<Rc<dyn Device>> {
            Ok(Rc::new(CpuDevice::with_path(threads, CpuPath::detect())?))
        };
        let (one, two) = (open(1)?, open(2)?);
        let way = |device: &Rc<dyn Device>, fuse| Way {
            device: Rc::clone(device),
            fuse,
        };
        Ok(Self {
            ways: vec![way(&one, true), way(&two, true), way(&two, false)],
        })
    }

    /// The same for whatever bytes are a graph, with operands that the bytes decide, unless it could take long.
    ///
    /// # Panics
    /// When the results differ.
    pub fn run_foreign(&self, graph: &Graph, bytes: &[u8]) -> Outcome {
        if !is_short(graph) {
            return Outcome::Refused;
        }
        // FNV-1a: the case is the bytes and nothing else.
        let seed = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        self.run(graph, &mut Choices::new(seed))
    }

    /// Plans and executes a graph with random operands in each way.
    ///
    /// # Panics
    /// When the results differ.
    pub(super) fn run(&self, graph: &Graph, choices: &mut Choices) -> Outcome {
        if elements(graph) > ELEMENTS {
            return Outcome::Refused;
        }
        let rows = match graph.max_rows() {
            0 => 0,
            most => 1 + choices.below(most),
        };
        let inputs = operands(graph, choices);
        let mut first = None;
        for way in &self.ways {
            let ended = way.run(graph, &inputs, rows);
            match &first {
                None => first = Some(ended),
                // Apart, ops may take more memory than is allowed.
                Some(_) if !way.fuse && matches!(ended, Ended::Refused(_)) => {}
                Some(before) => assert!(
                    same(graph, way.fuse, before, &ended),
                    "the outcome depends on the number of threads or on fusion (fused: {}){}: {} and {}",
                    way.fuse,
                    apart(graph, before, &ended),
                    brief(before),
                    brief(&ended)
                ),
            }
        }
        match first {
            Some(Ended::Ran(_)) => Outcome::Ran,
            Some(Ended::Failed(_)) => Outcome::Failed,
            Some(Ended::Refused(_)) | None => Outcome::Refused,
        }
    }
}

impl Way {
    fn run(&self, graph: &Graph, inputs: &[Vec<u8>], rows: usize) -> Ended {
        let device = self.device.as_ref();
        let hints = PlanHints {
            max_bytes: Some(PLAN_BYTES),
            fuse: self.fuse,
            ..PlanHints::default()
        };
        let mut plan = match device.plan(graph, &hints) {
            Ok(plan) => plan,
            Err(error) => return Ended::Refused(error.to_string()),
        };
        let (outputs, caches) = match bind(device, plan.as_mut(), graph, inputs) {
            Ok(bound) => bound,
            Err(error) => return Ended::Refused(error.to_string()),
        };
        if let Err(error) = plan.execute(rows) {
            return Ended::Failed(error.to_string());
        }
        let read = |(buffer, value): (&Buffer, &_)| {
            let used = match graph.spec(*value) {
                Ok(ValueSpec::Tensor(t)) => t.bytes(rows).unwrap_or(0),
                _ => 0,
            };
            let mut bytes = vec![0; used];
            buffer.read(0, &mut bytes).map(|()| bytes)
        };
        let kept = |(buffer, spec): &(Buffer, CacheSpec)| {
            let mut bytes = vec![0; spec.bytes().unwrap_or(0)];
            buffer.read(0, &mut bytes).map(|()| bytes)
        };
        let results = outputs.iter().zip(graph.outputs()).map(read);
        let read: std::result::Result<Vec<_>, _> = results.chain(caches.iter().map(kept)).collect();
        match read {
            Ok(bytes) => Ended::Ran(bytes),
            Err(error) => Ended::Failed(error.to_string()),
        }
    }
}

enum Ended {
    Refused(String),
    Failed(String),
    Ran(Vec<Vec<u8>>),
}

/// Errors may name any of several wrong indices. Which of its bit patterns a NaN has may depend on fusion, never on
/// threads (`exact`). What caches hold afterwards is compared like a result.
fn same(graph: &Graph, exact: bool, a: &Ended, b: &Ended) -> bool {
    let equal = |dtype, a: &[u8], b: &[u8]| difference(dtype, Check::Exact, 0.0, a, b).is_ok();
    match (a, b) {
        (Ended::Ran(a), Ended::Ran(b)) if exact => a == b,
        (Ended::Ran(a), Ended::Ran(b)) => {
            let dtype = |value: &_| match graph.spec(*value) {
                Ok(ValueSpec::Tensor(t)) => Some(t.dtype),
                _ => None,
            };
            // Of packed blocks all bits count.
            let caches = caches(graph).map(|(_, c)| Some(c.dtype).filter(|d| !d.is_block()));
            let dtypes = graph.outputs().iter().map(dtype).chain(caches);
            dtypes
                .zip(a.iter().zip(b))
                .all(|(dtype, (a, b))| match dtype {
                    Some(dtype) => equal(dtype, a, b),
                    None => a == b,
                })
        }
        (Ended::Failed(_), Ended::Failed(_)) => true,
        // Each thread has room of its own in the arena, so the sizes that are told differ.
        (Ended::Refused(a), Ended::Refused(b)) => words(a).eq(words(b)),
        _ => false,
    }
}

/// The graph's caches, and which of its inputs they are.
fn caches(graph: &Graph) -> impl Iterator<Item = (usize, CacheSpec)> {
    let inputs = graph.inputs().iter().enumerate();
    inputs.filter_map(|(i, input)| match &input.spec {
        ValueSpec::Cache(c) => Some((i, *c)),
        _ => None,
    })
}

/// What is said, without its numbers.
fn words(text: &str) -> impl Iterator<Item = char> {
    text.chars().filter(|c| !c.is_ascii_digit())
}

fn brief(ended: &Ended) -> String {
    match ended {
        Ended::Refused(why) => format!("refused ({why})"),
        Ended::Failed(why) => format!("failed ({why})"),
        Ended::Ran(outputs) => {
            let of = |bytes: &Vec<u8>| format!("{:02x?}…", &bytes[..bytes.len().min(32)]);
            format!("ran: {:?}", outputs.iter().map(of).collect::<Vec<_>>())
        }
    }
}

/// Which results differ, from which byte on, and what they are results of.
fn apart(graph: &Graph, a: &Ended, b: &Ended) -> String {
    let (Ended::Ran(a), Ended::Ran(b)) = (a, b) else {
        return String::new();
    };
    let mut said = String::new();
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
            let of = graph.outputs().get(i).map(|v| (v, graph.spec(*v)));
            said += &format!(
                ", result {i} of {} bytes from byte {at} on: {of:?}",
                a.len()
            );
        }
    }
    said
}

/// Memory of the outputs, and of the caches.
type Bound = (Vec<Buffer>, Vec<(Buffer, CacheSpec)>);

fn bind(
    device: &dyn Device,
    plan: &mut dyn Plan,
    graph: &Graph,
    inputs: &[Vec<u8>],
) -> Result<Bound> {
    let mut kept = Vec::new();
    let mut specs = caches(graph).peekable();
    for (i, bytes) in inputs.iter().enumerate() {
        let buffer = device.allocate("an input", bytes.len())?;
        buffer.write(0, bytes)?;
        plan.bind(Slot::Input(i), &buffer, 0)?;
        if let Some((_, spec)) = specs.next_if(|(at, _)| *at == i) {
            kept.push((buffer, spec));
        }
    }
    let mut outputs = Vec::new();
    for (i, &value) in graph.outputs().iter().enumerate() {
        let bytes = match graph.spec(value)? {
            ValueSpec::Tensor(t) => t.bytes(graph.max_rows()).unwrap_or(0),
            _ => 0,
        };
        let buffer = device.allocate("an output", bytes)?;
        plan.bind(Slot::Output(i), &buffer, 0)?;
        outputs.push(buffer);
    }
    Ok((outputs, kept))
}

/// Whether a graph that nobody grew is soon run.
pub(super) fn is_short(graph: &Graph) -> bool {
    elements(graph) <= FOREIGN_ELEMENTS && graph.nodes().len() <= FOREIGN_NODES
}

/// Elements of all inputs and results together, and rows.
pub(super) fn elements(graph: &Graph) -> u128 {
    let of = |t: &TensorSpec| {
        let dims = t
            .shape
            .dims()
            .iter()
            .map(|d| d.at(graph.max_rows()) as u128);
        dims.fold(1u128, |n, d| n.saturating_mul(d))
    };
    let inputs = graph.inputs().iter().map(|i| match &i.spec {
        ValueSpec::Tensor(t) => of(t),
        ValueSpec::Cache(c) => c.bytes().map_or(u128::MAX, |n| n as u128),
        ValueSpec::Absent => 0,
    });
    let results = graph.nodes().iter().flat_map(|n| &n.outputs).map(of);
    inputs
        .chain(results)
        .fold(graph.max_rows() as u128, u128::saturating_add)
}

/// Random bytes for each input of a graph, at its greatest number of rows.
pub(super) fn operands(graph: &Graph, choices: &mut Choices) -> Vec<Vec<u8>> {
    let inputs = graph.inputs().iter();
    inputs
        .map(|i| operand(&i.spec, graph.max_rows(), choices))
        .collect()
}

/// Random bytes, mostly such that indices are in range and numbers are tame.
fn operand(spec: &ValueSpec, max_rows: usize, choices: &mut Choices) -> Vec<u8> {
    let (dtype, bytes) = match spec {
        ValueSpec::Tensor(t) => (t.dtype, t.bytes(max_rows)),
        // What is read of it was written by whoever had it before, whatever that was.
        ValueSpec::Cache(c) => (c.dtype, c.bytes()),
        ValueSpec::Absent => return vec![],
    };
    let mut bytes = vec![0u8; bytes.unwrap_or(0)];
    let wild = choices.once_in(6);
    let width = dtype.block_bytes();
    for element in bytes.chunks_mut(width.max(1)) {
        let value = choices.number();
        match dtype.kind() {
            _ if wild => element.iter_mut().for_each(|b| *b = choices.number() as u8),
            Kind::Unsigned | Kind::Signed if dtype.is_integer() => {
                let small = match dtype.kind() {
                    Kind::Signed => (value % 4) as i64 - 1,
                    _ => (value % 3) as i64,
                };
                let little = small.to_le_bytes();
                element.iter_mut().zip(little).for_each(|(b, v)| *b = v);
            }
            Kind::Bool => element.iter_mut().for_each(|b| *b = (value % 2) as u8),
            Kind::Block => element.iter_mut().for_each(|b| *b = choices.number() as u8),
            _ => {
                let number = (value % 4096) as f32 / 1024.0 - 2.0;
                let little = match width {
                    // A bf16; as an f16 it is another number, as tame.
                    2 => number.to_le_bytes()[2..].to_vec(),
                    4 => number.to_le_bytes().to_vec(),
                    _ => f64::from(number).to_le_bytes().to_vec(),
                };
                element.iter_mut().zip(little).for_each(|(b, v)| *b = v);
            }
        }
    }
    bytes
}
