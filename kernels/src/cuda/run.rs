//! Running a plan: step by step at first, and then, where all of its steps are the device's, as one recording.

use std::{rc::Rc, sync::atomic::Ordering};

use cudarc::driver::sys::CUgraphExec;
use hotcell_graph::STEPS_PER_CRUMB;

use super::{
    gpu::{Fault, Gpu},
    ops::Cx,
    plan::{CudaPlan, DeviceNode, Home, Work},
};
use crate::{
    backend::DeviceError,
    bound::overlap,
    part::{HostPart, overflow},
    plan::Slot,
};

/// Executions with the same rows and bindings after which a plan is recorded.
const RECORD_AFTER: u32 = 2;

/// Recordings of a plan at most, one for a number of rows.
const MOST_RECORDINGS: usize = 16;

/// What was recorded of a plan as it is bound now.
pub(super) struct Recordings {
    gpu: Rc<Gpu>,
    /// Rows, executions so far, and the recording.
    all: Vec<(usize, u32, Option<CUgraphExec>)>,
}

impl Recordings {
    pub fn new(gpu: &Rc<Gpu>) -> Self {
        Self {
            gpu: Rc::clone(gpu),
            all: Vec::new(),
        }
    }

    /// Something was bound anew: what was recorded writes elsewhere.
    fn clear(&mut self) {
        for graph in self.all.drain(..).filter_map(|(.., graph)| graph) {
            if let Err(error) = self.gpu.driver.free_graph(graph) {
                tracing::warn!(%error, "a recording was not freed");
            }
        }
    }

    /// Notes an execution, and says whether it is to be recorded, or what it was recorded as.
    fn next(&mut self, rows: usize) -> (bool, Option<CUgraphExec>) {
        if let Some((_, count, graph)) = self.all.iter_mut().find(|(r, ..)| *r == rows) {
            *count = count.saturating_add(1);
            return (*count > RECORD_AFTER, *graph);
        }
        if self.all.len() >= MOST_RECORDINGS {
            self.clear();
        }
        self.all.push((rows, 1, None));
        (false, None)
    }

    fn put(&mut self, rows: usize, graph: CUgraphExec) {
        if let Some((.., slot)) = self.all.iter_mut().find(|(r, ..)| *r == rows) {
            *slot = Some(graph);
        }
    }
}

impl Drop for Recordings {
    fn drop(&mut self) {
        self.clear();
    }
}

