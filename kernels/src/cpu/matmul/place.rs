//! Where sixteen rows of weights lie in memory: as the file has them, or packed side by side.
//!
//! # The packed layout
//!
//! A *panel* is sixteen weight rows, in as many bytes as they take in the file. Within it the blocks
//! ascend along `k`; of a block, word `i` (four bytes) of all sixteen rows lies side by side: 64 bytes, lane
//! `r` that of row `r`. A dtype whose block has one number beside its whole words (Q4_0, Q5_0, Q8_0: the first two
//! bytes; Q6_K: the last two; MXFP4: the first byte) keeps as many blocks together as their numbers fill a cache line, two
//! or four: sixteen numbers of the one and sixteen of each other, then the words of all, so that registers are loaded from
//! whole cache lines; where fewer are left at the end they have their own numbers before them. The words are in the order in which they are read ([`Format::packed`]). Of F16 the lower halves of the sixteen
//! words lie side by side, and then the upper ones ([`Format::APART`]). The
//! rows after the last whole panel stay as they are.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::format::Format;
use super::simd::Simd;
use crate::cpu::lanes::LANES;

/// Where a block has a number that is not part of a word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    /// It has none: the block is whole words.
    None,
    /// Its first two bytes, in half precision.
    First,
    /// Its last two bytes, in half precision.
    Last,
    /// Its first byte.
    FirstByte,
}

impl Beside {
    /// The number's bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Beside::None => 0,
            Beside::First | Beside::Last => 2,
            Beside::FirstByte => 1,
        }
    }

    /// Bytes before the first word.
    pub const fn lead(self) -> usize {
        match self {
            Beside::First | Beside::FirstByte => self.bytes(),
            Beside::None | Beside::Last => 0,
        }
    }
}

/// Sixteen weight rows, fewer at the end of the range.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub w: *const u8,
    /// Bytes of a row.
    pub stride: usize,
    /// Rows there are; the others are read as zeros.
    pub rows: usize,
    /// Whether a packed one is asked for from several pages in turn.
    pub pages: bool,
}

/// A block's bytes of sixteen rows: where rows or elements are missing, what there is gets copied
/// here, so that the kernel never reads past the end.
pub(super) type Stage = [u8; LANES * 256];

/// One block of sixteen rows. Lane `r` of what is read belongs to row `r`.
///
/// # Safety
///
/// As for [`Simd`]; places in the block are within [`Format::BYTES`].
pub(super) trait Place: Copy {
    /// Whether the rows are packed.
    const PACKED: bool;

    /// Block `b` of a panel, of which `count` elements exist, when `P` panels are read side by side, or what comes next is asked
    /// for by others (0).
    ///
    /// # Safety
    ///
    /// The panel's rows are readable and have that block.
    unsafe fn block<F: Format, const P: usize>(
        panel: &Panel,
        b: usize,
        count: usize,
        stage: &mut MaybeUninit<Stage>,
    ) -> Self;
    /// The word at byte `at`.
    unsafe fn word<S: Simd, F: Format>(self, at: usize) -> S::I;
    /// The four words from byte `at` on.
    unsafe fn words4<S: Simd, F: Format>(self, at: usize) -> [S::I; 4];
    /// The sixteen words from byte `at` on.
    unsafe fn words16<S: Simd, F: Format>(self, at: usize) -> [S::I; 16];
    /// The half-precision number that [`Format::BESIDE`] says where to find.
    unsafe fn half<S: Simd, F: Format>(self) -> S::F;
    /// The number that is the first byte.
    unsafe fn byte<S: Simd, F: Format>(self) -> S::I;
    /// Asks for one of `parts` shares of the memory that lies some way ahead: all lines of a large block at once would
    /// fill the buffers of misses.
    unsafe fn ask<S: Simd, F: Format>(self, part: usize, parts: usize);
}

/// How many bytes ahead of the block at hand weights are asked for, in each row as the file has them:
/// measured, with a wide optimum.
const fn ahead<F: Format>() -> usize {
    if F::PLAIN { 768 } else { 2048 }
}

/// The same in packed panels, together: what memory delivers while it is waited for once.
pub(super) const PACKED_AHEAD: usize = 8192;

/// Pages whose lines are asked for in turn where that is [faster](crate::cpu::path::reads_pages), and how far ahead then: past all of them.
const PAGES: usize = 4;
const PAGE_LINES: usize = 64;
pub(super) const PAGES_AHEAD: usize = PAGES * PAGE_LINES * 64;

/// The line that is asked for in the place of the one at an address, or so far from a beginning: so many pages' lines in turn, of
/// each page one.
#[inline(always)]
pub(super) fn in_turn(at: usize) -> usize {
    let (start, line) = (at / PAGES_AHEAD * PAGES_AHEAD, at % PAGES_AHEAD / 64);
    start + (line % PAGES * PAGE_LINES + line / PAGES) * 64
}

/// Rows as the file has them, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    from: *const u8,
    stride: usize,
    /// What to ask for, in the first row; need not exist.
    ahead: *const u8,
    ahead_stride: usize,
    /// Blocks of less than a line ask for some of the rows only, beginning with this one, so that over a
    /// few blocks every line is asked for about once.
    first: usize,
}

