//! When each step of a plan ran, by the device's own clock: an event before it and one after it, and nobody waits before
//! the end.

use std::{rc::Rc, time::Instant};

use cudarc::driver::sys::CUevent;

use super::{gpu::Gpu, plan::CudaPlan};
use crate::{backend::DeviceError, plan::Timed};

/// The events of an execution.
pub(super) struct Timers {
    gpu: Rc<Gpu>,
    /// Happened when the host's clock said `begun`.
    origin: CUevent,
    begun: Instant,
    steps: Vec<StepEvents>,
}

struct StepEvents {
    /// How the trail names it.
    mark: u64,
    before: CUevent,
    /// Not recorded yet: the step is the last that was begun.
    after: Option<CUevent>,
}

impl Timers {
    /// Begins, once the device has done all that it was given.
    fn new(gpu: &Rc<Gpu>) -> Result<Self, DeviceError> {
        let mut timers = Self {
            gpu: Rc::clone(gpu),
            origin: gpu.timed_event()?,
            begun: Instant::now(),
            steps: Vec::new(),
        };
        gpu.driver.wait(timers.origin)?;
        timers.begun = Instant::now();
        Ok(timers)
    }

    /// What the device is given next is this step's.
    pub fn begin(&mut self, mark: u64) -> Result<(), DeviceError> {
        let before = self.gpu.timed_event()?;
        self.steps.push(StepEvents {
            mark,
            before,
            after: None,
        });
        Ok(())
    }

    /// The step that was begun last is given whole.
    pub fn end(&mut self) -> Result<(), DeviceError> {
        if let Some(step) = self.steps.last_mut().filter(|step| step.after.is_none()) {
            step.after = Some(self.gpu.timed_event()?);
        }
        Ok(())
    }

    /// When the steps ran that were given whole. After [`Gpu::synchronize`].
    fn read(&self) -> Result<Vec<Timed>, DeviceError> {
        let driver = self.gpu.driver;
        let given = |step: &StepEvents| Some((step.mark, step.before, step.after?));
        let times = self.steps.iter().filter_map(given).map(|step| {
            let (mark, before, after) = step;
            let since = driver.elapsed(self.origin, before)?;
            Ok(Timed {
                mark,
                begun: self.begun.checked_add(since).unwrap_or(self.begun),
                took: driver.elapsed(before, after)?,
            })
        });
        times.collect()
    }
}

impl Drop for Timers {
    fn drop(&mut self) {
        let of_step = |step: &StepEvents| [Some(step.before), step.after];
        let events = self.steps.iter().flat_map(of_step).flatten();
        for event in events.chain([self.origin]) {
            if let Err(error) = self.gpu.driver.free_event(event) {
                tracing::warn!(%error, "an event was not freed");
            }
        }
    }
}

impl CudaPlan {
    /// Runs all steps one by one, and says when each ran.
    pub(super) fn run_timed(&mut self, rows: usize) -> Result<Vec<Timed>, DeviceError> {
        self.timers = Some(Timers::new(&self.gpu)?);
        let done = self.run_from(rows, 0, &|| false);
        let timers = self.timers.take();
        done?;
        timers.map_or(Ok(Vec::new()), |timers| timers.read())
    }
}
