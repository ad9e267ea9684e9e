//! Asking memory for weights before they are multiplied.

use super::super::super::avx512::Avx512;
use super::super::super::drive::Job;
use super::super::super::place::{PACKED_AHEAD, PAGES_AHEAD, Place, in_turn};
use super::super::super::simd::Simd;
use super::super::LINE;
use super::{Chunk, OfBF16, PANELS, STEP};
use crate::cpu::lanes::LANES;

/// The packed weights that are multiplied next, one panel after the other.
pub(super) struct Next {
    panel: *const u8,
    /// From one panel to the next, and panels that have not begun.
    stride: usize,
    after: usize,
    /// Lines of a panel, how many of the one at hand were asked for, and how many first ones are asked for [`in_turn`].
    lines: usize,
    asked: usize,
    in_turn: usize,
    /// Lines to ask for in a step.
    share: usize,
}

/// How many of so many lines are asked for [`in_turn`]: whole pages, so that nothing is that does not come next.
fn in_turn_of(job: &Job, lines: usize) -> usize {
    match job.pages {
        true => lines * LINE / PAGES_AHEAD * PAGES_AHEAD / LINE,
        false => 0,
    }
}

impl Next {
    /// The panels from output `output` on, in as many steps as `groups` of rows take.
    #[inline(always)]
    pub fn of<F: OfBF16, W: Place>(job: &Job, chunk: &Chunk, output: usize, groups: usize) -> Next {
        let block = LANES * F::BYTES;
        let lines = |steps: usize| steps * STEP / F::LEN * block / LINE;
        // What lies past the job's outputs is most often another thread's.
        let panels = (job.n.end - output).div_ceil(LANES).min(PANELS);
        let there = if W::PACKED { panels } else { 0 };
        let of_chunk = if there > 0 { lines(chunk.len()) } else { 0 };
        Next {
            panel: job
                .w
                .wrapping_add(output * job.stride + lines(chunk.start) * LINE),
            stride: LANES * job.stride,
            after: there.saturating_sub(1),
            lines: of_chunk,
            asked: 0,
            in_turn: in_turn_of(job, of_chunk),
            share: (there * lines(2)).div_ceil(2 * groups),
        }
    }

    /// What follows in memory on a panel of so many steps, tiles, at `at`, which is at hand, of which one after the other is read
    /// by one group.
    #[inline(always)]
    pub fn ahead(job: &Job, steps: usize, at: *const u8) -> Next {
        let lines = steps * LANES;
        let ahead = if job.pages { PAGES_AHEAD } else { PACKED_AHEAD };
        Next {
            panel: at.wrapping_add(ahead),
            stride: 0,
            after: 0,
            lines,
            asked: 0,
            in_turn: in_turn_of(job, lines),
            share: LANES,
        }
    }

    /// Asks for a share.
    ///
    /// # Safety
    ///
    /// As for [`Simd`].
    #[inline(always)]
    pub unsafe fn ask(&mut self) {
        let end = self.lines.min(self.asked + self.share);
        for line in self.asked..end {
            let at = LINE * line;
            let at = if line < self.in_turn { in_turn(at) } else { at };
            // SAFETY: prefetching is allowed anywhere.
            unsafe { Avx512::prefetch(self.panel.wrapping_add(at)) };
        }
        self.asked = end;
        if end == self.lines && self.after > 0 {
            self.after -= 1;
            self.asked = 0;
            self.panel = self.panel.wrapping_add(self.stride);
        }
    }
}
