//! Noting when a plan does what: by the device's own clock, or its pauses, which come between its steps, are used to look
//! where it is.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Instant,
};

use hotcell_ipc::background::Rests;
use hotcell_kernels::{backend::DeviceError, plan::Plan};
use hotcell_proto::{limits, plan_part::PlanPart};

use super::Runner;
use crate::debug::observer::NodeNote;

/// Whether devices wait for every step, so that it is known which one runs ([`Trail::each`](hotcell_kernels::backend::Trail)).
/// Of a process, since a device of it is: one engine has it, or those of a test.
pub static EACH: AtomicBool = AtomicBool::new(false);

/// Whether it [rests](Rests) now and then, between the steps of plans and of a load. Of a process, as [`EACH`] is.
pub static GIVES_WAY: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RESTS: RefCell<Rests> = RefCell::new(Rests::new());
}

/// This thread has had nothing to do until now: it need not rest for that.
pub fn begin_anew() {
    if GIVES_WAY.load(Ordering::Relaxed) {
        RESTS.set(Rests::new());
    }
}

/// Rests if it is time to, and this process [gives way](GIVES_WAY). Pauses no plan.
pub fn give_way() -> bool {
    if GIVES_WAY.load(Ordering::Relaxed) {
        RESTS.with_borrow_mut(Rests::rest);
    }
    false
}

/// Looks where plans are.
pub(super) struct Follower {
    /// Where they say so, packed.
    node: &'static AtomicU64,
    notes: RefCell<Vec<NodeNote>>,
}

impl Follower {
    /// Executes a plan that has no work before it in a stream, and notes what it does.
    pub fn execute(
        &self,
        part: PlanPart,
        plan: &mut dyn Plan,
        rows: usize,
    ) -> Result<(), DeviceError> {
        if let Some(steps) = plan.execute_timed(rows)? {
            let mut notes = self.notes.borrow_mut();
            let left = limits::MAX_TRACED_NODES.saturating_sub(notes.len());
            notes.extend(steps.into_iter().take(left).map(|step| NodeNote {
                begun: step.begun,
                took: step.took,
                node: step.mark,
                part: Some(part),
                member: 0,
            }));
            return Ok(());
        }
        // What is there is of the plan before this one.
        self.node.store(0, Ordering::Relaxed);
        let since = RefCell::new(Instant::now());
        let note = || {
            let now = Instant::now();
            let begun = since.replace(now);
            let node = self.node.load(Ordering::Relaxed);
            let mut notes = self.notes.borrow_mut();
            // Some pause before their first step.
            if node != 0 && notes.len() < limits::MAX_TRACED_NODES {
                notes.push(NodeNote {
                    begun,
                    took: now.saturating_duration_since(begun),
                    node,
                    part: Some(part),
                    member: 0,
                });
            }
            false
        };
        plan.execute_from(rows, 0, &note)?;
        note();
        Ok(())
    }
}

impl Runner {
    /// Notes what plans do from now on, by what they write there, until that is [taken](Runner::followed).
    pub fn follow(&mut self, node: &'static AtomicU64) {
        self.follower.get_or_insert_with(|| Follower {
            node,
            notes: RefCell::default(),
        });
    }

    /// What the plans did since that was asked for, if it was. No more is noted.
    pub fn followed(&mut self) -> Option<Vec<NodeNote>> {
        let follower = self.follower.take()?;
        Some(follower.notes.into_inner())
    }

    /// Asks the other members what their plans did in the steps that were noted here too. They answer once they are done with
    /// the steps that have begun.
    pub fn ask_elsewhere(&self) {
        if let Some(others) = &self.others {
            others.ask_notes();
        }
    }

    /// What they noted until they were last asked.
    ///
    /// # Errors
    /// When one of them is gone.
    pub fn noted_elsewhere(&self) -> Result<Vec<NodeNote>, DeviceError> {
        let noted = self.others.as_ref().map(|others| others.notes());
        Ok(self.done(noted.transpose())?.unwrap_or_default())
    }
}
