//! Activations as the block-type kernels read them: quantised to int8 once per row, before the
//! multiplication, so that every output of the row sees the same integers.
//!
//! Plain weight dtypes read the `f32` activations directly and prepare nothing. The 32-element block
//! types share one form, which NVFP4 with its 64 elements reads two by two, and the 256-element ones another
//! ([`Activation`]), so a row prepared for Q4_K serves Q6_K too. A row of `k` elements becomes `k / len` records:
//!
//! | bytes of a [`Activation::Q8`] record | |
//! |---|---|
//! | 0..32 | `q`, 32 × i8 |
//! | 32..36 | `da`, f32: `amax / 127` rounded to half precision |
//! | 36..40 | `−Σ q`, i32 |
//! | 40..44 | `f32(Σ q) · da`, f32 |
//!
//! | bytes of a [`Activation::Q8K`] record | |
//! |---|---|
//! | 0..256 | `q`, 256 × i8 |
//! | 256..260 | `da`, f32: `amax / 127` |
//! | 260..276 | Σ q over each 32, 8 × i16 in the order 0 2 1 3 4 6 5 7 |
//! | 276..340 | `−32 · Σ q` over each 16, 16 × i32 |
//! | 340..372 | `−Σ q` over each 16, 16 × i16 in the order 0 2 1 3 4 6 5 7 8 10 and so on |
//!
//! `q = clamp(round_ties_even(x · (127 / amax)), −127, 127)` with `amax` the block's largest absolute value. A block
//! whose `127 / amax` is not finite (`amax` zero, or below 3.8e-37) is all zeros with `da = 0`. A block that
//! holds an infinity or a NaN is all zeros with `da = NaN`: every output of that row becomes NaN, and
//! a poisoned input cannot turn into a plausible number. An `amax` above 127 · 65504 makes the rounded `da` of
//! [`Activation::Q8`] infinite, and the outputs inf or NaN.

#[cfg(target_arch = "x86_64")]
mod avx512;

use hotcell_graph::DType;

use super::lanes::{LANES, dispatch, f16_to_f32, f32_to_f16};
use super::path::CpuPath;

/// The form in which a weight dtype wants its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// As they are; nothing is prepared.
    F32,
    /// Int8 in blocks of 32 with a half-precision scale.
    Q8,
    /// Int8 in blocks of 256 with an `f32` scale.
    Q8K,
}

/// Bytes of a [`Activation::Q8`] record.
pub(super) const Q8_RECORD: usize = 44;
/// Bytes of a [`Activation::Q8K`] record.
pub(super) const Q8K_RECORD: usize = 372;

impl Activation {
    /// The form that weights of `dtype` want.
    pub const fn of(dtype: DType) -> Activation {
        match dtype.block_len() {
            32 | 64 => Activation::Q8,
            256 => Activation::Q8K,
            _ => Activation::F32,
        }
    }
}

/// Bytes that one prepared row of `k` activations takes for weights of `dtype`; 0 for plain dtypes.
/// Whole blocks only: a remainder of `k` is not counted (and not accepted by [`prepare_row`]).
pub const fn scratch_bytes(dtype: DType, k: usize) -> usize {
    match Activation::of(dtype) {
        Activation::F32 => 0,
        Activation::Q8 => k / 32 * Q8_RECORD,
        Activation::Q8K => k / 256 * Q8K_RECORD,
    }
}

/// Quantises the row `x` into `scratch` as weights of `dtype` want it; nothing for plain dtypes.
///
/// # Panics
///
/// When `x.len()` is no multiple of the dtype's block length, or `scratch` is not exactly
/// [`scratch_bytes`] long.
pub fn prepare_row(path: CpuPath, dtype: DType, x: &[f32], scratch: &mut [u8]) {
    assert!(
        x.len().is_multiple_of(dtype.block_len()),
        "{} activations for {dtype}",
        x.len()
    );
    assert_eq!(
        scratch.len(),
        scratch_bytes(dtype, x.len()),
        "scratch of a {dtype} row"
    );
    match Activation::of(dtype) {
        Activation::F32 => {}
        Activation::Q8 => prepare_q8(path, x, scratch),
        Activation::Q8K => prepare_q8k(path, x, scratch),
    }
}

/// Rounds to an integer, ties to even, and leaves it in the low bits of the sum.
const SHIFT: f32 = 12_582_912.0;

/// How a block is scaled.
#[derive(Clone, Copy)]
struct Scale {
    /// `127 / amax`; of a block that is all zeros, none.
    inverse: Option<f32>,
    /// Before any rounding to half precision.
    da: f32,
}

/// That of a block whose largest absolute value has these bits.
#[inline(always)]
fn scale(top: u32) -> Scale {
    let amax = f32::from_bits(top);
    let inverse = 127.0 / amax;
    let zeros = |da| Scale { inverse: None, da };
    match top >= 0x7f80_0000 {
        true => zeros(f32::NAN),
        false if !inverse.is_finite() => zeros(0.0),
        false => Scale {
            inverse: Some(inverse),
            da: amax / 127.0,
        },
    }
}

/// What follows the codes of a record of [`Activation::Q8`].
#[inline(always)]
fn close_q8(record: &mut [u8; Q8_RECORD], da: f32, sum: i32) {
    record[32..36].copy_from_slice(&da.to_le_bytes());
    record[36..40].copy_from_slice(&(-sum).to_le_bytes());
    record[40..44].copy_from_slice(&(sum as f32 * da).to_le_bytes());
}

fn prepare_q8(path: CpuPath, x: &[f32], scratch: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if path.vectors() == CpuPath::Avx512Vnni {
        // SAFETY: `vectors` returned the path, so the processor has its instructions.
        return unsafe { avx512::q8(x, scratch) };
    }
    dispatched_q8(path, x, scratch);
}

