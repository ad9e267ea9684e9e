//! A model on a device: its plans, its cache memory, and the step that computes a batch of rows.

mod caches;
mod copies;
mod draws;
mod follow;
mod others;
mod packed;
mod placed;
mod shape;
mod stages;
mod step;
mod tap;
mod whole;

use std::{
    cell::OnceCell,
    collections::{BTreeSet, VecDeque},
};

use hotcell_graph::Graph;
use hotcell_ipc::blackbox::Writer;
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError, HostRegion, Stream},
    plan::{Plan, PlanHints, Slot},
};
use hotcell_proto::plan_part::PlanPart;

use caches::Caches;
use copies::Copies;
pub use draws::Draw;
use draws::{Draws, draws_on};
use follow::Follower;
pub use follow::{EACH, GIVES_WAY, begin_anew, give_way};
pub use others::{Order, Others, Seen};
use packed::{Packable, is_whole_panels, packable_elsewhere};
use placed::Placed;
pub use placed::{Keeping, Keeps};
pub use shape::{Division, KINDS, Parts, RunShape, Sizes};
use shape::{check_cache, kind_sizes};
use stages::Stage;
use tap::Tap;
pub use tap::{RowSize, Wanted};
use whole::Whole;

use super::{
    config::Rope,
    constants::{f32_buffer, scales, vector},
    graph::{body, ending, head},
    points::Step,
    weave::{BuildError, Pattern, Source, Sourced},
};
use crate::weights::{ModelSource, Weight};

/// Says which plan is executed next.
fn tell(to: Option<Writer>, part: PlanPart) {
    if let Some(to) = to {
        to.executes(part);
    }
}

/// What a model's graphs are made of.
fn pattern<'a>(source: &'a ModelSource, shape: &'a RunShape) -> Pattern<'a> {
    Pattern {
        config: &source.config,
        names: source.names,
        weights: &source.weights,
        shape,
    }
}

/// Why a model cannot be run on a device.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It has no graphs.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The device refuses its graphs or has no memory for them.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Token id.
    pub token: u32,
    /// Its position in its sequence.
    pub position: usize,
    /// The sequence's table.
    pub sequence: usize,
    /// Where its keys and values go, by kind of layers.
    pub slots: [usize; KINDS],
}

/// A weight's bytes, in place in its file.
pub(crate) struct WeightRegion(pub(crate) Weight);

// SAFETY: a weight's mapping stays mapped at one address while any clone of it lives, and the range
// does not change. That its bytes change underneath is the mapping's documented trap.
unsafe impl HostRegion for WeightRegion {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Buffers that the host fills before each step, one 32-bit number per row.
struct RowBuffers {
    tokens: Buffer,
    positions: Buffer,
    sequences: Buffer,
    picks: Buffer,
    /// Slots and block tables, for each kind of layers.
    kinds: Vec<KindBuffers>,
}

struct KindBuffers {
    slots: Buffer,
    tables: Buffer,
}

/// The graphs of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Body,
    Head,
    Ending,
}

/// A model on a device.
pub struct Runner {
    shape: RunShape,
    vocab: usize,
    hidden: usize,
    /// How far back each kind of layers looks.
    windows: Vec<Option<usize>>,
    /// See [`Runner::kind_size`].
    kind_sizes: Vec<(usize, usize)>,
    stream: Box<dyn Stream>,
    body: Box<dyn Plan>,
    head: Box<dyn Plan>,
    ending: Box<dyn Plan>,
    /// Where the device draws tokens.
    draws: Option<Draws>,
    packable: Vec<Packable>,
    packable_elsewhere: BTreeSet<String>,
    /// Inputs that have their other form now.
    packed: Vec<(Part, Slot, Buffer)>,
    rows: RowBuffers,
    caches: Caches,
    logits: Buffer,
    states: Buffer,
    scratch: Vec<i32>,
    /// The body's graph, and what its inputs and its output are bound to.
    graph: Graph,
    inputs: Vec<Buffer>,
    hidden_states: Buffer,
    /// What the head and the ending read: the body's output, or what the last stage's gave.
    results: Buffer,
    /// The head's graph, and what its inputs are bound to.
    head_graph: Graph,
    head_inputs: Vec<Buffer>,
    /// The model as one process would compute it.
    whole: Whole,
    /// Computes the body, and the head, in steps that somebody looks at.
    tap: Option<Tap>,
    /// Another one, until it is said whether all have it.
    next_tap: Option<Tap>,
    tapping: bool,
    /// Where it says which of its plans is executed.
    tells: Option<Writer>,
    /// Notes what plans do, while somebody wants to know.
    follower: Option<Follower>,
    /// What is copied, likewise.
    copies: Copies,
    /// Steps of the body's and the head's plans by name, once somebody asked.
    named: [OnceCell<Vec<Step>>; 2],
    /// Who has to do the same.
    others: Option<Box<dyn Others>>,
    /// Its place among those who have the other layers.
    stage: Option<Stage>,
    /// Of each step that has begun and not ended, the rows whose logits it computes.
    begun: VecDeque<Vec<usize>>,
}

