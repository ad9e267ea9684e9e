//! What whoever computes the other parts of a model has to do as well.

use std::{collections::BTreeMap, ops::Range};

use hotcell_kernels::backend::DeviceError;

use super::{Row, Runner, Wanted};
use crate::{debug::observer::NodeNote, weights::Weight};

/// Something that a [`Runner`] does, and that all members of its communicator have to do at the same place.
#[derive(Debug)]
pub enum Order<'a> {
    /// [`Runner::set_table`].
    Table {
        /// Kind of layers.
        kind: usize,
        /// Whose table.
        sequence: usize,
        /// The first of its blocks that is told.
        first: usize,
        /// Where they are.
        blocks: &'a [u32],
    },
    /// [`Runner::copy_block`].
    Copy {
        /// Kind of layers.
        kind: usize,
        /// Whence.
        from: u32,
        /// Whereto.
        to: u32,
    },
    /// [`Runner::wipe_block`].
    Wipe {
        /// Kind of layers.
        kind: usize,
        /// Which one.
        block: u32,
    },
    /// [`Runner::step`].
    Step {
        /// What is computed.
        rows: &'a [Row],
        /// Of which rows there are logits.
        picks: &'a [usize],
        /// Whether it hands out what somebody wants to look at.
        looked: bool,
        /// Whether it is noted when each of its nodes is computed ([`Others::notes`]).
        followed: bool,
    },
    /// Whether what was prepared to be looked at is handed out from now on ([`Others::prepare_tap`]).
    Tap {
        /// Else it is forgotten.
        take: bool,
    },
    /// [`Runner::finish_states`].
    States {
        /// Of which rows.
        rows: &'a [usize],
    },
}

/// What a process saw of the layers that it has in the last step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// How large the values of those nodes were in so many rows of which that was wanted.
    Sizes {
        /// Of the step.
        rows: usize,
    },
    /// A node's values.
    Rows {
        /// The node's number among the points.
        number: usize,
        /// Of the step.
        rows: Range<usize>,
    },
}

/// Who computes the other parts.
pub trait Others {
    /// Has them do it. What they cannot do, or that they are gone, this process hears when it waits for them.
    fn order(&self, order: &Order<'_>);

    /// Has them compute from their parts of these packed weights from now on: [`Runner::use_packed`].
    fn use_packed(&self, weights: &BTreeMap<String, Weight>);

    /// Has them be ready to hand out this ([`Runner::prepare_tap`]), until [`Order::Tap`] says whether they do.
    ///
    /// # Errors
    /// What keeps one of them from it; others may be ready for it.
    fn prepare_tap(&self, wanted: &Wanted) -> Result<(), DeviceError>;

    /// What the member of this rank saw in the last step.
    ///
    /// # Errors
    /// When it is gone.
    fn seen(&self, rank: usize, what: &Seen) -> Result<Vec<u8>, DeviceError>;

    /// Asks all of them what they noted; they say so after what they were told to do before.
    fn ask_notes(&self);

    /// What they noted until they were last asked, as far as it has not been taken.
    ///
    /// # Errors
    /// When one of them is gone.
    fn notes(&self) -> Result<Vec<NodeNote>, DeviceError>;

    /// This process could not do what all were told to: they would wait for it for ever.
    fn failed(&self, error: &DeviceError);
}

impl Runner {
    /// Does as another process's runner did.
    ///
    /// # Errors
    /// As that one.
    pub fn perform(&mut self, order: &Order<'_>) -> Result<(), DeviceError> {
        match *order {
            Order::Table {
                kind,
                sequence,
                first,
                blocks,
            } => self.set_table(kind, sequence, first, blocks),
            Order::Copy { kind, from, to } => self.copy_block(kind, from, to),
            Order::Wipe { kind, block } => self.wipe_block(kind, block),
            Order::Step {
                rows,
                picks,
                looked,
                followed: _,
            } => {
                self.use_tap(looked);
                self.step(rows, picks)
            }
            Order::Tap { take } => {
                self.take_tap(take);
                Ok(())
            }
            Order::States { rows } => self.finish_states(rows),
        }
    }

    /// Tells `others` what it does from now on; those that have a part of the model are with them.
    pub fn lead(&mut self, others: Box<dyn Others>) {
        self.others = Some(others);
    }

    /// Does something together with the others.
    pub(super) fn together(
        &mut self,
        order: &Order<'_>,
        own: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if let Some(others) = &self.others {
            others.order(order);
        }
        let done = own(self);
        self.done(done)
    }

    /// Something that the others do too is done here, or cannot be.
    pub(super) fn done<T>(&self, done: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let (Err(error), Some(others)) = (&done, &self.others) {
            others.failed(error);
        }
        done
    }
}