fn prepare_q8k(path: CpuPath, x: &[f32], scratch: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if path.vectors() == CpuPath::Avx512Vnni {
        // SAFETY: as above.
        return unsafe { avx512::q8k(x, scratch) };
    }
    dispatched_q8k(path, x, scratch);
}

dispatch! {
    fn dispatched_q8(x: &[f32], scratch: &mut [u8]) = q8_body;
}

dispatch! {
    fn dispatched_q8k(x: &[f32], scratch: &mut [u8]) = q8k_body;
}

#[inline(always)]
fn q8_body(x: &[f32], scratch: &mut [u8]) {
    let (blocks, _) = x.as_chunks::<32>();
    let (records, _) = scratch.as_chunks_mut::<Q8_RECORD>();
    for (x, record) in blocks.iter().zip(records) {
        let mut sums = [0i32; 2];
        let da = quantize_block(x, &mut record[..32], &mut sums);
        close_q8(record, f16_to_f32(f32_to_f16(da)), sums[0] + sums[1]);
    }
}

#[inline(always)]
fn q8k_body(x: &[f32], scratch: &mut [u8]) {
    let (blocks, _) = x.as_chunks::<256>();
    let (records, _) = scratch.as_chunks_mut::<Q8K_RECORD>();
    for (x, record) in blocks.iter().zip(records) {
        let (q, rest) = record.split_at_mut(256);
        let mut sums = [0i32; 16];
        let da = quantize_block(x, q, &mut sums);
        rest[0..4].copy_from_slice(&da.to_le_bytes());
        for (slot, j) in [0, 2, 1, 3, 4, 6, 5, 7].into_iter().enumerate() {
            let sum = (sums[2 * j] + sums[2 * j + 1]) as i16;
            rest[4 + 2 * slot..][..2].copy_from_slice(&sum.to_le_bytes());
        }
        for (j, sum) in sums.iter().enumerate() {
            rest[20 + 4 * j..][..4].copy_from_slice(&(-32 * sum).to_le_bytes());
            // The two in the middle of four change places.
            let slot = (j & !3) | ((j & 1) << 1) | ((j >> 1) & 1);
            rest[84 + 2 * slot..][..2].copy_from_slice(&(-sum as i16).to_le_bytes());
        }
    }
}

/// Quantises one block, sums it per 16, returns `da` before any rounding to half precision.
#[inline(always)]
fn quantize_block(x: &[f32], q: &mut [u8], sums: &mut [i32]) -> f32 {
    let (x, _) = x.as_chunks::<LANES>();
    let (q, _) = q.as_chunks_mut::<LANES>();
    // The bits of absolute values order like integers, with inf and NaN above every number.
    let mut top = [0u32; LANES];
    for run in x {
        for (t, v) in top.iter_mut().zip(run) {
            *t = (*t).max(v.to_bits() & 0x7fff_ffff);
        }
    }
    let scale = scale(top.into_iter().fold(0, u32::max));
    let Some(inverse) = scale.inverse else {
        q.iter_mut().for_each(|run| run.fill(0));
        sums.fill(0);
        return scale.da;
    };
    for ((run, q), sum) in x.iter().zip(q).zip(sums) {
        let mut ints = [0i32; LANES];
        for (i, v) in ints.iter_mut().zip(run) {
            // Shared memory may hold another number by now, even one above `amax`: then any number will do that a code can hold.
            let shifted = v * inverse + SHIFT;
            *i = (shifted.to_bits() as i32)
                .wrapping_sub(SHIFT.to_bits() as i32)
                .clamp(-127, 127);
        }
        let mut total = 0;
        for (i, q) in ints.into_iter().zip(q) {
            *q = i as u8;
            total += i;
        }
        *sum = total;
    }
    scale.da
}

#[cfg(test)]
mod tests {
    use hotcell_graph::DType;
    use proptest::prelude::*;

    use super::{CpuPath, prepare_row, scratch_bytes};

    /// Numbers of all sizes, halves of codes and what makes a block zeros among them.
    fn number() -> impl Strategy<Value = f32> {
        prop_oneof![
            300 => -4.0f32..4.0,
            100 => (-254i32..255).prop_map(|half| half as f32 / 2.0),
            20 => Just(127.0f32),
            20 => Just(-0.0f32),
            4 => any::<u32>().prop_map(f32::from_bits),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NEG_INFINITY),
        ]
    }

    /// Blocks of one kind: nothing, numbers that are too small, large or usual ones, or any.
    fn blocks() -> impl Strategy<Value = Vec<f32>> {
        prop_oneof![Just(32), Just(256), Just(512)].prop_flat_map(|count| {
            prop_oneof![
                1 => Just(vec![0.0; count]),
                1 => prop::collection::vec(-1e-37f32..1e-37, count),
                1 => prop::collection::vec(-3e38f32..3e38, count),
                6 => prop::collection::vec(-4.0f32..4.0, count),
                6 => prop::collection::vec(number(), count),
            ]
        })
    }

    proptest! {
        #[test]
        fn all_paths_make_the_same_records(blocks in prop::collection::vec(blocks(), 1..8)) {
            let x = blocks.concat();
            for dtype in [DType::Q8_0, DType::Q4K] {
                let x = &x[..x.len() / dtype.block_len() * dtype.block_len()];
                let records = |path| {
                    let mut scratch = vec![0xaa; scratch_bytes(dtype, x.len())];
                    prepare_row(path, dtype, x, &mut scratch);
                    scratch
                };
                let wanted = records(CpuPath::Portable);
                for path in CpuPath::available() {
                    prop_assert_eq!(&records(path), &wanted, "{} {}", path, dtype);
                }
            }
        }
    }
}
