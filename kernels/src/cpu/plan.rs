//! A graph as a flat array of kernels over an arena.

mod launch;
mod make;
mod schedule;
mod steps;

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize},
    },
};

use self::{
    launch::{Fault, Home, Place, Workspaces},
    schedule::Meet,
    steps::Lone,
};
pub(crate) use self::{
    launch::{Kernel, Launcher, Reg, Run},
    make::{CpuPlanner, CpuPrepared},
};
use super::{buffer::HostMemory, path::CpuPath, pool::Pool};
use crate::{
    backend::{Buffer, DeviceError, Trail},
    bound::Bound,
    memory,
    plan::{Origin, Plan, PlanMemory, Slot},
};

struct Step {
    kernel: Box<dyn Kernel>,
    /// How the trail names it.
    mark: u64,
    origin: Option<Origin>,
    meet: Meet,
}

pub(crate) struct CpuPlan {
    steps: Vec<Step>,
    places: Vec<Place>,
    inputs: Vec<Reg>,
    outputs: Vec<Reg>,
    /// Of each output: whether no step reads it.
    only_written: Vec<bool>,
    /// Of each input: whether it leads to an index.
    indices: Vec<bool>,
    pointers: Vec<*mut u8>,
    bound: Vec<Option<Bound>>,
    /// Whether bindings came since they were last compared.
    rebound: bool,
    /// Rows for which what is bound is large enough, as of then.
    most_rows: usize,
    /// Whether waking other threads would take longer than the work.
    small: bool,
    /// See [`Run::take_piece`].
    taken: Vec<AtomicUsize>,
    /// For the rows of the last execution.
    lone: Lone,
    /// Inputs and outputs without memory.
    unbound: usize,
    /// Keeps the memory that arena pointers lead to; `None` for a dry run.
    arena: Option<HostMemory>,
    workspaces: Workspaces,
    memory: PlanMemory,
    max_rows: usize,
    path: CpuPath,
    pool: Rc<RefCell<Pool>>,
    /// How many of the pool's threads it uses.
    parts: usize,
    fault: Fault,
    stop: Arc<AtomicBool>,
    trail: Option<Trail>,
}

impl CpuPlan {
    /// Gives a prepared plan its memory. Without it (`allocate`) the plan only says what it would take. When the memory
    /// cannot be had, or is more than `max_bytes`, what was prepared comes back.
    pub fn finish(
        prepared: Box<CpuPrepared>,
        allocate: bool,
        max_bytes: Option<usize>,
        pool: Rc<RefCell<Pool>>,
    ) -> Result<Self, (DeviceError, Box<CpuPrepared>)> {
        let what = "the plan's arena";
        let total = prepared.memory.arena;
        let arena = match (allocate, max_bytes) {
            (false, _) => None,
            (true, Some(most)) if total > most => {
                let what = what.to_owned();
                return Err((DeviceError::OutOfMemory { what, bytes: total }, prepared));
            }
            (true, _) => match HostMemory::new(what, total) {
                Ok(memory) => Some(memory),
                Err(error) => return Err((error, prepared)),
            },
        };
        let CpuPrepared {
            steps,
            places,
            inputs,
            outputs,
            only_written,
            indices,
            ranges,
            values,
            workspace,
            memory,
            small,
            max_rows,
            path,
            parts,
            trail,
        } = *prepared;
        let mut pointers = vec![std::ptr::null_mut(); places.len()];
        let mut workspaces = Workspaces {
            start: std::ptr::null_mut(),
            bytes: workspace,
        };
        if let Some(arena) = &arena {
            for (pointer, range) in pointers.iter_mut().zip(&ranges) {
                if let Some(range) = range {
                    // SAFETY: the layout's total covers every range.
                    *pointer = unsafe { arena.start().add(range.start) };
                }
            }
            // SAFETY: `total` is as long as the values and the workspaces together.
            workspaces.start = unsafe { arena.start().add(values) };
        }
        Ok(Self {
            bound: places.iter().map(|_| None).collect(),
            rebound: true,
            most_rows: 0,
            unbound: places.iter().filter(|p| p.home.must_be_bound()).count(),
            small,
            taken: steps.iter().map(|_| AtomicUsize::new(0)).collect(),
            lone: Lone::default(),
            steps,
            places,
            inputs,
            outputs,
            only_written,
            indices,
            pointers,
            arena,
            workspaces,
            memory,
            max_rows,
            path,
            pool,
            parts,
            fault: Fault::default(),
            stop: Arc::default(),
            trail,
        })
    }
}

