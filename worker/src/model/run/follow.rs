//! Noting when a plan does what: by the device's own clock, or its pauses, which come between its steps, are used to look
//! where it is.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Instant,
};

use hotcell_kernels::{backend::DeviceError, plan::Plan};
use hotcell_proto::limits;

use super::Runner;
use crate::debug::observer::NodeNote;

/// Whether devices wait for every step, so that it is known which one runs ([`Trail::each`](hotcell_kernels::backend::Trail)).
/// Of a process, since a device of it is: one engine has it, or those of a test.
pub static EACH: AtomicBool = AtomicBool::new(false);

/// Whether plans leave the processor to whoever waits for it, from step to step. Of a process, as [`EACH`] is.
///
/// The least weight alone does not: a system looks whose turn it is when somebody wakes, and else at its clock's ticks,
/// which may be 4 ms apart. So long those would wait beside whom it computes.
pub static GIVES_WAY: AtomicBool = AtomicBool::new(false);

/// A pause that leaves the processor to others.
pub(super) fn give_way() -> bool {
    std::thread::yield_now();
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
    pub fn execute(&self, plan: &mut dyn Plan, rows: usize) -> Result<(), DeviceError> {
        if let Some(steps) = plan.execute_timed(rows)? {
            let mut notes = self.notes.borrow_mut();
            let left = limits::MAX_TRACED_NODES.saturating_sub(notes.len());
            notes.extend(steps.into_iter().take(left).map(|step| NodeNote {
                begun: step.begun,
                took: step.took,
                node: step.mark,
            }));
            return Ok(());
        }
        let since = RefCell::new(Instant::now());
        let note = || {
            let now = Instant::now();
            let begun = since.replace(now);
            let mut notes = self.notes.borrow_mut();
            if notes.len() < limits::MAX_TRACED_NODES {
                notes.push(NodeNote {
                    begun,
                    took: now.saturating_duration_since(begun),
                    node: self.node.load(Ordering::Relaxed),
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
    /// Notes what plans do in the next steps, by what they write there; or no more.
    pub fn follow(&mut self, node: Option<&'static AtomicU64>) {
        self.follower = node.map(|node| Follower {
            node,
            notes: RefCell::default(),
        });
    }

    /// What the plans of the last step did, if that was asked for.
    pub fn followed(&mut self) -> Option<Vec<NodeNote>> {
        let follower = self.follower.take()?;
        Some(follower.notes.into_inner())
    }
}