impl CudaPlan {
    /// What is wrong with executing now.
    fn check(&mut self, rows: usize, from: usize) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(what));
        if let Some(at) = self.bound.iter().position(Option::is_none) {
            return match at.checked_sub(self.inputs) {
                None => fail(format!("{:?} is not bound", Slot::Input(at))),
                Some(at) => fail(format!("{:?} is not bound", Slot::Output(at))),
            };
        }
        if !self.allocated {
            return fail("the plan was made as a dry run".to_owned());
        }
        if self.rebound {
            let most = self.bound.iter().flatten().map(|b| b.rows).min();
            self.most_rows = most.unwrap_or(self.max_rows);
        }
        if rows > self.most_rows {
            return fail(format!("{rows} rows, at most {}", self.most_rows));
        }
        if from > self.steps.len() {
            return fail(format!("step {from}, there are {}", self.steps.len()));
        }
        if self.rebound {
            if let Some(slot) = overlap(self.bound.iter().flatten()) {
                return fail(format!("{slot:?}: overlaps memory that the graph writes"));
            }
            self.resolve();
            self.rebound = false;
        }
        Ok(())
    }

    /// Where everything is, now that it is bound.
    fn resolve(&mut self) {
        let arena = self.arena.as_ref().map_or(0, |arena| arena.start());
        let of_place = |at: usize| match (self.shadows.get(at), self.bound.get(at)) {
            (Some(Some(shadow)), _) => shadow.start(),
            (_, Some(Some(bound))) => bound.range.start as u64,
            _ => 0,
        };
        let addresses: Vec<u64> = self
            .homes
            .iter()
            .map(|home| match home {
                Home::Nowhere => 0,
                Home::Place(at) => of_place(*at),
                Home::Arena(offset) => arena + *offset as u64,
            })
            .collect();
        if addresses != self.addresses {
            self.addresses = addresses;
            self.recordings.clear();
        }
        // What a part read of constants may be another's now.
        for step in &mut self.steps {
            if let Work::Host(part) = &mut step.work {
                part.has_constants = false;
            }
        }
    }

    /// Runs steps until the end, a failure, or `pause` says so.
    pub(super) fn run_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.check(rows, from)?;
        if from == 0 {
            self.take(rows)?;
        }
        let done = self.steps_from(rows, from, pause);
        // Also after a failure: nothing may run on when this returns.
        let synchronized = self.gpu.synchronize();
        let fault = self.gpu.take_fault();
        let paused = done?;
        synchronized?;
        if let Some(fault) = fault {
            let mut steps = self.steps.iter().skip(fault.step).step_by(Fault::STEPS);
            let step = steps.find(|step| match &step.work {
                Work::Device(node) => node.kernel.reads_indices(),
                Work::Host(_) => false,
            });
            return Err(DeviceError::IndexOutOfRange {
                op: step.map_or("a kernel", |step| step.op),
                index: fault.index,
                bound: usize::try_from(fault.bound).unwrap_or(usize::MAX),
            });
        }
        if paused.is_none() {
            self.give(rows)?;
        }
        Ok(paused)
    }

    fn steps_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        let all_here = |plan: &Self| {
            let mut steps = plan.steps.iter();
            steps.all(|step| matches!(step.work, Work::Device(_)))
        };
        let is_followed = self
            .trail
            .is_some_and(|trail| trail.each.load(Ordering::Relaxed));
        let is_whole = !is_followed && self.timers.is_none();
        if from == 0 && !self.steps.is_empty() && is_whole && all_here(self) {
            let (again, recorded) = self.recordings.next(rows);
            let graph = match recorded {
                None if again => {
                    let gpu = Rc::clone(&self.gpu);
                    let graph = gpu.capture(|| {
                        let mut steps = 0..self.steps.len();
                        steps.try_for_each(|s| {
                            if s % STEPS_PER_CRUMB as usize == 0
                                && let Some(step) = self.steps.get(s)
                            {
                                self.gpu.leave_crumb(step.mark)?;
                            }
                            self.launch(s, rows)
                        })
                    })?;
                    self.recordings.put(rows, graph);
                    Some(graph)
                }
                recorded => recorded,
            };
            if let Some(graph) = graph {
                self.goes_on()?;
                if let (false, Some(trail), Some(step)) =
                    (self.gpu.leaves_crumbs(), &self.trail, self.steps.first())
                {
                    trail.node.store(step.mark, Ordering::Relaxed);
                }
                self.gpu.replay(graph)?;
                return Ok(None);
            }
        }
        for s in from..self.steps.len() {
            self.goes_on()?;
            if s > from && pause() {
                return Ok(Some(s));
            }
            self.note(s)?;
            let step = self.steps.get_mut(s).ok_or_else(overflow)?;
            if let Some(timers) = &mut self.timers {
                timers.begin(step.mark)?;
            }
            match &mut step.work {
                Work::Device(_) => {
                    self.launch(s, rows)?;
                    if is_followed {
                        self.gpu.synchronize()?;
                    }
                }
                Work::Host(part) => {
                    let values = Values {
                        gpu: &self.gpu,
                        addresses: &self.addresses,
                        constant: &|value| {
                            let place = self.places.get(value).filter(|_| value < self.inputs);
                            let bound = self.bound.get(value).and_then(Option::as_ref);
                            // What others may write is read each time, whatever was promised.
                            let fixed = bound.and_then(|b| b.buffer.device());
                            place.is_some_and(|p| p.constant) && fixed.is_some_and(|f| !f.writable)
                        },
                        bytes: &|value: usize, rows: usize| {
                            let place = self.places.get(value).filter(|_| value < self.inputs);
                            match (place, self.sizes.get(value)) {
                                (Some(place), _) => Some(place.bytes_at(rows)),
                                (None, Some(Some(spec))) => spec.bytes(rows),
                                _ => None,
                            }
                        },
                    };
                    values.run(part, rows)?;
                }
            }
            if let Some(timers) = &mut self.timers {
                timers.end()?;
            }
        }
        Ok(None)
    }

    /// Says that it goes on.
    ///
    /// # Errors
    /// When the execution is to stop.
    fn goes_on(&self) -> Result<(), DeviceError> {
        if let Some(trail) = &self.trail {
            trail.progressed();
        }
        match self.stop.load(Ordering::Relaxed) {
            true => Err(DeviceError::Stopped),
            false => Ok(()),
        }
    }

    /// Notes which step comes: by the device, when it comes to it, or now.
    fn note(&self, s: usize) -> Result<(), DeviceError> {
        if let (Some(trail), Some(step)) = (&self.trail, self.steps.get(s))
            && !self.gpu.leave_crumb(step.mark)?
        {
            trail.node.store(step.mark, Ordering::Relaxed);
        }
        Ok(())
    }

    fn launch(&self, s: usize, rows: usize) -> Result<(), DeviceError> {
        let Some(Work::Device(node)) = self.steps.get(s).map(|step| &step.work) else {
            return Err(overflow());
        };
        let DeviceNode {
            kernel,
            inputs,
            outputs,
            scratch,
        } = node;
        let at = |value: usize| self.addresses.get(value).copied().unwrap_or(0);
        let inputs: Vec<u64> = inputs.iter().map(|v| v.map_or(0, at)).collect();
        let outputs: Vec<u64> = outputs.iter().map(|v| at(*v)).collect();
        kernel.launch(&Cx {
            gpu: &self.gpu,
            inputs: &inputs,
            outputs: &outputs,
            scratch: scratch.map_or(0, at),
            rows,
            faults: self.gpu.fault_address(s),
        })
    }

    /// Copies what is bound and the host's to the device.
    fn take(&mut self, rows: usize) -> Result<(), DeviceError> {
        for at in 0..self.places.len() {
            let (Some(Some(shadow)), Some(Some(bound)), Some(place)) = (
                self.shadows.get(at),
                self.bound.get(at),
                self.places.get(at),
            ) else {
                continue;
            };
            if at < self.inputs {
                let mut bytes = vec![0; place.bytes_at(rows)];
                bound.buffer.read(bound.offset, &mut bytes)?;
                self.gpu.upload(shadow.start(), &bytes)?;
            }
        }
        Ok(())
    }

    /// Copies what was written to where it is wanted.
    fn give(&mut self, rows: usize) -> Result<(), DeviceError> {
        let at = |value: usize| self.addresses.get(value).copied().unwrap_or(0);
        for (i, place) in self.places.iter().enumerate() {
            let (Some(shadow), Some(Some(bound))) = (self.shadows.get(i), self.bound.get(i)) else {
                return Err(overflow());
            };
            if !place.written {
                continue;
            }
            let bytes = place.bytes_at(rows);
            // An input that is an output as well, or a value that is two outputs.
            let made = at(place.value);
            match shadow {
                Some(_) => {
                    let mut copy = vec![0; bytes];
                    self.gpu.download(&mut copy, made)?;
                    bound.buffer.write(bound.offset, &copy)?;
                }
                None if made != bound.range.start as u64 => {
                    self.gpu.copy(bound.range.start as u64, made, bytes)?;
                }
                None => {}
            }
        }
        self.gpu.synchronize()
    }
}

