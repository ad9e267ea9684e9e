//! What a weight dtype is to the multiplication, and the plain dtypes.

#![expect(
    clippy::needless_range_loop,
    reason = "an index runs over several arrays at once, and its order is the point"
)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

use super::place::{Beside, Place};
use super::simd::Simd;

/// A weight dtype: how a block of sixteen rows is unpacked, and how it is multiplied and summed. The
/// loops around it are in `drive`; what is here and in the other implementations is the order of
/// summation, whatever those loops do.
///
/// # Safety
///
/// As for [`Simd`], and pointers are readable as far as said.
pub(super) trait Format: Sized {
    /// Elements of a block.
    const LEN: usize;
    /// Bytes of a block in one weight row.
    const BYTES: usize;
    /// Bytes of a block in one row of activations, prepared if the dtype wants that.
    const RECORD: usize;
    /// Whether the dtype is plain: any `k` is allowed, and few registers are needed.
    const PLAIN: bool;
    /// Rows of activations that a block in registers leaves registers for.
    const FEW: usize = 8;
    /// Rows and panels of a tile where there are very many rows, measured: more rows share what is computed of a block, in more
    /// registers; three rows and four panels need the fewest loads.
    const MANY: (usize, usize) = (4, 2);
    /// Where a block has a number that is not part of whole words.
    const BESIDE: Beside;

    /// Where the word at byte `at` goes when the block is packed: memory delivers best what is read in order.
    fn packed(at: usize) -> usize {
        at
    }

    /// Whether a packed word's lower halves lie before its upper ones, each of all sixteen rows side by side.
    const APART: bool = false;

    /// A block of sixteen rows, unpacked: lane `r` belongs to row `r`.
    type Block<S: Simd>: Copy;

    /// Unpacks the block at `from`; reads [`Format::BYTES`] of each of sixteen rows, and writes all of `into`.
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Self::Block<S>);

    /// Adds the products of the first `count` elements of `P` blocks (48 rows for `P` = 3) with `R` rows of
    /// activations. Reads [`Format::RECORD`] bytes at each `x`, of which plain dtypes read `4 · count`. Block
    /// dtypes always have whole blocks and ignore `count`.
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Self::Block<S>; P],
        x: [*const u8; R],
        count: usize,
        acc: &mut [[S::F; P]; R],
    );

    /// [`Format::unpack`] and [`Format::step`] of one whole block for few rows.
    #[inline(always)]
    unsafe fn stream<S: Simd, W: Place, const R: usize>(
        from: W,
        x: [*const u8; R],
        acc: &mut [[S::F; 1]; R],
    ) {
        let mut block = MaybeUninit::<[Self::Block<S>; 1]>::uninit();
        // SAFETY: the caller's promise; `unpack` writes the whole block.
        unsafe {
            Self::unpack::<S, W>(from, block.as_mut_ptr().cast());
            Self::step::<S, R, 1>(block.assume_init_ref(), x, Self::LEN, acc);
        }
    }
}

/// A plain dtype, of which `PER` elements make a word.
///
/// # Safety
///
/// As for [`Simd`].
pub(super) trait Element<const PER: usize> {
    /// See [`Format::APART`].
    const APART: bool = false;

    /// The elements in each word as `f32`, in the order of memory.
    unsafe fn convert<S: Simd>(words: S::I) -> [S::F; PER];

    /// The same of words whose halves are [apart](Element::APART).
    #[inline(always)]
    unsafe fn convert_apart<S: Simd>(words: S::I) -> [S::F; PER] {
        // SAFETY: the caller's promise.
        unsafe { Self::convert::<S>(words) }
    }
}

/// The elements of sixteen rows that `word` has, where they lie as `W` says.
///
/// # Safety
///
/// As for [`Simd`].
#[inline(always)]
unsafe fn elements<S: Simd, W: Place, E: Element<PER>, const PER: usize>(
    word: S::I,
) -> [S::F; PER] {
    // SAFETY: the caller's promise.
    unsafe {
        match W::PACKED && E::APART {
            true => E::convert_apart::<S>(word),
            false => E::convert::<S>(word),
        }
    }
}

pub(super) struct F32;

impl Element<1> for F32 {
    #[inline(always)]
    unsafe fn convert<S: Simd>(words: S::I) -> [S::F; 1] {
        // SAFETY: the caller's promise.
        unsafe { [S::bits_f(words)] }
    }
}

pub(super) struct F16;

/// Processors convert numbers that lie side by side.
impl Element<2> for F16 {
    const APART: bool = true;

