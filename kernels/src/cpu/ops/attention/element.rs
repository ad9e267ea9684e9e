//! How a cache stores the numbers of a head.

use hotcell_graph::DType;

use super::vector::Vector;
use crate::cpu::{
    lanes::{LANES, f32_to_bf16, f32_to_f16},
    path::CpuPath,
    quantize::{prepare_row, scratch_bytes},
};

/// A stored form. A head of `d` numbers is `d / LEN · BYTES` bytes, at any alignment.
pub(super) trait Element: Send + Sync + 'static {
    /// Numbers that are stored together.
    const LEN: usize;
    /// Their bytes.
    const BYTES: usize;

    /// Stores as many numbers as `to` has room for; both are whole multiples of [`Element::LEN`].
    fn store(path: CpuPath, from: &[f32], to: &mut [u8]);

    /// Sixteen numbers of a head, from the number `first` on, which is a multiple of sixteen.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, and the head at `head` has these numbers.
    unsafe fn load<V: Vector>(head: *const u8, first: usize) -> V::F;

    /// Bytes of `n` numbers.
    fn bytes(n: usize) -> usize {
        n / Self::LEN * Self::BYTES
    }

    /// The same for the last `n` numbers of a head, fewer than sixteen: zeros come after them.
    ///
    /// # Safety
    ///
    /// As for [`Element::load`], of `n` numbers; for forms that store numbers one by one.
    #[inline(always)]
    unsafe fn load_some<V: Vector>(head: *const u8, first: usize, n: usize) -> V::F {
        let mut whole = [0u8; LANES * size_of::<f32>()];
        // SAFETY: the caller's promise; a number has four bytes at most, and there are fewer than sixteen.
        unsafe {
            let from = head.add(Self::bytes(first));
            from.copy_to_nonoverlapping(whole.as_mut_ptr(), Self::bytes(n.min(LANES)));
            Self::load::<V>(whole.as_ptr(), 0)
        }
    }
}

/// As they are.
pub(super) struct F32;

impl Element for F32 {
    const LEN: usize = 1;
    const BYTES: usize = 4;

    fn store(_: CpuPath, from: &[f32], to: &mut [u8]) {
        for (to, from) in to.as_chunks_mut::<4>().0.iter_mut().zip(from) {
            *to = from.to_ne_bytes();
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(head: *const u8, first: usize) -> V::F {
        // SAFETY: the caller's promise.
        unsafe { V::load(head.add(4 * first).cast()) }
    }
}

/// Rounded to half precision.
pub(super) struct F16;

impl Element for F16 {
    const LEN: usize = 1;
    const BYTES: usize = 2;

    fn store(_: CpuPath, from: &[f32], to: &mut [u8]) {
        for (to, from) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
            *to = f32_to_f16(*from).to_ne_bytes();
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(head: *const u8, first: usize) -> V::F {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(head.add(2 * first)) }
    }
}

/// Rounded to bfloat16.
pub(super) struct Bf16;

impl Element for Bf16 {
    const LEN: usize = 1;
    const BYTES: usize = 2;

    fn store(_: CpuPath, from: &[f32], to: &mut [u8]) {
        for (to, from) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
            *to = f32_to_bf16(*from).to_ne_bytes();
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(head: *const u8, first: usize) -> V::F {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(head.add(2 * first)) }
    }
}

/// Blocks of 32 as in GGUF: a half-precision scale, then 32 signed bytes. What is stored is what a product with such weights
/// makes of activations.
pub(super) struct Q8;

/// Bytes of a prepared block of 32.
const PREPARED: usize = scratch_bytes(DType::Q8_0, Q8::LEN);

impl Element for Q8 {
    const LEN: usize = 32;
    const BYTES: usize = 34;

    fn store(path: CpuPath, from: &[f32], to: &mut [u8]) {
        let (blocks, _) = to.as_chunks_mut::<34>();
        for (to, from) in blocks.iter_mut().zip(from.as_chunks::<32>().0) {
            let mut prepared = [0u8; PREPARED];
            prepare_row(path, DType::Q8_0, from, &mut prepared);
            let (numbers, rest) = prepared.split_at(Self::LEN);
            // The scale comes rounded to half precision already.
            let scale = rest.first_chunk().copied().map_or(0.0, f32::from_le_bytes);
            let (to_scale, to_numbers) = to.split_at_mut(2);
            to_scale.copy_from_slice(&f32_to_f16(scale).to_le_bytes());
            to_numbers.copy_from_slice(numbers);
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(head: *const u8, first: usize) -> V::F {
        // SAFETY: the caller's promise; a block begins with its scale.
        unsafe {
            let block = head.add(first / Self::LEN * Self::BYTES);
            let scale = u16::from_le_bytes(block.cast::<[u8; 2]>().read());
            let numbers = V::load_i8(block.add(2 + first % Self::LEN));
            // Exact: eleven bits by seven.
            V::mul(numbers, V::splat_f16(scale))
        }
    }
}
