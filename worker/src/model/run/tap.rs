//! Looking at what a model's nodes compute: a second plan of its body, which hands out some of them too.
//!
//! It is the same graph with further outputs, so that every device can do it, and what the other nodes compute has the
//! same bits: a plan's results do not depend on what else is asked for. It is made when somebody asks, and dropped
//! after.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
};

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, TensorSpec, Value, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    plan::{Plan, PlanHints, Slot},
};
use hotcell_proto::limits;

use super::Runner;
use crate::model::points::{Point, Step, steps};

/// Rows of a step that there must be room for.
const LEAST_ROWS: usize = 8;

/// What is wanted of the nodes, by their numbers among the points.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those whose values are read.
    pub whole: BTreeSet<usize>,
    /// Those of whose rows the device says how large they are.
    pub sizes: BTreeSet<usize>,
}

impl Wanted {
    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.sizes.is_empty()
    }
}

/// How large the values of a row are, as the device says.
#[derive(Clone, Copy, Debug)]
pub struct RowSize {
    /// The greatest absolute value; NaN if one is NaN.
    pub peak: f32,
    /// The mean of the squares.
    pub mean_square: f32,
}

/// The plan that hands out more.
pub(super) struct Tap {
    pub plan: Box<dyn Plan>,
    /// Rows of a step at most: those whose values there is room for.
    pub rows: usize,
    /// What its steps compute.
    pub steps: Vec<Step>,
    whole: HashMap<usize, Buffer>,
    sizes: HashMap<usize, [Buffer; 2]>,
}

/// The outputs that a graph gets beside its own: the whole values, and then two numbers per row for each of the sizes.
fn with_outputs(graph: &Graph, whole: &[Value], sizes: &[Value]) -> Result<Graph, GraphError> {
    let mut builder = GraphBuilder::new(graph.max_rows());
    // In their order, so that every value keeps its number.
    for input in graph.inputs() {
        match &input.spec {
            ValueSpec::Tensor(t) if input.constant => {
                builder.constant(input.name.clone(), t.clone())?;
            }
            ValueSpec::Tensor(t) => {
                builder.tensor(input.name.clone(), t.clone())?;
            }
            ValueSpec::Cache(c) => {
                builder.cache(input.name.clone(), *c)?;
            }
            ValueSpec::Absent => {}
        }
    }
    for node in graph.nodes() {
        builder.apply(node.op, node.inputs.clone(), node.attributes.clone())?;
    }
    let mut outputs = graph.outputs().to_vec();
    outputs.extend(whole);
    for &value in sizes {
        let ValueSpec::Tensor(spec) = builder.spec(value)? else {
            continue;
        };
        let axes: Vec<i64> = (1..spec.shape.rank() as i64).collect();
        let value = match spec.dtype {
            DType::F32 => value,
            _ => builder.cast(value, DType::F32)?,
        };
        let (absolute, square) = (builder.abs(value)?, builder.square(value)?);
        if axes.is_empty() {
            outputs.extend([absolute, square]);
            continue;
        }
        outputs.push(builder.reduce_max(absolute, &axes, false)?);
        outputs.push(builder.mean(square, &axes, false)?);
    }
    builder.finish(&outputs)
}

fn chosen<'a>(points: &'a [Point], numbers: &BTreeSet<usize>) -> Vec<(usize, &'a Point)> {
    let known = numbers.iter().filter_map(|&n| Some((n, points.get(n)?)));
    known.collect()
}

impl Runner {
    /// What can be looked at, in the order in which it is computed.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The graph that they are in.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The graph that makes logits of its output.
    pub fn head_graph(&self) -> &Graph {
        &self.head_graph
    }

    /// What the steps of the plans compute: of the body's, of the one that makes logits, and of the body's that runs while
    /// somebody looks at its nodes, if anybody does.
    pub fn plan_steps(&self) -> [Vec<Step>; 3] {
        let of =
            |graph: &Graph, plan: &dyn Plan| steps(graph, graph.nodes().len(), &plan.origins());
        let looked = self.tap.as_ref().map(|tap| tap.steps.clone());
        [
            of(&self.graph, &*self.body),
            of(&self.head_graph, &*self.head),
            looked.unwrap_or_default(),
        ]
    }