    #[inline(always)]
    unsafe fn convert<S: Simd>(words: S::I) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe { S::halves(words) }
    }

    #[inline(always)]
    unsafe fn convert_apart<S: Simd>(words: S::I) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe { S::halves_in_order(words) }
    }
}

pub(super) struct BF16;

impl Element<2> for BF16 {
    #[inline(always)]
    unsafe fn convert<S: Simd>(words: S::I) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let upper = S::splat_i(0xffff_0000_u32 as i32);
            [
                S::bits_f(S::shl::<16>(words)),
                S::bits_f(S::and(words, upper)),
            ]
        }
    }
}

pub(super) struct E4M3;

impl Element<4> for E4M3 {
    #[inline(always)]
    unsafe fn convert<S: Simd>(words: S::I) -> [S::F; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            // A half-precision number with the same exponent and mantissa is 2^-8 of it. The one whose exponent and mantissa are
            // all ones, which is a NaN, gets the upper bit of that exponent as well: no carry leaves a byte.
            let bits = S::and(words, S::splat_i(0x7f7f_7f7f));
            let nan = S::add(bits, S::splat_i(0x0101_0101));
            let nan = S::and(nan, S::splat_i(0x8080_8080_u32 as i32));
            let bits = S::or(bits, nan);
            let (signs, rest) = (
                S::splat_i(0x8000_8000_u32 as i32),
                S::splat_i(0x7f80_7f80_u32 as i32),
            );
            let even = S::or(
                S::and(S::shl::<8>(words), signs),
                S::and(S::shl::<7>(bits), rest),
            );
            let odd = S::or(S::and(words, signs), S::and(S::shr::<1>(bits), rest));
            let ([a, c], [b, d]) = (S::halves(even), S::halves(odd));
            let more = S::splat_f(256.0);
            [
                S::mul(a, more),
                S::mul(b, more),
                S::mul(c, more),
                S::mul(d, more),
            ]
        }
    }
}

/// A plain dtype in blocks of 64 bytes: rows are often a multiple of 4 KiB apart, sixteen of them
/// then share one set of the first-level cache, and a line that is not used at once is lost.
pub(super) struct Plain<E, const PER: usize>(PhantomData<E>);

impl<E: Element<PER>, const PER: usize> Format for Plain<E, PER> {
    const LEN: usize = 16 * PER;
    const BYTES: usize = 64;
    const RECORD: usize = 4 * Self::LEN;
    const PLAIN: bool = true;
    const BESIDE: Beside = Beside::None;
    const APART: bool = E::APART;

    type Block<S: Simd> = [[S::F; PER]; 16];

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Self::Block<S>) {
        // SAFETY: the caller's promise.
        unsafe {
            from.ask::<S, Self>(0, 1);
            let words = from.words16::<S, Self>(0);
            for i in 0..16 {
                (*into)[i] = elements::<S, W, E, PER>(words[i]);
            }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Self::Block<S>; P],
        x: [*const u8; R],
        count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if count == Self::LEN {
                for i in 0..16 {
                    for half in 0..PER {
                        let mut column = [w[0][i][half]; P];
                        for p in 1..P {
                            column[p] = w[p][i][half];
                        }
                        add_column::<S, R, P>(column, x, PER * i + half, acc);
                    }
                }
            } else {
                for j in 0..count.min(Self::LEN) {
                    let mut column = [w[0][j / PER][j % PER]; P];
                    for p in 1..P {
                        column[p] = w[p][j / PER][j % PER];
                    }
                    add_column::<S, R, P>(column, x, j, acc);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn stream<S: Simd, W: Place, const R: usize>(
        from: W,
        x: [*const u8; R],
        acc: &mut [[S::F; 1]; R],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            from.ask::<S, Self>(0, 1);
            let words = from.words16::<S, Self>(0);
            for i in 0..16 {
                let columns = elements::<S, W, E, PER>(words[i]);
                for half in 0..PER {
                    add_column::<S, R, 1>([columns[half]], x, PER * i + half, acc);
                }
            }
        }
    }
}

/// The one operation of plain dtypes: `acc = fma(w_j, x_j, acc)`.
///
/// # Safety
///
/// As for [`Format::step`], `j` is below the count.
#[inline(always)]
unsafe fn add_column<S: Simd, const R: usize, const P: usize>(
    column: [S::F; P],
    x: [*const u8; R],
    j: usize,
    acc: &mut [[S::F; P]; R],
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::splat_f(ptr::read_unaligned(x[r].cast::<f32>().add(j)));
            for p in 0..P {
                acc[r][p] = S::fma(column[p], x, acc[r][p]);
                if R > 1 {
                    S::settle_f(&mut acc[r][p]);
                }
            }
        }
    }
}
