//! Random bits: Threefry-2x32 with 20 rounds, counted as MLX's `random.bits` does; and draws by a sampler's noise.

use hotcell_graph::{DType, Shape, op::Call};

use super::{Entry, movement::result, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        draw::{self, Limits, threefry2x32},
        lanes::dispatch,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "random_bits",
        supports: key_fits,
        launch: random_bits,
    },
    Entry {
        op: "draw",
        supports: any,
        launch: draw_rows,
    },
];

/// Word `word` of the hashes of counters `(first + i, second + i)`.
#[inline(always)]
fn words_body(key: [u32; 2], first: u32, second: u32, word: usize, out: &mut [u32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let i = i as u32;
        let words = threefry2x32(key, [first.wrapping_add(i), second.wrapping_add(i)]);
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
            .for_each(|o| *o = threefry2x32(key, [half as u32, 0])[0]);
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

/// The row is all that it takes.
fn any(_: &Call<'_>) -> bool {
    true
}

struct Draw {
    logits: Reg,
    temperature: Reg,
    noise: Reg,
    /// Which tokens are left; none: all.
    limits: Option<Reg>,
    out: Reg,
    /// How many rows, and how long they are.
    rows: Shape,
    n: usize,
}

impl Kernel for Draw {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let rows = self.rows.elements(run.rows).unwrap_or(0);
        let range = split_if_worth(rows, 1, 1, part, parts);
        let count = range.len();
        // SAFETY: the specs say these sizes; parts write rows of their own.
        let (logits, temperatures, noise, out) = unsafe {
            (
                run.slice::<f32>(self.logits, rows * self.n),
                run.slice::<f32>(self.temperature, rows),
                run.slice::<[u32; 4]>(self.noise, rows),
                run.slice_mut::<i32>(self.out, range.clone()),
            )
        };
        // SAFETY: as above.
        let limits = self
            .limits
            .map(|reg| unsafe { run.slice::<[f32; 3]>(reg, rows) });
        let rows = logits.chunks(self.n.max(1)).zip(temperatures).zip(noise);
        let rows = rows.enumerate().skip(range.start).take(count);
        for ((row, ((x, t), noise)), out) in rows.zip(out) {
            if run.stopped() {
                return;
            }
            let limits = limits.and_then(|all| all.get(row));
            let limits = limits.map_or(Limits::NONE, |limits| Limits::of(*limits));
            let token = draw::draw_among(run.path, x, *t, *noise, limits);
            *out = token.and_then(|t| i32::try_from(t).ok()).unwrap_or(-1);
        }
    }
}

fn draw_rows(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[logits, temperature, noise, ref limits @ ..], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let limits = limits.first().copied().filter(|reg| *reg != Reg::ABSENT);
    let n = call.tensor(0)?.shape.dims().last().map(|dim| dim.at(0));
    let (_, rows) = result(call)?;
    let step = Draw {
        logits,
        temperature,
        noise,
        limits,
        out,
        rows,
        n: n.ok_or_else(|| unsupported(call))?,
    };
    let reads: Vec<Reg> = [logits, temperature, noise]
        .into_iter()
        .chain(limits)
        .collect();
    launcher.step(step, &reads, &[out]);
    Ok(())
}