// SAFETY for the whole impl: the caller's promise for the block; asking is allowed anywhere.
impl Place for Stored {
    const PACKED: bool = false;

    #[inline(always)]
    unsafe fn block<F: Format, const P: usize>(
        panel: &Panel,
        b: usize,
        count: usize,
        stage: &mut MaybeUninit<Stage>,
    ) -> Self {
        let position = b * F::BYTES + ahead::<F>();
        // Past the end of these rows come the rows of the next panel.
        let past = if position < panel.stride {
            0
        } else {
            panel.stride * (LANES - 1)
        };
        let ahead = panel.w.wrapping_add(position + past);
        // SAFETY: within the row.
        let at = unsafe { panel.w.add(b * F::BYTES) };
        let (from, stride) = if panel.rows == LANES && count == F::LEN {
            (at, panel.stride)
        } else {
            // SAFETY: the caller's promise.
            unsafe { panel.copy(at, F::BYTES, count * F::BYTES / F::LEN, stage) };
            (stage.as_ptr().cast(), F::BYTES)
        };
        Stored {
            from,
            stride,
            ahead,
            ahead_stride: panel.stride,
            first: b * (LANES * F::BYTES).div_ceil(64),
        }
    }

    #[inline(always)]
    unsafe fn word<S: Simd, F: Format>(self, at: usize) -> S::I {
        // SAFETY: see the impl.
        unsafe { S::gather(self.from.add(at), self.stride) }
    }

    #[inline(always)]
    unsafe fn words4<S: Simd, F: Format>(self, at: usize) -> [S::I; 4] {
        // SAFETY: see the impl.
        unsafe { S::gather4(self.from.add(at), self.stride) }
    }

    #[inline(always)]
    unsafe fn words16<S: Simd, F: Format>(self, at: usize) -> [S::I; 16] {
        // SAFETY: see the impl.
        unsafe { S::gather16(self.from.add(at), self.stride) }
    }

    #[inline(always)]
    unsafe fn half<S: Simd, F: Format>(self) -> S::F {
        // SAFETY: see the impl. At the end it is the upper half of a word that ends with the block.
        unsafe {
            match F::BESIDE {
                Beside::Last => S::halves(self.word::<S, F>(F::BYTES - 4))[1],
                _ => S::halves(self.word::<S, F>(0))[0],
            }
        }
    }

    #[inline(always)]
    unsafe fn byte<S: Simd, F: Format>(self) -> S::I {
        // SAFETY: see the impl.
        unsafe { S::and(self.word::<S, F>(0), S::splat_i(0xff)) }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd, F: Format>(self, part: usize, parts: usize) {
        let lines = if F::BYTES < 64 {
            (16 * F::BYTES).div_ceil(64)
        } else {
            16 * F::BYTES.div_ceil(64)
        };
        for i in lines * part / parts..lines * (part + 1) / parts {
            let row = if F::BYTES < 64 {
                (self.first + i) % 16
            } else {
                i % 16
            };
            let line = if F::BYTES < 64 { 0 } else { i / 16 };
            let address = self.ahead.wrapping_add(row * self.ahead_stride + 64 * line);
            // SAFETY: see the impl.
            unsafe {
                // Measured as well: the sums of plain numbers leave less of the first-level cache to what comes.
                match F::PLAIN {
                    true => S::prefetch(address),
                    false => S::prefetch_near(address),
                }
            }
        }
    }
}

/// A packed panel's block.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    /// Where the words of byte 0 would be.
    words: *const u8,
    /// Its sixteen numbers beside them, where it has them.
    numbers: *const u8,
    /// What to ask for; need not exist.
    ahead: *const u8,
    /// Whether [`in_turn`].
    pages: bool,
}

/// Where in a panel of `stride` bytes a row block `b` has its words, and its numbers beside them.
#[inline(always)]
pub(super) const fn packed_block(
    beside: Beside,
    bytes: usize,
    stride: usize,
    b: usize,
) -> (usize, usize) {
    let size = beside.bytes();
    if size == 0 {
        return (b * LANES * bytes, 0);
    }
    let together = 4 / size;
    let (first, among) = (b - b % together, b % together);
    // Of the last ones there may be fewer.
    let mut there = 1;
    let mut other = 1;
    while other < together {
        there += ((first + other) * bytes < stride) as usize;
        other += 1;
    }
    let start = first * LANES * bytes;
    let words = start + there * LANES * size + among * LANES * (bytes - size);
    (words, start + among * LANES * size)
}

// SAFETY for the whole impl: a panel's bytes are `LANES` times its stride, and hold the words and numbers at the places of
// `packed_block`; asking is allowed anywhere.
impl Place for Packed {
    const PACKED: bool = true;

