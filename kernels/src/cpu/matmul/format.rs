//! What a weight dtype is to the multiplication, and the plain dtypes.

use std::marker::PhantomData;
use std::ptr;

use super::simd::Simd;

/// A weight dtype: how a block of sixteen rows is unpacked, and how it is multiplied and summed. The
/// loops around it are in `drive`; what is here and in the other implementations is the order of
/// summation, whatever those loops do.
///
/// # Safety
///
/// As for [`Simd`], and pointers are readable as far as said.
pub(super) trait Format {
    /// Elements of a block.
    const LEN: usize;
    /// Bytes of a block in one weight row.
    const BYTES: usize;
    /// Bytes of a block in one row of activations, prepared if the dtype wants that.
    const RECORD: usize;
    /// Whether the dtype is plain: any `k` is allowed, and few registers are needed.
    const PLAIN: bool;

    /// A block of sixteen rows, unpacked: lane `r` belongs to row `r`.
    type Block<S: Simd>: Copy;

    /// Unpacks the block at `from`; reads [`Format::BYTES`] in each of sixteen rows, `stride` bytes apart.
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize) -> Self::Block<S>;

    /// Adds the products of the first `count` elements of `P` blocks (48 rows for `P` = 3) with `R` rows of
    /// activations. Reads [`Format::RECORD`] bytes at each `x`, of which plain dtypes read `4 · count`. Block
    /// dtypes always have whole blocks and ignore `count`.
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Self::Block<S>; P],
        x: [*const u8; R],
        count: usize,
        acc: &mut [[S::F; P]; R],
    );
}

/// A plain dtype.
///
/// # Safety
///
/// As for [`Format`].
pub(super) trait Element {
    const BYTES: usize;

    /// Sixteen bytes of sixteen rows as columns of `f32`: `16 / BYTES` of them.
    unsafe fn columns<S: Simd>(from: *const u8, stride: usize, into: &mut [S::F]);
}

pub(super) struct F32;

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn columns<S: Simd>(from: *const u8, stride: usize, into: &mut [S::F]) {
        // SAFETY: the caller's promise.
        unsafe {
            let words = S::gather4(from, stride);
            for (column, word) in into.iter_mut().zip(words) {
                *column = S::bits_f(word);
            }
        }
    }
}

pub(super) struct F16;

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn columns<S: Simd>(from: *const u8, stride: usize, into: &mut [S::F]) {
        // SAFETY: the caller's promise.
        unsafe {
            let words = S::gather4(from, stride);
            for (pair, word) in into.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *pair = S::halves(word);
            }
        }
    }
}

pub(super) struct BF16;

impl Element for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn columns<S: Simd>(from: *const u8, stride: usize, into: &mut [S::F]) {
        // SAFETY: the caller's promise.
        unsafe {
            let words = S::gather4(from, stride);
            let upper = S::splat_i(0xffff_0000_u32 as i32);
            for (pair, word) in into.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *pair = [S::bits_f(S::shl::<16>(word)), S::bits_f(S::and(word, upper))];
            }
        }
    }
}

/// A plain dtype in blocks of sixteen elements.
pub(super) struct Plain<E>(PhantomData<E>);

impl<E: Element> Format for Plain<E> {
    const LEN: usize = 16;
    const BYTES: usize = 16 * E::BYTES;
    const RECORD: usize = 64;
    const PLAIN: bool = true;

    type Block<S: Simd> = [S::F; 16];

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize) -> [S::F; 16] {
        // SAFETY: the caller's promise: the parts are within the block's bytes.
        unsafe {
            let mut columns = [S::splat_f(0.0); 16];
            for (i, part) in columns.chunks_exact_mut(16 / E::BYTES).enumerate() {
                E::columns::<S>(from.add(16 * i), stride, part);
            }
            columns
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[[S::F; 16]; P],
        x: [*const u8; R],
        count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise: `4 · count` bytes are readable at each x.
        let column = |j: usize, acc: &mut [[S::F; P]; R]| unsafe {
            for (x, acc) in x.iter().zip(acc) {
                let x = S::splat_f(ptr::read_unaligned(x.cast::<f32>().add(j)));
                for (w, acc) in w.iter().zip(acc) {
                    *acc = S::fma(w[j], x, *acc);
                }
            }
        };
        if count == 16 {
            for j in 0..16 {
                column(j, acc);
            }
        } else {
            for j in 0..count.min(16) {
                column(j, acc);
            }
        }
    }
}
