//! Looking at what a model's nodes compute: a second plan of its body, which hands out some of them too, and one of its head
//! if somebody wants to know of nodes there.
//!
//! They are the same graphs with further outputs, so that every device can do it, and what the other nodes compute has the
//! same bits: a plan's results do not depend on what else is asked for. They are made when somebody asks, and dropped
//! after.
//!
//! Of a model that several processes compute, all of them have such a plan. Those who have parts of each node give each other
//! these, as parts of anything else; what those with other layers saw of them is asked for after the step.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
    time::Instant,
};

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, TensorSpec, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    plan::{Plan, PlanHints, Slot},
};
use hotcell_proto::{limits, plan_part::PlanPart};

use super::{
    Order, Part, Runner,
    others::Seen,
    whole::{Place, gathered},
};
use crate::model::points::{Graphs, Point, Step, steps};

/// Rows of a step that there must be room for.
const LEAST_ROWS: usize = 8;

/// What is wanted of the nodes, by their numbers among the points.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those whose values are read. Of the body's.
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

/// Bytes of a [`RowSize`] that one process tells another, and of values at a time, about.
const ROW_SIZE: usize = 8;
const ANSWER: usize = 4 << 20;

impl RowSize {
    fn put(self) -> [u8; ROW_SIZE] {
        let (peak, mean_square) = (self.peak.to_le_bytes(), self.mean_square.to_le_bytes());
        let mut bytes = [0; ROW_SIZE];
        bytes[..4].copy_from_slice(&peak);
        bytes[4..].copy_from_slice(&mean_square);
        bytes
    }

    fn take(bytes: &[u8; ROW_SIZE]) -> Self {
        let &[a, b, c, d, e, f, g, h] = bytes;
        Self {
            peak: f32::from_le_bytes([a, b, c, d]),
            mean_square: f32::from_le_bytes([e, f, g, h]),
        }
    }
}

/// The plans that hand out more.
pub(super) struct Tap {
    /// What is wanted, in all processes.
    wanted: Wanted,
    pub body: Tapped,
    /// If anything is wanted of the head, and this process makes logits.
    pub head: Option<Tapped>,
    /// Rows of a step at most: those whose values there is room for.
    pub rows: usize,
    /// When it was made.
    since: Instant,
    /// Sizes of the last step's rows in layers that other processes have.
    elsewhere: HashMap<usize, Vec<RowSize>>,
}

/// A plan that hands out more.
pub(super) struct Tapped {
    pub plan: Box<dyn Plan>,
    /// What its steps compute.
    steps: Vec<Step>,
    whole: HashMap<usize, Buffer>,
    sizes: HashMap<usize, [Buffer; 2]>,
}

/// A point that is wanted, by its number, and where it is.
type Chosen<'a> = (usize, &'a Point, Place);

