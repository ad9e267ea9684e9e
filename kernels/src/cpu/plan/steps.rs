//! Running the steps of a plan: on all threads of the pool, or on the caller's alone where that is sooner.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{
    CpuPlan, Step,
    launch::{Home, Place, Run},
    schedule::{Meet, omitted},
};
use crate::{
    backend::DeviceError,
    bound::{Bound, overlap},
};

/// A plan whose values take so few bytes together, in so few steps, is done before another thread is awake.
const SMALL_BYTES: usize = 16 << 10;
const SMALL_STEPS: usize = 64;

/// Whether an execution takes a few microseconds at most, about.
pub(super) fn is_small(places: &[Place], steps: &[Step]) -> bool {
    let bytes = places.iter().map(|p| p.bytes);
    steps.len() <= SMALL_STEPS && bytes.fold(0, usize::saturating_add) <= SMALL_BYTES
}

/// What part 0 does alone in executions of so many rows.
#[derive(Default)]
pub(super) struct Lone {
    rows: usize,
    /// Of each step: whether that is so ([`Kernel::is_alone`](super::Kernel::is_alone)).
    alone: Vec<bool>,
    /// Of each step: whether the parts need not meet before it ([`omitted`]).
    omitted: Vec<bool>,
}

impl Lone {
    fn of(steps: &[Step], rows: usize) -> Self {
        let alone = steps.iter().map(|step| step.kernel.is_alone(rows));
        let alone: Vec<bool> = alone.collect();
        let meets = steps.iter().map(|step| step.meet);
        Self {
            rows,
            omitted: omitted(meets.zip(alone.iter().copied())),
            alone,
        }
    }
}

impl CpuPlan {
    /// What is wrong with executing now.
    fn check(&mut self, rows: usize, from: usize) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(what));
        if self.unbound != 0 {
            let open = |(p, b): &(&Place, &Option<Bound>)| p.home.must_be_bound() && b.is_none();
            let mut places = self.places.iter().zip(&self.bound);
            let home = places.find(open).map(|(p, _)| p.home);
            return fail(format!("{:?} is not bound", home.unwrap_or(Home::Arena)));
        }
        if self.arena.is_none() {
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
            self.rebound = false;
        }
        Ok(())
    }

    /// Runs steps until the end, a fault, or, where it is given, `pause` says so.
    pub(super) fn steps_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: Option<&dyn Fn() -> bool>,
    ) -> Result<Option<usize>, DeviceError> {
        self.check(rows, from)?;
        if self.lone.rows != rows || self.lone.alone.len() != self.steps.len() {
            self.lone = Lone::of(&self.steps, rows);
        }
        for taken in &mut self.taken {
            *taken.get_mut() = 0;
        }
        let steps = &self.steps;
        let run = Run::new(
            &self.pointers,
            &self.fault,
            &self.stop,
            self.workspaces,
            &self.taken,
            rows,
            self.path,
        );
        if let Some(trail) = &self.trail {
            trail.progressed();
        }
        let trail = self.trail;
        if self.small {
            let mut run = run;
            run.leave(trail);
            let next = alone(steps, run, self.parts, from, pause);
            return match self.fault.take() {
                Some(error) => Err(error),
                None => Ok(next),
            };
        }
        let pause = pause.map(OnPartZero);
        // The step to stop before. A part that is late sees at its step what was decided for it, or already
        // something about a later one, never the opposite of what the others saw.
        let stop = AtomicUsize::new(usize::MAX);
        let parts = self.parts;
        let lone = &self.lone;
        let mut pool = self.pool.borrow_mut();
        pool.run_on(parts, |part, barrier| {
            let mut run = run;
            if part == 0 {
                run.leave(trail);
            }
            // Whether a step failed since the last meeting, where part 0 goes on alone.
            let mut failed = false;
            for (s, step) in steps.iter().enumerate().skip(from) {
                let is_alone = lone.alone[s];
                let meet = match step.meet {
                    Meet::No => false,
                    Meet::ToPause => pause.is_some(),
                    // Whoever may pause wants to be asked often.
                    Meet::Always => pause.is_some() || !lone.omitted[s],
                };
                failed |= !meet && lone.omitted[s] && run.failed_before(s);
                if meet {
                    // A stop is a failure of the step before, so that all parts see it alike.
                    if part == 0 {
                        run.stopped();
                    }
                    // At `from`, this execution has not done anything yet.
                    if let Some(pause) = &pause
                        && part == 0
                        && s > from
                        && (pause.0)()
                    {
                        stop.store(s, Ordering::Relaxed);
                    }
                    barrier.wait();
                    if run.failed_before(s) || stop.load(Ordering::Relaxed) == s {
                        break;
                    }
                }
                run.enter(s, step.mark);
                if is_alone && (part > 0 || failed) {
                    continue;
                }
                // SAFETY: `check` says that all places are bound, with the sizes that `bind` compared with the
                // specs; the pool gives every part to one thread; barriers separate steps that
                // touch the same memory, or part 0 alone runs both of them.
                unsafe { step.kernel.run(&run, part, parts) };
            }
        });
        if let Some(error) = self.fault.take() {
            return Err(error);
        }
        let stop = stop.into_inner();
        Ok((stop != usize::MAX).then_some(stop))
    }
}

/// What only part 0 calls, which is the thread that it came from.
struct OnPartZero<'a>(&'a dyn Fn() -> bool);

// SAFETY: `steps_from` calls it on part 0 only, and the pool runs part 0 on the caller's own thread.
unsafe impl Sync for OnPartZero<'_> {}

/// Runs steps on this thread: each part of each in turn, as if the threads met before every step.
fn alone(
    steps: &[Step],
    mut run: Run<'_>,
    parts: usize,
    from: usize,
    pause: Option<&dyn Fn() -> bool>,
) -> Option<usize> {
    for (s, step) in steps.iter().enumerate().skip(from) {
        run.stopped();
        if run.failed_before(s) {
            return None;
        }
        if s > from && pause.is_some_and(|pause| pause()) {
            return Some(s);
        }
        run.enter(s, step.mark);
        for part in 0..parts {
            // SAFETY: as in `steps_from`; nothing else runs meanwhile.
            unsafe { step.kernel.run(&run, part, parts) };
        }
    }
    None
}