    #[inline(always)]
    unsafe fn block<F: Format, const P: usize>(
        panel: &Panel,
        b: usize,
        _: usize,
        _: &mut MaybeUninit<Stage>,
    ) -> Self {
        let (words, numbers) = packed_block(F::BESIDE, F::BYTES, panel.stride, b);
        let lead = F::BESIDE.lead();
        // Of one stream: two would have twice as many lines in a cache.
        let pages = P == 1 && panel.pages;
        let ahead = match P {
            0 => 0,
            _ if pages => PAGES_AHEAD,
            _ => PACKED_AHEAD / P,
        };
        let position = b * LANES * F::BYTES + ahead;
        // Behind this panel is the one that is read beside it.
        let past = if P <= 1 || position < LANES * panel.stride {
            0
        } else {
            (P - 1) * LANES * panel.stride
        };
        Packed {
            words: panel.w.wrapping_add(words).wrapping_sub(lead * LANES),
            numbers: panel.w.wrapping_add(numbers),
            ahead: panel.w.wrapping_add(position + past),
            pages,
        }
    }

    #[inline(always)]
    unsafe fn word<S: Simd, F: Format>(self, at: usize) -> S::I {
        // SAFETY: see the impl.
        unsafe { S::load_i(self.words.wrapping_add(F::packed(at) * LANES)) }
    }

    #[inline(always)]
    unsafe fn words4<S: Simd, F: Format>(self, at: usize) -> [S::I; 4] {
        // SAFETY: see the impl.
        unsafe {
            [
                self.word::<S, F>(at),
                self.word::<S, F>(at + 4),
                self.word::<S, F>(at + 8),
                self.word::<S, F>(at + 12),
            ]
        }
    }

    #[inline(always)]
    unsafe fn words16<S: Simd, F: Format>(self, at: usize) -> [S::I; 16] {
        // SAFETY: see the impl.
        unsafe {
            let mut words = [self.word::<S, F>(at); 16];
            for (i, word) in words.iter_mut().enumerate().skip(1) {
                *word = self.word::<S, F>(at + 4 * i);
            }
            words
        }
    }

    #[inline(always)]
    unsafe fn half<S: Simd, F: Format>(self) -> S::F {
        // SAFETY: see the impl.
        unsafe { S::load_halves(self.numbers) }
    }

    #[inline(always)]
    unsafe fn byte<S: Simd, F: Format>(self) -> S::I {
        // SAFETY: see the impl.
        unsafe { S::load_bytes(self.numbers) }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd, F: Format>(self, part: usize, parts: usize) {
        let lines = (LANES * F::BYTES).div_ceil(64);
        for i in lines * part / parts..lines * (part + 1) / parts {
            let at = self.ahead.wrapping_add(64 * i);
            let at = if self.pages { at.map_addr(in_turn) } else { at };
            // SAFETY: see the impl.
            unsafe { S::prefetch_near(at) };
        }
    }
}

impl Panel {
    /// The panel of output `first`; past the end of the range it has no rows.
    ///
    /// # Safety
    ///
    /// `w` is valid for rows of `stride` bytes up to the end of `n`.
    #[inline(always)]
    pub unsafe fn of(w: *const u8, stride: usize, n: &Range<usize>, first: usize) -> Panel {
        let there = first.min(n.end);
        Panel {
            // SAFETY: within the matrix, or one past it.
            w: unsafe { w.add(there * stride) },
            stride,
            rows: (n.end - there).min(LANES),
            pages: false,
        }
    }

    #[inline(always)]
    pub fn with_pages(self, pages: bool) -> Panel {
        Panel { pages, ..self }
    }

    /// # Safety
    ///
    /// `bytes` bytes are readable at `at` and the panel's other rows below it.
    #[cold]
    #[inline(never)]
    unsafe fn copy(
        &self,
        at: *const u8,
        block: usize,
        bytes: usize,
        stage: &mut MaybeUninit<Stage>,
    ) {
        let stage = stage.write([0; _]);
        for (r, to) in stage.chunks_exact_mut(block).take(self.rows).enumerate() {
            // SAFETY: the caller's promise.
            let from = unsafe { std::slice::from_raw_parts(at.add(r * self.stride), bytes) };
            to[..bytes].copy_from_slice(from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_asked_for_once_from_four_pages_and_before_they_are_read() {
        let start = 5 * PAGES_AHEAD;
        let lines = 2 * PAGES * PAGE_LINES;
        let asked: Vec<usize> = (0..lines).map(|line| in_turn(start + 64 * line)).collect();
        // What is read meanwhile is so far behind.
        let far = |(line, at): (usize, &usize)| at - (start - PAGES_AHEAD + 64 * line);
        let far: Vec<usize> = asked.iter().enumerate().map(far).collect();
        assert_eq!(far.iter().min(), Some(&(4096 + 192)));
        assert_eq!(far.iter().max(), Some(&(7 * 4096 - 192)));
        let pages: Vec<usize> = asked.iter().take(8).map(|at| (at - start) / 4096).collect();
        assert_eq!(pages, [0, 1, 2, 3, 0, 1, 2, 3]);
        let mut all = asked;
        all.sort_unstable();
        assert!(all.into_iter().eq((start..).step_by(64).take(lines)));
        let within = in_turn(start + 64 + 63);
        assert_eq!(within, start + 4096);
    }
}