impl Plan for CpuPlan {
    fn origins(&self) -> Vec<Option<Origin>> {
        self.steps.iter().map(|step| step.origin).collect()
    }

    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}: {what}")));
        let (list, i) = match slot {
            Slot::Input(i) => (&self.inputs, i),
            Slot::Output(i) => (&self.outputs, i),
        };
        let Some(&reg) = list.get(i) else {
            return fail("the graph has no such slot".to_owned());
        };
        let place = &self.places[reg.index()];
        let Some(host) = buffer.host() else {
            return fail("the CPU cannot address this buffer".to_owned());
        };
        let rows = rows.min(self.max_rows);
        // No overflow: never more than at the greatest number of rows, which was checked.
        let bytes = place.per_row.map_or(place.bytes, |bytes| bytes * rows);
        let end = offset.checked_add(bytes).filter(|end| *end <= host.len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {}", host.len));
        };
        // SAFETY: offset ≤ len of the buffer's memory, which `bound` keeps alive.
        let mut pointer = unsafe { host.start.add(offset) };
        if bytes == 0 {
            // Nothing is read there, but a slice of no numbers must be aligned too.
            pointer = std::ptr::without_provenance_mut(memory::ALIGNMENT);
        }
        if place.aligned && !pointer.addr().is_multiple_of(place.alignment) {
            return fail(format!("must be aligned to {} bytes", place.alignment));
        }
        let written = place.written || matches!(place.home, Home::Output(_));
        if written && !host.writable {
            return fail("the graph writes it and the buffer is read-only".to_owned());
        }
        let start = host.start.addr();
        self.pointers[reg.index()] = pointer;
        let bound = Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows,
            written,
            slot,
        };
        if self.bound[reg.index()].replace(bound).is_none() {
            self.unbound -= 1;
        }
        self.rebound = true;
        Ok(())
    }

    fn bind_packed(
        &mut self,
        slot: Slot,
        buffer: Option<&Buffer>,
        offset: usize,
    ) -> Result<bool, DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}, packed: {what}")));
        let Slot::Input(i) = slot else {
            return Ok(false);
        };
        let place = |place: &Place| place.home == Home::Packed(i);
        let Some(index) = self.places.iter().position(place) else {
            return Ok(false);
        };
        let Some(buffer) = buffer else {
            self.bound[index] = None;
            self.pointers[index] = std::ptr::null_mut();
            return Ok(true);
        };
        let Some(host) = buffer.host() else {
            return fail("the CPU cannot address this buffer".to_owned());
        };
        let bytes = self.places[index].bytes;
        let end = offset.checked_add(bytes).filter(|end| *end <= host.len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {}", host.len));
        };
        let start = host.start.addr();
        // SAFETY: offset ≤ len of the buffer's memory, which `bound` keeps alive.
        self.pointers[index] = unsafe { host.start.add(offset) };
        self.bound[index] = Some(Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows: self.max_rows,
            written: false,
            slot,
        });
        self.rebound = true;
        Ok(true)
    }

    fn stop_when(&mut self, flag: Arc<AtomicBool>) {
        self.stop = flag;
    }

    fn release(&mut self) {
        self.stop = Arc::default();
        self.bound.iter_mut().for_each(|bound| *bound = None);
        for (place, pointer) in self.places.iter().zip(&mut self.pointers) {
            if matches!(place.home, Home::Packed(_)) {
                *pointer = std::ptr::null_mut();
            }
        }
        self.rebound = true;
        self.unbound = self.inputs.len() + self.outputs.len();
    }

    fn memory(&self) -> PlanMemory {
        self.memory
    }

    fn is_small(&self) -> bool {
        self.small
    }

    fn only_writes(&self, i: usize) -> bool {
        self.only_written.get(i).is_some_and(|only| *only)
    }

    fn reads_as_index(&self, i: usize) -> Option<bool> {
        self.indices.get(i).copied()
    }

    fn execute(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.steps_from(rows, 0, None).map(|_| ())
    }

    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.steps_from(rows, from, Some(pause))
    }
}