    /// Has steps hand out what is wanted, and no more; nothing: as without anybody who looks.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when what is wanted of a few rows takes more than [`limits::MAX_TAP_BYTES`]; what the device says.
    /// All is as before then.
    pub fn tap(&mut self, device: &dyn Device, wanted: &Wanted) -> Result<(), DeviceError> {
        if wanted.is_empty() {
            self.tap = None;
            return Ok(());
        }
        let whole = chosen(&self.points, &wanted.whole);
        let sizes = chosen(&self.points, &wanted.sizes);
        let of = |rows: usize| {
            let bytes = |point: &Point| point.spec.bytes(rows).unwrap_or(usize::MAX);
            let all = whole.iter().map(|(_, point)| bytes(point));
            all.fold(0usize, usize::saturating_add)
        };
        let most = self.graph.max_rows();
        let fit = limits::MAX_TAP_BYTES.checked_div(of(1));
        let rows = fit.unwrap_or(most).min(most);
        let least = LEAST_ROWS.min(most);
        if rows < least {
            return Err(DeviceError::OutOfMemory {
                what: "looking at so many nodes (choose fewer by pattern or layer)".to_owned(),
                bytes: of(least),
            });
        }
        let bytes = |spec: &TensorSpec| spec.bytes(rows).unwrap_or(usize::MAX);
        let values = |chosen: &[(usize, &Point)]| -> Vec<Value> {
            chosen.iter().map(|(_, point)| point.value).collect()
        };
        let graph = with_outputs(&self.graph, &values(&whole), &values(&sizes))?;
        // What is looked at lives until the end of the step: of large models that may be more than all the rest.
        let hints = PlanHints {
            max_bytes: Some(
                self.body
                    .memory()
                    .arena
                    .saturating_add(limits::MAX_TAP_BYTES),
            ),
            together: self.shape.parts.columns().members > 1,
            ..PlanHints::default()
        };
        let mut plan = device.plan(&graph, &hints)?;
        for (i, buffer) in self.inputs.iter().enumerate() {
            plan.bind(Slot::Input(i), buffer, 0)?;
        }
        for (slot, buffer) in &self.packed {
            plan.bind_packed(*slot, Some(buffer), 0)?;
        }
        plan.bind(Slot::Output(0), &self.hidden_states, 0)?;
        let mut next = 1;
        let mut output = |what: &str, bytes: usize| {
            let buffer = device.allocate(what, bytes)?;
            plan.bind_for(rows, Slot::Output(next), &buffer, 0)?;
            next += 1;
            Ok::<_, DeviceError>(buffer)
        };
        let mut tapped = HashMap::new();
        for (number, point) in whole {
            tapped.insert(number, output(&point.name, bytes(&point.spec))?);
        }
        let mut measured = HashMap::new();
        for (number, point) in sizes {
            let peak = output(&point.name, rows * size_of::<f32>())?;
            let mean_square = output(&point.name, rows * size_of::<f32>())?;
            measured.insert(number, [peak, mean_square]);
        }
        let body = self.graph.nodes().len();
        self.tap = Some(Tap {
            rows,
            steps: steps(&graph, body, &plan.origins()),
            plan,
            whole: tapped,
            sizes: measured,
        });
        Ok(())
    }

    /// Rows of a step at most, as long as somebody looks, too.
    pub fn most_rows(&self) -> usize {
        let most = self.shape().max_rows;
        self.tap.as_ref().map_or(most, |tap| tap.rows.min(most))
    }

    /// Forgets what was wanted.
    pub fn untap(&mut self) {
        self.tap = None;
        self.tapping = false;
    }

    /// Whether the next steps hand out what is wanted, as far as anything is.
    pub fn use_tap(&mut self, on: bool) {
        self.tapping = on;
    }

    /// Rows of a node's values in the last step, one behind the other.
    ///
    /// # Errors
    /// When they were not asked for.
    pub fn tapped_rows(&self, number: usize, rows: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        let missing = || DeviceError::Binding(format!("nobody asked for node {number}"));
        let buffer = self.tap.as_ref().and_then(|tap| tap.whole.get(&number));
        let bytes = self.points.get(number).and_then(Point::row_bytes);
        let (buffer, bytes) = buffer.zip(bytes).ok_or_else(missing)?;
        let mut data = vec![0; bytes.saturating_mul(rows.len())];
        buffer.read(rows.start.saturating_mul(bytes), &mut data)?;
        Ok(data)
    }

    /// How large a node's values were in each of so many rows of the last step.
    ///
    /// # Errors
    /// When that was not asked for.
    pub fn tapped_sizes(&self, number: usize, rows: usize) -> Result<Vec<RowSize>, DeviceError> {
        let missing = || DeviceError::Binding(format!("nobody asked how large node {number} is"));
        let sizes = self.tap.as_ref().and_then(|tap| tap.sizes.get(&number));
        let [peaks, squares] = sizes.ok_or_else(missing)?;
        let read = |buffer: &Buffer| {
            let mut values = vec![0.0; rows];
            buffer.read_f32(0, &mut values).map(|()| values)
        };
        let both = read(peaks)?.into_iter().zip(read(squares)?);
        let sizes = both.map(|(peak, mean_square)| RowSize { peak, mean_square });
        Ok(sizes.collect())
    }
}
