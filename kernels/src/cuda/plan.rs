//! A graph in steps: kernels of the device, and parts that the CPU backend's kernels compute in copies.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_graph::{
    Graph, TensorSpec, Value,
    op::{Call, Effect, ValueSpec, number},
};

use super::{
    NAME,
    also::Also,
    buffer::{ALIGNMENT, Memory},
    gpu::Gpu,
    join::{self, call},
    ops::{self, Kernel},
    peers::Peers,
    run::Recordings,
    timed::Timers,
};
use crate::{
    backend::{Buffer, Device, DeviceError, Trail},
    bound::Bound,
    lower::{Lowered, lower},
    memory::{Lifetime, layout},
    part::{HostPart, Inputs, Numbers, is_fixed_point, overflow},
    plan::{Origin, Plan, PlanHints, PlanMemory, Slot, Timed},
};

/// A kernel and where its values are.
pub(super) struct DeviceNode {
    pub kernel: Box<dyn Kernel>,
    /// Numbers of its inputs; an absent one has none.
    pub inputs: Vec<Option<usize>>,
    pub outputs: Vec<usize>,
    /// Number of the memory that it works in.
    pub scratch: Option<usize>,
}

pub(super) enum Work {
    Device(DeviceNode),
    Host(Box<HostPart>),
}

pub(super) struct Step {
    pub work: Work,
    /// The op, of a part its last.
    pub op: &'static str,
    /// How the trail names it.
    pub mark: u64,
    /// Which of the groups of nodes it is of.
    pub at: usize,
}

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Nobody reads it.
    Nowhere,
    /// What is bound to this place.
    Place(usize),
    /// At this offset of the arena.
    Arena(usize),
}

/// An input or output of the graph.
pub(super) struct Place {
    /// Number of the value.
    pub value: usize,
    pub constant: bool,
    /// Bytes for the greatest number of rows.
    pub bytes: usize,
    pub per_row: Option<usize>,
    pub written: bool,
}

impl Place {
    /// Bytes for some rows. No overflow: never more than at the greatest number of rows, which was checked.
    pub fn bytes_at(&self, rows: usize) -> usize {
        self.per_row.map_or(self.bytes, |bytes| bytes * rows)
    }
}

/// What plans are made on.
pub(super) struct Side {
    pub gpu: Rc<Gpu>,
    /// The device of what has no kernel here.
    pub cpu: Rc<dyn Device>,
    /// Where it meets the other members of its communicator, if they reach each other's memory.
    pub peers: RefCell<Option<Rc<Peers>>>,
}

pub(super) struct CudaPlan {
    pub(super) gpu: Rc<Gpu>,
    pub(super) steps: Vec<Step>,
    pub(super) homes: Vec<Home>,
    /// Bytes of a row, or of the whole, of each value.
    pub(super) sizes: Vec<Option<TensorSpec>>,
    /// Inputs, then outputs.
    pub(super) places: Vec<Place>,
    pub(super) inputs: usize,
    pub(super) bound: Vec<Option<Bound>>,
    /// Of each place, the device's copy of what is bound to it and is the host's.
    pub(super) shadows: Vec<Option<Memory>>,
    pub(super) rebound: bool,
    indices: Vec<bool>,
    pub(super) most_rows: usize,
    pub(super) max_rows: usize,
    pub(super) arena: Option<Memory>,
    pub(super) allocated: bool,
    memory: PlanMemory,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) trail: Option<Trail>,
    pub(super) recordings: Recordings,
    /// While an execution is timed.
    pub(super) timers: Option<Timers>,
    /// Ops of the nodes that the processor computes.
    elsewhere: Vec<&'static str>,
    /// Of all steps and those of parts on the processor, which follow the part's.
    origins: Vec<Option<Origin>>,
    /// Addresses of all values, as of the last binding.
    pub(super) addresses: Vec<u64>,
}

/// What is made of a graph before there is memory.
struct Made {
    steps: Vec<Step>,
    lives: Vec<Option<Lifetime>>,
    /// Of each step's scratch memory, its number among the values.
    values: usize,
    elsewhere: Vec<&'static str>,
    origins: Vec<Option<Origin>>,
}