/// The outputs that a graph gets beside its own: the whole values, and then two numbers per row for each of the sizes.
fn with_outputs(
    graph: &Graph,
    whole: &[Chosen<'_>],
    sizes: &[Chosen<'_>],
) -> Result<Graph, GraphError> {
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
    for &(_, point, place) in whole {
        outputs.push(gathered(&mut builder, place, &point.spec)?);
    }
    for &(_, point, place) in sizes {
        let value = gathered(&mut builder, place, &point.spec)?;
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

impl Runner {
    /// What can be looked at, in the order in which it is computed: rows of the body, and those of the head that logits are
    /// made in.
    pub fn points(&self) -> &[Point] {
        self.whole.points()
    }

    /// Those of them that are in the body, which come first.
    pub fn points_of_body(&self) -> &[Point] {
        self.whole.points_of_body()
    }

    /// The graph that those are in: the model's body as one process would compute it.
    pub fn graph(&self) -> &Graph {
        &self.whole.graph
    }

    /// The graph that makes logits of its output, also as in one process.
    pub fn head_graph(&self) -> &Graph {
        &self.whole.head
    }

    /// Which of the processes that have the layers this one is.
    fn own_stage(&self) -> usize {
        self.shape.parts.stage().rank
    }

    /// Those in one of the graphs that one of the processes with the layers computes.
    fn chosen(
        &self,
        numbers: &BTreeSet<usize>,
        (which, stage): (Graphs, usize),
    ) -> Vec<Chosen<'_>> {
        let own = |number: &&usize| self.whole.graph_of(**number) == which;
        let all = numbers.iter().filter(own).filter_map(|&number| {
            let (point, place) = self.whole.point(number)?;
            (place.stage == stage).then_some((number, point, place))
        });
        all.collect()
    }

    /// When the plans that hand out more were made, if there are any.
    pub fn tapped_since(&self) -> Option<Instant> {
        self.tap.as_ref().map(|tap| tap.since)
    }

    /// What the steps of one of the plans compute; nothing, if there is no such plan.
    pub fn plan_steps(&self, part: PlanPart) -> &[Step] {
        let of = |graph: &Graph, which: Graphs, plan: &dyn Plan| {
            steps(graph, which, graph.nodes().len(), &plan.origins())
        };
        let tap = self.tap.as_ref();
        let [body, head] = &self.named;
        match part {
            PlanPart::Body => body.get_or_init(|| of(&self.graph, Graphs::Body, &*self.body)),
            PlanPart::Logits => {
                head.get_or_init(|| of(&self.head_graph, Graphs::Head, &*self.head))
            }
            PlanPart::Looked => tap.map_or(&[], |tap| &tap.body.steps),
            PlanPart::LookedLogits => {
                let tap = tap.and_then(|tap| tap.head.as_ref());
                tap.map_or(&[], |tap| &tap.steps)
            }
            // Of what comes after logits nothing has a name.
            PlanPart::States | PlanPart::Draws => &[],
        }
    }

    /// Has steps hand out what is wanted, and no more; nothing: as without anybody who looks.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when what is wanted of a few rows takes more than [`limits::MAX_TAP_BYTES`]; what the device says.
    /// All is as before then.
    pub fn tap(&mut self, device: &dyn Device, wanted: &Wanted) -> Result<(), DeviceError> {
        if wanted.is_empty() {
            self.untap();
            return Ok(());
        }
        self.prepare_tap(device, wanted)?;
        let ready = match &self.others {
            Some(others) => others.prepare_tap(wanted),
            None => Ok(()),
        };
        let take = ready.is_ok();
        self.together(&Order::Tap { take }, |own| {
            own.take_tap(take);
            Ok(())
        })?;
        ready
    }

    /// Makes this process's part of what is to be handed out, beside what is there.
    ///
    /// # Errors
    /// As for [`Runner::tap`].
    pub fn prepare_tap(&mut self, device: &dyn Device, wanted: &Wanted) -> Result<(), DeviceError> {
        self.next_tap = None;
        self.next_tap = Some(self.tap_here(device, wanted)?);
        Ok(())
    }

    /// Whether what was prepared is handed out from now on, and no more; nothing, if nothing was.
    pub(super) fn take_tap(&mut self, take: bool) {
        let next = self.next_tap.take();
        if take {
            self.tap = next;
        }
    }

    /// This process's part of it.
    fn tap_here(&self, device: &dyn Device, wanted: &Wanted) -> Result<Tap, DeviceError> {
        // Of all processes, so that all have as many rows in a step.
        let points = wanted.whole.iter();
        let points: Vec<&Point> = points.filter_map(|n| self.points().get(*n)).collect();
        let of = |rows: usize| {
            let bytes = |point: &&Point| point.spec.bytes(rows).unwrap_or(usize::MAX);
            let all = points.iter().map(bytes);
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
        let own = self.own_stage();
        let chosen = |which| {
            [&wanted.whole, &wanted.sizes].map(|numbers| self.chosen(numbers, (which, own)))
        };
        let body = self.tapped(device, Part::Body, chosen(Graphs::Body), rows)?;
        let of_head = chosen(Graphs::Head);
        let head = match of_head.iter().all(Vec::is_empty) {
            true => None,
            false => {
                let rows = self.head_graph.max_rows();
                Some(self.tapped(device, Part::Head, of_head, rows)?)
            }
        };
        Ok(Tap {
            wanted: wanted.clone(),
            body,
            head,
            rows,
            since: Instant::now(),
            elsewhere: HashMap::new(),
        })
    }

    /// One of the plans, handing out the whole values of some nodes, and of others how large they are.
    fn tapped(
        &self,
        device: &dyn Device,
        part: Part,
        [whole, sizes]: [Vec<Chosen<'_>>; 2],
        rows: usize,
    ) -> Result<Tapped, DeviceError> {
        let (which, own_graph, own_plan, inputs, output) = match part {
            Part::Head => (
                Graphs::Head,
                &self.head_graph,
                &self.head,
                &self.head_inputs,
                &self.logits,
            ),
            _ => (
                Graphs::Body,
                &self.graph,
                &self.body,
                &self.inputs,
                &self.hidden_states,
            ),
        };
        let bytes = |spec: &TensorSpec| spec.bytes(rows).unwrap_or(usize::MAX);
        let graph = with_outputs(own_graph, &whole, &sizes)?;
        // What is looked at lives until the end of the step: of large models that may be more than all the rest.
        let hints = PlanHints {
            max_bytes: Some(
                own_plan
                    .memory()
                    .arena
                    .saturating_add(limits::MAX_TAP_BYTES),
            ),
            together: self.shape.parts.columns().members > 1,
            ..PlanHints::default()
        };
        let mut plan = device.plan(&graph, &hints)?;
        for (i, buffer) in inputs.iter().enumerate() {
            plan.bind(Slot::Input(i), buffer, 0)?;
        }
        for (_, slot, buffer) in self.packed.iter().filter(|packed| packed.0 == part) {
            plan.bind_packed(*slot, Some(buffer), 0)?;
        }
        plan.bind(Slot::Output(0), output, 0)?;
        let mut next = 1;
        let mut output = |what: &str, bytes: usize| {
            let buffer = device.allocate(what, bytes)?;
            plan.bind_for(rows, Slot::Output(next), &buffer, 0)?;
            next += 1;
            Ok::<_, DeviceError>(buffer)
        };
        let mut tapped = HashMap::new();
        for (number, point, _) in whole {
            tapped.insert(number, output(&point.name, bytes(&point.spec))?);
        }
        let mut measured = HashMap::new();
        for (number, point, _) in sizes {
            let peak = output(&point.name, rows * size_of::<f32>())?;
            let mean_square = output(&point.name, rows * size_of::<f32>())?;
            measured.insert(number, [peak, mean_square]);
        }
        let own = own_graph.nodes().len();
        Ok(Tapped {
            steps: steps(&graph, which, own, &plan.origins()),
            plan,
            whole: tapped,
            sizes: measured,
        })
    }

    /// Rows of a step at most, as long as somebody looks, too.
    pub fn most_rows(&self) -> usize {
        let most = self.shape().max_rows;
        self.tap.as_ref().map_or(most, |tap| tap.rows.min(most))
    }

    /// Forgets what was wanted.
    pub fn untap(&mut self) {
        self.tapping = false;
        if self.tap.take().is_some()
            && let Some(others) = &self.others
        {
            others.order(&Order::Tap { take: true });
        }
    }

    /// Whether the next steps hand out what is wanted, as far as anything is.
    pub fn use_tap(&mut self, on: bool) {
        self.tapping = on;
    }

    /// Appends rows of a node's values in the last step, one behind the other.
    ///
    /// # Errors
    /// When they were not asked for.
    pub fn tapped_rows(
        &self,
        number: usize,
        rows: Range<usize>,
        to: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let missing = || DeviceError::Binding(format!("nobody asked for node {number}"));
        let (point, place) = self.whole.point(number).ok_or_else(missing)?;
        let bytes = point.row_bytes().ok_or_else(missing)?;
        if place.stage != self.own_stage() {
            return self.rows_elsewhere(place.stage, number, (rows, bytes), to);
        }
        let buffer = self.tap.as_ref();
        let buffer = buffer.and_then(|tap| tap.body.whole.get(&number));
        let buffer = buffer.ok_or_else(missing)?;
        let before = to.len();
        to.resize(before + bytes.saturating_mul(rows.len()), 0);
        let begun = self.copies.begin();
        let read = buffer.read(rows.start.saturating_mul(bytes), &mut to[before..]);
        self.copies.end(begun, "looked at", to.len() - before);
        read
    }

    /// The same of a node in a layer that another process has.
    fn rows_elsewhere(
        &self,
        stage: usize,
        number: usize,
        (rows, bytes): (Range<usize>, usize),
        to: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let at_once = (ANSWER / bytes.max(1)).max(1);
        for first in rows.clone().step_by(at_once) {
            let rows = first..rows.end.min(first + at_once);
            let expected = bytes.saturating_mul(rows.len());
            let seen = Seen::Rows { number, rows };
            to.extend(self.ask(stage, &seen, expected)?);
        }
        Ok(())
    }

    /// Asks the process with some other layers what it saw of them in the last step.
    fn ask(&self, stage: usize, what: &Seen, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let others = self.others.as_ref();
        let answer = others.map(|others| others.seen(stage, what)).transpose();
        let answer = self.done(answer)?.unwrap_or_default();
        match answer.len() == bytes {
            true => Ok(answer),
            false => Err(DeviceError::Binding(format!(
                "member {stage} told {} bytes of what it saw; {bytes} were asked for",
                answer.len()
            ))),
        }
    }

    /// After a step that somebody looks at: asks the processes with the other layers how large their nodes' values were.
    pub(super) fn hear_sizes(&mut self, rows: usize) -> Result<(), DeviceError> {
        let Some(tap) = self.tap.as_ref().filter(|_| self.tapping) else {
            return Ok(());
        };
        let mut elsewhere = HashMap::new();
        for stage in 1..self.shape.parts.stage().members {
            let chosen = self.chosen(&tap.wanted.sizes, (Graphs::Body, stage));
            if chosen.is_empty() {
                continue;
            }
            let bytes = chosen.len() * rows * ROW_SIZE;
            let told = self.ask(stage, &Seen::Sizes { rows }, bytes)?;
            let all = told.chunks_exact((rows * ROW_SIZE).max(1));
            for ((number, ..), sizes) in chosen.into_iter().zip(all) {
                let sizes = sizes.as_chunks::<ROW_SIZE>().0;
                elsewhere.insert(number, sizes.iter().map(RowSize::take).collect());
            }
        }
        if let Some(tap) = &mut self.tap {
            tap.elsewhere = elsewhere;
        }
        Ok(())
    }

    /// What this process, which has some layers, saw of them in the last step.
    ///
    /// # Errors
    /// When that was not asked for before the step.
    pub fn saw(&self, what: &Seen) -> Result<Vec<u8>, DeviceError> {
        match what {
            Seen::Rows { number, rows } => {
                let mut told = Vec::new();
                self.tapped_rows(*number, rows.clone(), &mut told)?;
                Ok(told)
            }
            Seen::Sizes { rows } => {
                let wanted = self.tap.as_ref().map(|tap| &tap.wanted.sizes);
                let own = wanted.map(|sizes| self.chosen(sizes, (Graphs::Body, self.own_stage())));
                let mut told = Vec::new();
                for (number, ..) in own.unwrap_or_default() {
                    let sizes = self.tapped_sizes(number, *rows)?;
                    told.extend(sizes.into_iter().flat_map(RowSize::put));
                }
                Ok(told)
            }
        }
    }

    /// How large a node's values were in each of so many rows of the last step: of the head's nodes, rows that a token is drawn
    /// from.
    ///
    /// # Errors
    /// When that was not asked for.
    pub fn tapped_sizes(&self, number: usize, rows: usize) -> Result<Vec<RowSize>, DeviceError> {
        let missing = || DeviceError::Binding(format!("nobody asked how large node {number} is"));
        let tap = self.tap.as_ref().ok_or_else(missing)?;
        if let Some(told) = tap.elsewhere.get(&number) {
            return Ok(told.clone());
        }
        let tapped = match self.whole.graph_of(number) {
            Graphs::Body => Some(&tap.body),
            Graphs::Head => tap.head.as_ref(),
        };
        let sizes = tapped.and_then(|tapped| tapped.sizes.get(&number));
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
