//! How a cache stores the numbers of a head.

use super::vector::Vector;
use crate::cpu::lanes::{LANES, f32_to_bf16, f32_to_f16};

/// A stored form. A head of `d` numbers is `d / LEN · BYTES` bytes, at any alignment.
pub(super) trait Element: Send + Sync + 'static {
    /// Numbers that are stored together.
    const LEN: usize;
    /// Their bytes.
    const BYTES: usize;

    /// Stores as many numbers as `to` has room for; both are whole multiples of [`Element::LEN`].
    fn store(from: &[f32], to: &mut [u8]);

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

    fn store(from: &[f32], to: &mut [u8]) {
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

    fn store(from: &[f32], to: &mut [u8]) {
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

    fn store(from: &[f32], to: &mut [u8]) {
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
