//! `softplus` of f32, many elements at a time: a power of all of them, then a logarithm.
//!
//! Of one element each step waits for the one before it, and a processor sees so many instructions ahead: of shorter ways it
//! has more elements in sight.

use super::code::{Code, LONG, Loop, wide_loop};
use crate::cpu::{
    lanes::ask_ahead,
    math::{softplus, softplus_power},
    path::CpuPath,
};

/// Elements of which there are powers at a time.
const BLOCK: usize = 256;

struct Softplus;

impl Loop for Softplus {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: [*const u8; 3], n: usize) {
        // SAFETY: the caller's promise ([`Code`]).
        let (out, x) = unsafe {
            (
                std::slice::from_raw_parts_mut(out.cast::<f32>(), n),
                std::slice::from_raw_parts(args[0].cast::<f32>(), n),
            )
        };
        let mut powers = [0.0; BLOCK];
        for (out, x) in out.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
            if n >= LONG {
                ask_ahead(x);
            }
            for (power, x) in powers.iter_mut().zip(x) {
                *power = softplus_power(*x);
            }
            for ((out, x), power) in out.iter_mut().zip(x).zip(&powers) {
                *out = softplus(*x, *power);
            }
        }
    }
}

/// It, with the bits of its parts in the catalogue.
pub(super) fn code(path: CpuPath) -> Code {
    wide_loop::<Softplus>(path)
}