impl Runner {
    /// Plans a model for a device and binds its weights in place. `progressed` is called again and again meanwhile.
    ///
    /// # Errors
    /// When tensors are missing or misshapen, the device lacks something, or memory is short.
    pub fn new(
        device: &dyn Device,
        source: &ModelSource,
        shape: RunShape,
        hints: &PlanHints,
        progressed: &dyn Fn(),
    ) -> Result<Self, RunError> {
        let made = Self::keeping(device, source, shape, hints, progressed, Keeping::Nothing);
        made.map(|(runner, _)| runner)
    }

    /// The same, with its weights in memory that outlives this process, if that is wanted and the device has such memory.
    ///
    /// # Errors
    /// As for [`Runner::new`].
    pub fn keeping(
        device: &dyn Device,
        source: &ModelSource,
        shape: RunShape,
        hints: &PlanHints,
        progressed: &dyn Fn(),
        keeping: Keeping,
    ) -> Result<(Self, Keeps), RunError> {
        let ModelSource {
            config, weights, ..
        } = source;
        check_cache(config, shape.cache_dtype)?;
        let hints = &PlanHints {
            together: shape.parts.columns().members > 1,
            ..*hints
        };
        let pattern = pattern(source, &shape);
        let (body, head, ending) = (body(pattern)?, head(pattern)?, ending(pattern)?);
        let i32s = |what: &str, n: usize| device.allocate(what, n * 4);
        let rows = RowBuffers {
            tokens: i32s("token ids", shape.max_rows)?,
            positions: i32s("positions", shape.max_rows)?,
            sequences: i32s("sequences", shape.max_rows)?,
            picks: i32s("picks", shape.max_rows.max(shape.max_sequences))?,
            kinds: (0..config.kinds())
                .map(|_| {
                    let tables = shape.max_sequences * shape.blocks_per_sequence();
                    Ok(KindBuffers {
                        slots: i32s("slots", shape.max_rows)?,
                        tables: i32s("block tables", tables)?,
                    })
                })
                .collect::<Result<_, DeviceError>>()?,
        };
        let hidden = device.allocate("hidden states", shape.max_rows * config.hidden * 4)?;
        let logits = device.allocate("logits", shape.max_sequences * config.vocab * 4)?;
        let states = device.allocate("final states", shape.max_rows * config.hidden * 4)?;
        let caches = Caches::new(device, config, &shape, progressed)?;
        let stage = Stage::of(device, &shape, config.hidden)?;
        let handed = stage.as_ref().map(|stage| &stage.handed);
        let missing = || DeviceError::Binding("a layer that is not computed here".to_owned());
        let frequencies = |rope: &Rope| {
            let values = rope.inverse_frequencies(config.head_dim);
            f32_buffer(device, "frequencies", &values)
        };
        let mut packable = Vec::new();
        let (mut inputs, mut head_inputs) = (Vec::with_capacity(body.sources.len()), Vec::new());
        let mut placed = Placed::new(device, source, &[&body, &head, &ending], keeping)?;
        let mut bind = |graph: Part, sourced: &Sourced| -> Result<Box<dyn Plan>, RunError> {
            let mut plan = device.plan(&sourced.graph, hints)?;
            for (i, from) in sourced.sources.iter().enumerate() {
                progressed();
                let buffer = match from {
                    Source::Weight { .. } | Source::Stack(_) => placed.buffer(from, progressed)?,
                    Source::Vector { name, elements } => {
                        let values = vector(weights, name, elements.as_ref())?;
                        f32_buffer(device, name, &values)?
                    }
                    Source::OneAnd(name) => {
                        let mut values = vector(weights, name, None)?;
                        values.iter_mut().for_each(|value| *value += 1.0);
                        f32_buffer(device, name, &values)?
                    }
                    Source::Scales(bands) => {
                        let values = scales(weights, bands)?;
                        let name = bands.first().map_or("scales", |bands| &bands.name);
                        f32_buffer(device, name, &values)?
                    }
                    Source::Frequencies => frequencies(&config.rope)?,
                    Source::LocalFrequencies => {
                        frequencies(config.local_rope.as_ref().unwrap_or(&config.rope))?
                    }
                    Source::Cache(layer) => caches.of_layer(*layer).cloned().ok_or_else(missing)?,
                    Source::Handed => handed.cloned().ok_or_else(missing)?,
                    Source::Tokens => rows.tokens.clone(),
                    Source::Positions => rows.positions.clone(),
                    Source::Sequences => rows.sequences.clone(),
                    Source::Slots(kind) => rows.kinds[*kind].slots.clone(),
                    Source::Tables(kind) => rows.kinds[*kind].tables.clone(),
                    Source::Hidden => hidden.clone(),
                    Source::Picks => rows.picks.clone(),
                };
                let slot = Slot::Input(i);
                plan.bind(slot, &buffer, 0)?;
                match graph {
                    Part::Body => inputs.push(buffer),
                    Part::Head => head_inputs.push(buffer),
                    Part::Ending => {}
                }
                if let Source::Weight { name, rows } = from
                    && rows.as_ref().is_none_or(is_whole_panels)
                    && plan.bind_packed(slot, None, 0)?
                {
                    packable.push(Packable {
                        graph,
                        slot,
                        weight: name.clone(),
                        rows: rows.clone(),
                    });
                }
            }
            Ok(plan)
        };
        let (graph, head_graph) = (body.graph.clone(), head.graph.clone());
        let whole = Whole::of(pattern, &graph, &head_graph)?;
        let (mut body, mut head) = (bind(Part::Body, &body)?, bind(Part::Head, &head)?);
        let mut ending = bind(Part::Ending, &ending)?;
        let keeps = placed.close();
        let packable_elsewhere = match packable.as_slice() {
            [] => BTreeSet::new(),
            _ => packable_elsewhere(source, &shape)?,
        };
        let hidden_states = match &stage {
            Some(stage) if stage.leads() => stage.handed.clone(),
            _ => hidden.clone(),
        };
        body.bind(Slot::Output(0), &hidden_states, 0)?;
        head.bind(Slot::Output(0), &logits, 0)?;
        ending.bind(Slot::Output(0), &states, 0)?;
        let draws = match draws_on(device, config.vocab) {
            true => Some(Draws::new(device, &shape, config.vocab, &logits, hints)?),
            false => None,
        };
        let stream = device.stream();
        let scratch = Vec::with_capacity(shape.max_rows);
        let runner = Self {
            shape,
            vocab: config.vocab,
            hidden: config.hidden,
            windows: config.windows(),
            kind_sizes: kind_sizes(config, &shape),
            stream,
            body,
            head,
            ending,
            draws,
            packable,
            packable_elsewhere,
            packed: Vec::new(),
            rows,
            caches,
            logits,
            states,
            scratch,
            graph,
            inputs,
            hidden_states,
            results: hidden,
            head_graph,
            head_inputs,
            whole,
            tap: None,
            next_tap: None,
            tapping: false,
            tells: None,
            follower: None,
            copies: Copies::default(),
            named: Default::default(),
            others: None,
            stage,
            begun: VecDeque::new(),
        };
        Ok((runner, keeps))
    }