fn places(graph: &Graph, numbers: &Numbers) -> Result<Vec<Place>, DeviceError> {
    let written = |i: usize| {
        graph.nodes().iter().any(|node| match node.op.effect {
            Effect::Writes(at) => node.inputs.get(at) == Some(&Value::Input(i as u32)),
            _ => false,
        })
    };
    let place = |spec: &ValueSpec, value, constant, written| -> Result<Place, DeviceError> {
        let (bytes, per_row) = match spec {
            ValueSpec::Tensor(t) => (
                t.bytes(graph.max_rows()),
                t.shape.is_symbolic().then(|| t.bytes(1)).flatten(),
            ),
            ValueSpec::Cache(c) => (c.bytes(), None),
            ValueSpec::Absent => (Some(0), None),
        };
        Ok(Place {
            bytes: bytes.ok_or_else(overflow)?,
            value,
            constant,
            per_row,
            written,
        })
    };
    let mut all = Vec::new();
    for (i, input) in graph.inputs().iter().enumerate() {
        all.push(place(&input.spec, i, input.constant, written(i))?);
    }
    for &value in graph.outputs() {
        let number = numbers.of(value).ok_or_else(overflow)?;
        all.push(place(&graph.spec(value)?, number, false, true)?);
    }
    Ok(all)
}

impl CudaPlan {
    pub fn new(
        graph: &Graph,
        hints: &PlanHints,
        on: &Side,
        trail: Option<Trail>,
    ) -> Result<Self, DeviceError> {
        // What is refused must not have been allocated.
        if hints.allocate {
            let dry = PlanHints {
                allocate: false,
                max_bytes: None,
                ..*hints
            };
            let memory = Self::new(graph, &dry, on, None)?.memory;
            if hints.max_bytes.is_some_and(|most| memory.arena > most) {
                return Err(DeviceError::OutOfMemory {
                    what: "the plan's arena".to_owned(),
                    bytes: memory.arena,
                });
            }
        }
        let native = |call: &Call<'_>| ops::kernel(call, on, hints.together).is_some();
        let lowered = lower(graph, NAME, &|call| {
            native(call) || on.cpu.supports(call) && is_fixed_point(call)
        })?;
        let graph = &lowered.graph;
        let numbers = Numbers::new(graph);
        let places = places(graph, &numbers)?;
        let mut memory = PlanMemory::default();
        let is_written = |input: usize| places.get(input).is_some_and(|place| place.written);
        let views = join::views(graph, &numbers, &is_written);
        let mut made = Self::make(&lowered, (&numbers, &views), hints, on, trail, &mut memory)?;
        // A value that is an output is made where it is wanted.
        let mut homes: Vec<Home> = vec![Home::Nowhere; made.values];
        for (at, place) in places.iter().enumerate() {
            if let Some(home @ Home::Nowhere) = homes.get_mut(place.value) {
                *home = Home::Place(at);
            }
        }
        let mut lives = Vec::new();
        let mut living = Vec::new();
        for (value, life) in made.lives.iter_mut().enumerate() {
            if let (Some(life), Some(Home::Nowhere)) = (life.take(), homes.get(value)) {
                memory.unshared = memory.unshared.saturating_add(life.bytes);
                lives.push(life);
                living.push(value);
            }
        }
        let arranged = layout(&lives).ok_or_else(overflow)?;
        for (value, offset) in living.into_iter().zip(&arranged.offsets) {
            if let Some(home) = homes.get_mut(value) {
                *home = Home::Arena(*offset);
            }
        }
        for (value, whole) in views.iter().enumerate() {
            let home = whole.and_then(|whole| homes.get(whole).copied());
            if let (Some(home), Some(view)) = (home, homes.get_mut(value)) {
                *view = home;
            }
        }
        let arena = match hints.allocate {
            true => Some(Memory::new(&on.gpu, "the plan's arena", arranged.total)?),
            false => None,
        };
        let total = memory.arena.checked_add(arranged.total);
        memory.arena = total.ok_or_else(overflow)?;
        memory.unshared = memory.unshared.max(memory.arena);
        memory.steps = made.steps.len();
        let mut sizes = vec![None; made.values];
        for (n, node) in graph.nodes().iter().enumerate() {
            for (o, spec) in node.outputs.iter().enumerate() {
                if let Some(size) = sizes.get_mut(numbers.firsts[n] + o) {
                    *size = Some(spec.clone());
                }
            }
        }
        Ok(Self {
            gpu: Rc::clone(&on.gpu),
            steps: made.steps,
            addresses: vec![0; homes.len()],
            homes,
            sizes,
            inputs: graph.inputs().len(),
            indices: graph.inputs_read_as_indices(),
            bound: places.iter().map(|_| None).collect(),
            shadows: places.iter().map(|_| None).collect(),
            places,
            rebound: true,
            most_rows: 0,
            max_rows: graph.max_rows(),
            arena,
            allocated: hints.allocate,
            memory,
            stop: Arc::default(),
            trail,
            recordings: Recordings::new(&on.gpu),
            timers: None,
            elsewhere: made.elsewhere,
            origins: made.origins,
        })
    }

