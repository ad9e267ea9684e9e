//! The block dtypes that have no more than a scale, and a minimum, for each sub-block. For those of 256 elements, which have scales
//! within a scale, see [`scaled`](super::scaled).

use std::arch::x86_64::*;

use super::super::avx512::Avx512;
use super::super::block32::{Block, Bytes, E2M1_ZERO, Mxfp4, Nibbles};
use super::super::block64::Nvfp4;
use super::super::format::Format;
use super::Config;
use crate::cpu::lanes::LANES;

/// A block dtype whose sub-blocks tiles multiply.
///
/// # Safety
///
/// As for [`Format`]; the block is unpacked, and the processor has AVX-512.
pub(in super::super) trait Tiled: Format {
    /// Weights of a sub-block.
    const SUB: usize;
    /// What was added to the weights to make them unsigned, as a byte.
    const ZERO: i8;
    /// Four tiles of dots, and twice the activations and the weights of a sub-block.
    const CONFIG: &'static Config;

    /// Where a block has its weights: of each four the sixteen rows.
    fn weights(block: *const Self::Block<Avx512>) -> *const u8;

    /// The scales of a sub-block.
    unsafe fn scale(block: *const Self::Block<Avx512>, sub: usize) -> __m512;

    /// What is added for each unit of the activations' sum.
    unsafe fn minimum(block: *const Self::Block<Avx512>) -> Option<__m512>;
}

/// Tiles for sub-blocks of this many weights.
const fn config(sub: usize) -> Config {
    let (x, w) = ([LANES as u8, sub as u8], [(sub / 4) as u8, 64]);
    let dots = [LANES as u8, 64];
    Config::new([dots, dots, dots, dots, x, w, x, w])
}
static OF_32: Config = config(32);
static OF_16: Config = config(16);

macro_rules! of_32 {
    ($($format:ty: $zero:expr, $minimum:literal;)*) => { $(
        impl Tiled for $format {
            const SUB: usize = 32;
            const ZERO: i8 = $zero;
            const CONFIG: &'static Config = &OF_32;

            #[inline(always)]
            fn weights(block: *const Block<Avx512>) -> *const u8 {
                // SAFETY: no more than the address of a field, of a block that need not be read.
                unsafe { (&raw const (*block).q).cast() }
            }

            #[inline(always)]
            unsafe fn scale(block: *const Block<Avx512>, _: usize) -> __m512 {
                // SAFETY: the caller's promise.
                unsafe { (*block).d }
            }

            #[inline(always)]
            unsafe fn minimum(block: *const Block<Avx512>) -> Option<__m512> {
                // SAFETY: the caller's promise.
                $minimum.then(|| unsafe { (*block).m })
            }
        }
    )* };
}
of_32! {
    Nibbles<false, false>: 8, false;
    Nibbles<true, false>: 16, false;
    Nibbles<false, true>: 0, true;
    Nibbles<true, true>: 0, true;
    Bytes: -128, false;
    Mxfp4: E2M1_ZERO, false;
}

impl Tiled for Nvfp4 {
    const SUB: usize = 16;
    const ZERO: i8 = E2M1_ZERO;
    const CONFIG: &'static Config = &OF_16;

    #[inline(always)]
    fn weights(block: *const Self::Block<Avx512>) -> *const u8 {
        // SAFETY: no more than the address of a field, of a block that need not be read.
        unsafe { (&raw const (*block).q).cast() }
    }

    #[inline(always)]
    unsafe fn scale(block: *const Self::Block<Avx512>, sub: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { (*block).d[sub] }
    }

    #[inline(always)]
    unsafe fn minimum(_: *const Self::Block<Avx512>) -> Option<__m512> {
        None
    }
}
