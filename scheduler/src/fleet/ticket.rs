//! What a request's place counts for, for as long as it is held.

use std::sync::{Arc, atomic::Ordering};

use super::{Placed, Ticket, changes::Teller, serving::Uses, slot::Load, turns::Held};
use crate::placement::Estimate;

impl Placed {
    /// Whether this is a throw-away worker, where no other request runs.
    pub fn is_alone(&self) -> bool {
        self.leash.is_some()
    }

    /// The prompt was read.
    pub fn prefilled(&mut self) {
        let read = std::mem::take(&mut self.ticket.prefill);
        self.ticket
            .load
            .outstanding
            .fetch_sub(read, Ordering::Relaxed);
    }

    /// So many tokens were generated.
    pub fn generated(&mut self, tokens: usize) {
        let done = self.ticket.decode.min(tokens as u64);
        self.ticket.decode -= done;
        self.ticket
            .load
            .outstanding
            .fetch_sub(done, Ordering::Relaxed);
    }
}

impl Ticket {
    pub(super) fn new(
        load: &Arc<Load>,
        changed: &Teller,
        cost: Estimate,
        uses: &Arc<Uses>,
        held: Option<Held>,
    ) -> Self {
        uses.placed.fetch_add(1, Ordering::Relaxed);
        load.outstanding
            .fetch_add(cost.prefill + cost.decode, Ordering::Relaxed);
        load.running.fetch_add(1, Ordering::Relaxed);
        Self {
            load: Arc::clone(load),
            changed: changed.clone(),
            prefill: cost.prefill,
            decode: cost.decode,
            uses: Arc::clone(uses),
            held,
        }
    }

    /// The same place, for so much more.
    pub(super) fn for_more(mut self, cost: Estimate) -> Self {
        self.prefill += cost.prefill;
        self.decode += cost.decode;
        self.load
            .outstanding
            .fetch_add(cost.prefill + cost.decode, Ordering::Relaxed);
        self
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.load
            .outstanding
            .fetch_sub(self.prefill + self.decode, Ordering::Relaxed);
        self.load.running.fetch_sub(1, Ordering::Relaxed);
        self.uses.placed.fetch_sub(1, Ordering::Relaxed);
        self.held = None;
        // Somebody may wait for a place.
        self.changed.tell();
    }
}