    /// Ops of the nodes that have no kernel of the device's, in the order of the nodes.
    pub fn elsewhere(&self) -> &[&'static str] {
        &self.elsewhere
    }

    fn make(
        lowered: &Lowered,
        (numbers, views): (&Numbers, &[Option<usize>]),
        hints: &PlanHints,
        on: &Side,
        trail: Option<Trail>,
        memory: &mut PlanMemory,
    ) -> Result<Made, DeviceError> {
        let graph = &lowered.graph;
        let max_rows = graph.max_rows();
        let mut kernels: Vec<Option<Box<dyn Kernel>>> = Vec::new();
        for node in graph.nodes() {
            let specs = graph.input_specs(node)?;
            kernels.push(ops::kernel(&call(node, &specs), on, hints.together));
        }
        let native: Vec<bool> = kernels.iter().map(Option::is_some).collect();
        let ranges = join::steps(graph, &mut kernels, hints.fuse, &|name| on.gpu.has(name))?;
        let is_view = |value: usize| views.get(value).is_some_and(Option::is_some);
        let whole = |value: usize| views.get(value).copied().flatten().unwrap_or(value);
        // The last step that reads each value, or a view of it; outputs are read after all.
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (s, range) in ranges.iter().enumerate() {
            for node in &graph.nodes()[range.clone()] {
                let read = node.inputs.iter().filter_map(|v| numbers.of(*v));
                last.extend(read.map(|value| (whole(value), s)));
            }
        }
        for &value in graph.outputs() {
            last.extend(numbers.of(value).map(|v| (v, ranges.len())));
        }
        let mut lives: Vec<Option<Lifetime>> = vec![None; numbers.count];
        let (mut steps, mut elsewhere) = (Vec::new(), Vec::new());
        let mut origins = Vec::new();
        let mut also = Also::new(on, hints.fuse, max_rows);
        for (s, range) in ranges.iter().enumerate() {
            let nodes = &graph.nodes()[range.clone()];
            // One without results has the number of the next one's.
            let has_result = nodes.first().is_some_and(|node| !node.outputs.is_empty());
            if has_result && is_view(numbers.firsts[range.start]) {
                continue;
            }
            for (n, node) in range.clone().zip(nodes) {
                for (o, spec) in node.outputs.iter().enumerate() {
                    let value = numbers.firsts[n] + o;
                    let read = last.get(&value).copied();
                    // A part's own values stay in it; a kernel writes all of its results.
                    let there = match native[range.start] {
                        true => Some(read.unwrap_or(s)),
                        false => read.filter(|last| *last > s),
                    };
                    lives[value] = match there {
                        Some(last) => Some(Lifetime {
                            bytes: padded(spec.bytes(max_rows))?,
                            first: s,
                            last,
                        }),
                        None => None,
                    };
                }
            }
            let op = nodes.last().map_or("", |n| n.op.name);
            let origin = lowered.origin(range.end.saturating_sub(1));
            let marked = |step: usize| {
                trail.map_or(0, |trail| {
                    let op = number(op).unwrap_or(u16::MAX);
                    (trail.pack)(step as u32, op, nodes.len() > 1)
                })
            };
            let work = match kernels.get_mut(range.start).and_then(Option::take) {
                Some(kernel) => {
                    let mut inputs: Vec<Option<usize>> = nodes
                        .iter()
                        .flat_map(|node| node.inputs.iter().map(|v| numbers.of(*v)))
                        .collect();
                    if let Some((wanted, of)) = kernel.wants() {
                        let of = of.iter().map(|i| inputs.get(*i).copied().flatten());
                        let of = of.map(|value| value.map(whole)).collect();
                        let mark = marked(origins.len());
                        let step = |work| Step {
                            mark,
                            work,
                            op,
                            at: s,
                        };
                        let before = steps.len();
                        inputs.push(Some(also.value(wanted, of, step, &mut steps, &mut lives)?));
                        origins.extend(steps.iter().skip(before).map(|_| origin));
                    }
                    let bytes = kernel.scratch(max_rows).ok_or_else(overflow)?;
                    let scratch = match bytes {
                        0 => None,
                        bytes => {
                            lives.push(Some(Lifetime {
                                bytes: padded(Some(bytes))?,
                                first: s,
                                last: s,
                            }));
                            Some(lives.len() - 1)
                        }
                    };
                    let outputs = range.clone().zip(nodes).flat_map(|(n, node)| {
                        (0..node.outputs.len()).map(move |o| numbers.firsts[n] + o)
                    });
                    Work::Device(DeviceNode {
                        kernel,
                        inputs,
                        outputs: outputs.collect(),
                        scratch,
                    })
                }
                None => {
                    elsewhere.extend(nodes.iter().map(|node| node.op.name));
                    let wanted = |value: usize| last.get(&value).is_some_and(|l| *l > s);
                    let range = range.clone();
                    let cpu = &*on.cpu;
                    let copied = Inputs::Copied;
                    let hints = &PlanHints {
                        // Its own comes first.
                        first_step: origins.len() + 1,
                        ..*hints
                    };
                    let part = HostPart::new(lowered, range, numbers, &wanted, cpu, copied, hints)?;
                    let all = memory.arena.checked_add(part.bytes);
                    memory.arena = all
                        .and_then(|n| n.checked_add(part.plan.memory().arena))
                        .ok_or_else(overflow)?;
                    memory.barriers += 1;
                    Work::Host(Box::new(part))
                }
            };
            let mark = marked(origins.len());
            origins.push(origin);
            if let Work::Host(part) = &work {
                origins.extend(&part.origins);
            }
            steps.push(Step {
                work,
                op,
                mark,
                at: s,
            });
        }
        Ok(Made {
            values: lives.len(),
            steps,
            lives,
            elsewhere,
            origins,
        })
    }

