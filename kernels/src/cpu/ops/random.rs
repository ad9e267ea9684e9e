//! Random bits: Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! 2011), counted as MLX's `random.bits` does.

use hotcell_graph::{DType, op::Call};

use super::{Entry, movement::result, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::dispatch,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "random_bits",
    supports: key_fits,
    launch: random_bits,
}];

#[inline(always)]
fn threefry(key: [u32; 2], mut a: u32, mut b: u32) -> [u32; 2] {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1bd1_1bda];
    a = a.wrapping_add(keys[0]);
    b = b.wrapping_add(keys[1]);
    for i in 0..5 {
        for r in ROTATIONS[i % 2] {
            a = a.wrapping_add(b);
            b = b.rotate_left(r) ^ a;
        }
        a = a.wrapping_add(keys[(i + 1) % 3]);
        b = b.wrapping_add(keys[(i + 2) % 3]).wrapping_add(i as u32 + 1);
    }
    [a, b]
}

/// Word `word` of the hashes of counters `(first + i, second + i)`.
#[inline(always)]
fn words_body(key: [u32; 2], first: u32, second: u32, word: usize, out: &mut [u32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let i = i as u32;
        let words = threefry(key, first.wrapping_add(i), second.wrapping_add(i));
        *o = if word == 0 { words[0] } else { words[1] };
    }
}

dispatch! {
    fn words(key: [u32; 2], first: u32, second: u32, word: usize, out: &mut [u32]) = words_body;
}

struct Bits {
    key: Reg,
    out: Reg,
    n: usize,
}

impl Kernel for Bits {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let range = split_if_worth(self.n, 64, 2048, part, parts);
        // SAFETY: the specs say these sizes; parts write elements of their own.
        let (key, out) = unsafe {
            (
                run.slice::<u32>(self.key, 2),
                run.slice_mut::<u32>(self.out, range.clone()),
            )
        };
        let key = [key[0], key[1]];
        // Both words of a hash are used, half of the tensor apart; the middle of an odd number has
        // a hash of its own.
        let (half, odd) = (self.n / 2, self.n % 2);
        let upper = half + odd;
        let low_end = half.clamp(range.start, range.end);
        let high_start = upper.clamp(range.start, range.end);
        let (low, rest) = out.split_at_mut(low_end - range.start);
        let (middle, high) = rest.split_at_mut(high_start - low_end);
        let at = range.start;
        words(run.path, key, at as u32, (upper + at) as u32, 0, low);
        middle
            .iter_mut()
            .for_each(|o| *o = threefry(key, half as u32, 0)[0]);
        let at = high_start.saturating_sub(upper);
        words(run.path, key, at as u32, (upper + at) as u32, 1, high);
    }
}

fn key_fits(call: &Call<'_>) -> bool {
    call.tensor_of(0, DType::U32).is_ok()
}

fn random_bits(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[key], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let (_, shape) = result(call)?;
    let n = shape.elements(0).ok_or_else(|| unsupported(call))?;
    launcher.step(Bits { key, out, n }, &[key], &[out]);
    Ok(())
}