    /// Sizes it runs with.
    pub fn shape(&self) -> &RunShape {
        &self.shape
    }

    /// Width of a row of logits.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Width of a hidden state.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// How many positions back each kind of layers looks; none: to the beginning.
    pub fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// Bytes of the cache.
    pub fn cache_bytes(&self) -> usize {
        self.caches.bytes()
    }

    /// Bytes that its plans keep for what they compute.
    pub fn plan_bytes(&self) -> usize {
        let plans = [&self.body, &self.head, &self.ending];
        let draws = self.draws.as_ref().map(|draws| &draws.plan);
        let plans = plans.into_iter().chain(draws);
        plans.map(|plan| plan.memory().arena).sum()
    }

    /// How many of the model's layers are of a kind, and the bytes of one block in all of them, or in this process's part of each.
    pub fn kind_size(&self, kind: usize) -> (usize, usize) {
        self.kind_sizes.get(kind).copied().unwrap_or_default()
    }

    /// Says which blocks a sequence's tokens lie in for a kind of layers, from its block `first` on.
    ///
    /// # Errors
    /// When it is outside of the table.
    pub fn set_table(
        &mut self,
        kind: usize,
        sequence: usize,
        first: usize,
        blocks: &[u32],
    ) -> Result<(), DeviceError> {
        let width = self.shape.blocks_per_sequence();
        let fits = sequence < self.shape.max_sequences
            && first.saturating_add(blocks.len()) <= width
            && kind < self.rows.kinds.len();
        if !fits {
            return Err(DeviceError::Binding(format!(
                "no table {sequence} of kind {kind} with {first}+ blocks"
            )));
        }
        let order = Order::Table {
            kind,
            sequence,
            first,
            blocks,
        };
        self.together(&order, |own| {
            own.scratch.clear();
            // A block that there is not is refused by every kernel.
            let blocks = blocks.iter().map(|&b| i32::try_from(b).unwrap_or(-1));
            own.scratch.extend(blocks);
            let at = sequence * width + first;
            let of = own.rows.kinds.get(kind);
            of.map_or(Ok(()), |of| of.tables.write_i32(at, &own.scratch))
        })
    }