/// The values of an execution, for a part that the host computes.
struct Values<'a> {
    gpu: &'a Gpu,
    addresses: &'a [u64],
    constant: &'a dyn Fn(usize) -> bool,
    bytes: &'a dyn Fn(usize, usize) -> Option<usize>,
}

impl Values<'_> {
    fn at(&self, value: usize) -> Result<u64, DeviceError> {
        self.addresses.get(value).copied().ok_or_else(overflow)
    }

    fn run(&self, part: &mut HostPart, rows: usize) -> Result<(), DeviceError> {
        let mut bytes = Vec::new();
        for (i, input) in part.ins.iter().enumerate() {
            let Some(copy) = &input.copy else { continue };
            if !(part.has_constants && (self.constant)(input.value)) {
                let size = (self.bytes)(input.value, rows).ok_or_else(overflow)?;
                bytes.resize(size, 0);
                self.gpu.download(&mut bytes, self.at(input.value)?)?;
                copy.write(0, &bytes)?;
            }
            part.plan.bind(Slot::Input(i), copy, 0)?;
        }
        for (o, out) in part.outs.iter().enumerate() {
            let buffer = out.buffer.as_ref().ok_or_else(overflow)?;
            part.plan.bind(Slot::Output(o), buffer, 0)?;
        }
        let executed = part.plan.execute(rows);
        part.has_constants = true;
        let mut back = |copy: &crate::backend::Buffer, value: usize| {
            let size = (self.bytes)(value, rows).ok_or_else(overflow)?;
            bytes.resize(size, 0);
            copy.read(0, &mut bytes)?;
            self.gpu.upload(self.at(value)?, &bytes)
        };
        // Effects on caches may be partial after a failure, and are the caller's to see.
        for input in part.ins.iter().filter(|input| input.written) {
            back(input.copy.as_ref().ok_or_else(overflow)?, input.value)?;
        }
        executed?;
        for out in &part.outs {
            back(out.buffer.as_ref().ok_or_else(overflow)?, out.value)?;
        }
        Ok(())
    }
}