    fn place_of(&self, slot: Slot) -> Option<usize> {
        let at = match slot {
            Slot::Input(i) => Some(i).filter(|i| *i < self.inputs),
            Slot::Output(i) => self.inputs.checked_add(i),
        };
        at.filter(|at| *at < self.places.len())
    }
}

/// Sizes in an arena, whose places kernels may read in whole words.
pub(super) fn padded(bytes: Option<usize>) -> Result<usize, DeviceError> {
    let padded = bytes.and_then(|n| n.checked_next_multiple_of(ALIGNMENT));
    padded.ok_or_else(overflow)
}

impl Plan for CudaPlan {
    fn origins(&self) -> Vec<Option<Origin>> {
        self.origins.clone()
    }

    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}: {what}")));
        let Some(at) = self.place_of(slot) else {
            return fail("the graph has no such slot".to_owned());
        };
        let place = &self.places[at];
        let rows = rows.min(self.max_rows);
        let bytes = place.bytes_at(rows);
        let (start, len) = (buffer.device(), buffer.bytes());
        let (start, writable) = match (start, buffer.host()) {
            (Some(span), _) if span.owner == self.gpu.owner => (span.start as usize, span.writable),
            (Some(_), _) => return fail("this buffer is another device's".to_owned()),
            (None, Some(host)) => (host.start.addr(), host.writable),
            (None, None) => return fail("nobody can address this buffer".to_owned()),
        };
        let end = offset.checked_add(bytes).filter(|end| *end <= len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {len}"));
        };
        if place.written && !writable {
            return fail("the graph writes it and the buffer is read-only".to_owned());
        }
        let is_device = buffer.device().is_some();
        if is_device && bytes > 0 && !(start + offset).is_multiple_of(16) {
            return fail("must be aligned to 16 bytes".to_owned());
        }
        if is_device {
            self.shadows[at] = None;
        } else if self.shadows[at].is_none() && self.allocated {
            let shadow = Memory::new(&self.gpu, "a copy of the host's memory", place.bytes)?;
            self.shadows[at] = Some(shadow);
        }
        self.bound[at] = Some(Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows,
            written: place.written,
            slot,
        });
        self.rebound = true;
        Ok(())
    }

    fn stop_when(&mut self, flag: Arc<AtomicBool>) {
        for step in &mut self.steps {
            if let Work::Host(part) = &mut step.work {
                part.plan.stop_when(Arc::clone(&flag));
            }
        }
        self.stop = flag;
    }

    fn release(&mut self) {
        self.stop = Arc::default();
        self.bound.iter_mut().for_each(|bound| *bound = None);
        self.shadows.iter_mut().for_each(|shadow| *shadow = None);
        for step in &mut self.steps {
            if let Work::Host(part) = &mut step.work {
                part.plan.release();
            }
        }
        self.rebound = true;
    }

    fn memory(&self) -> PlanMemory {
        self.memory
    }

    /// Kernels read no memory that others change: what is the host's they read in a copy that is made once for an
    /// execution, and check indices where they use them.
    fn reads_as_index(&self, i: usize) -> Option<bool> {
        self.indices.get(i).copied()
    }

    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.run_from(rows, from, pause)
    }

    fn execute_timed(&mut self, rows: usize) -> Result<Option<Vec<Timed>>, DeviceError> {
        self.run_timed(rows).map(Some)
    }
}