    /// Copies all that is in a block of a kind of layers.
    ///
    /// # Errors
    /// When there are no such blocks.
    pub fn copy_block(&mut self, kind: usize, from: u32, to: u32) -> Result<(), DeviceError> {
        let begun = self.copies.begin();
        let order = Order::Copy { kind, from, to };
        let copied = self.together(&order, |own| own.caches.copy(kind, from, to));
        self.copies
            .end(begun, "cache block", self.kind_size(kind).1);
        copied
    }

    /// Zeroes a block of a kind of layers.
    ///
    /// # Errors
    /// When there is no such block.
    pub fn wipe_block(&mut self, kind: usize, block: u32) -> Result<(), DeviceError> {
        let order = Order::Wipe { kind, block };
        self.together(&order, |own| own.caches.wipe(kind, block))
    }

    /// All that is in a block of a kind of layers: layer by layer, its keys, then its values.
    ///
    /// # Errors
    /// When there is no such block.
    pub fn read_block(&self, kind: usize, block: u32) -> Result<Vec<u8>, DeviceError> {
        self.caches.read(kind, block)
    }

    fn fill(
        scratch: &mut Vec<i32>,
        buffer: &Buffer,
        values: impl Iterator<Item = usize>,
    ) -> Result<(), DeviceError> {
        scratch.clear();
        // A value that does not fit is negative, which every kernel refuses as an index.
        scratch.extend(values.map(|v| i32::try_from(v).unwrap_or(i32::MIN)));
        buffer.write_i32(0, scratch)
    }

    /// Says in a black box which of its plans is executed. A device that only takes work in may still be at the one before.
    pub fn tell(&mut self, to: Writer) {
        self.tells = Some(to);
    }

    /// The logits of the `i`-th pick of the last step.
    ///
    /// # Errors
    /// When there was no such pick.
    pub fn logits(&self, i: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let begun = self.copies.begin();
        let read = self.logits.read_f32(i * self.vocab, into);
        self.copies.end(begun, "logits", size_of_val(into));
        read
    }

    /// Computes the final states of these rows of the last step: what the head would make logits of.
    ///
    /// # Errors
    /// When there are no such rows.
    pub fn finish_states(&mut self, rows: &[usize]) -> Result<(), DeviceError> {
        if rows.is_empty() {
            return Ok(());
        }
        let finish = |own: &mut Self| {
            Self::fill(&mut own.scratch, &own.rows.picks, rows.iter().copied())?;
            tell(own.tells, PlanPart::States);
            own.stream.execute(own.ending.as_mut(), rows.len())?;
            own.stream.synchronize()
        };
        match &self.stage {
            // Nobody else has them.
            Some(_) => finish(self),
            None => self.together(&Order::States { rows }, finish),
        }
    }

    /// The `i`-th of the states that [`Runner::finish_states`] computed.
    ///
    /// # Errors
    /// When there was no such row.
    pub fn state(&self, i: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let begun = self.copies.begin();
        let read = self.states.read_f32(i * self.hidden, into);
        self.copies.end(begun, "final states", size_of_val(into));
        read
    }
}
