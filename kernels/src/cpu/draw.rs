//! Drawing a token of a row of logits: the noise, the weights, and where their sum passes it. The op `draw` and the sampler
//! of workers, which may truncate before it draws, are made of this, so that they draw the same.

use std::cmp::Ordering;

use super::{
    lanes::{self, dispatch},
    path::CpuPath,
};

/// Weights whose sum is taken by itself, when sums over a row are taken.
pub const RUN: usize = 256;

/// Logits of a row of which devices draw at most; of longer rows the processor does.
pub const MOST_ON_DEVICES: usize = 2048 * RUN;

/// The rotation distances of Threefry-2x32, from Random123's `threefry.h`.
const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];

/// Threefish's key schedule parity constant, 32-bit form (`SKEIN_KS_PARITY32`).
const PARITY: u32 = 0x1BD1_1BDA;

/// One block of Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
/// 2011; the Random123 library): encrypts `counter` under `key`.
#[must_use]
#[inline(always)]
pub fn threefry2x32(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let keys = [key[0], key[1], PARITY ^ key[0] ^ key[1]];
    let mut a = counter[0].wrapping_add(keys[0]);
    let mut b = counter[1].wrapping_add(keys[1]);
    for group in 0..5 {
        for by in ROTATIONS[group % 2] {
            a = a.wrapping_add(b);
            b = b.rotate_left(by) ^ a;
        }
        a = a.wrapping_add(keys[(group + 1) % 3]);
        b = b.wrapping_add(keys[(group + 2) % 3]);
        b = b.wrapping_add(group as u32 + 1);
    }
    [a, b]
}

/// A uniform number in `[0, 1)` with 53 random bits, for one position of one branch of one request. Nothing here has state, so
/// that a worker that takes over a stream in the middle draws exactly what the dead one would have drawn, and a batch's
/// neighbours cannot change a draw.
///
/// `position` is absolute: the index in the sequence (prompt included) of the token being drawn. `branch` tells
/// apart the answers of a request that asked for several.
#[must_use]
pub fn uniform(seed: u64, branch: u32, position: u32) -> f64 {
    let [seed_low, seed_high] = halves(seed);
    of_noise([seed_low, seed_high, branch, position])
}

/// The lower and the upper half of a seed, as the op `draw` has them.
#[must_use]
pub fn halves(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

fn of_noise([seed_low, seed_high, branch, position]: [u32; 4]) -> f64 {
    let [low, high] = threefry2x32([seed_low, seed_high], [position, branch]);
    let bits = (u64::from(high) << 32) | u64::from(low);
    // 53 bits fill a double's mantissa exactly, so the largest result is 1 - 2^-53, never 1.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

dispatch! {
    /// Makes weights of logits: `exp((logit - max) / temperature)`, 1 for the best.
    pub fn weigh(weights: &mut [f32], max: f32, temperature: f32) -> () = weigh_body;
}

#[inline(always)]
fn weigh_body(weights: &mut [f32], max: f32, temperature: f32) {
    for weight in weights {
        *weight = lanes::exp((*weight - max) / temperature);
    }
}

/// The sum of at most [`RUN`] weights.
#[must_use]
pub fn run_sum(run: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (whole, rest) = run.as_chunks::<8>();
    for eight in whole {
        for (lane, weight) in lanes.iter_mut().zip(eight) {
            *lane += f64::from(*weight);
        }
    }
    for (lane, weight) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*weight);
    }
    lanes.iter().sum()
}

/// The first token at which the sum of weights, from `sum` on, passes `target`; by rounding it may be the last.
pub fn passing(
    weights: impl Iterator<Item = (f32, u32)>,
    mut sum: f64,
    target: f64,
) -> Option<u32> {
    let mut last = None;
    for (weight, id) in weights.filter(|(weight, _)| *weight > 0.0) {
        sum += f64::from(weight);
        last = Some(id);
        if target < sum {
            break;
        }
    }
    last
}

/// The run in which the sum of weights passes `target`, and the sum of those before it, by the sums of all runs; by rounding
/// it may be the last.
pub fn passing_run(sums: impl Iterator<Item = f64>, target: f64) -> Option<(usize, f64)> {
    let mut before = 0.0;
    let mut chosen = None;
    for (run, sum) in sums.enumerate().filter(|(_, sum)| *sum > 0.0) {
        chosen = Some((run, before));
        if target < before + sum {
            break;
        }
        before += sum;
    }
    chosen
}

/// The largest, unless one is NaN or plus infinity or all are minus infinity.
fn largest(logits: &[f32]) -> Option<f32> {
    // Two passes of which each is made of vectors.
    let max = |a: f32, b: &f32| if *b > a { *b } else { a };
    let largest = logits.iter().fold(f32::NEG_INFINITY, max);
    let broken = logits.iter().fold(false, |any, v| any | v.is_nan());
    (!broken && largest.is_finite()).then_some(largest)
}

/// Which tokens a draw is among. By default all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The largest so many; 0: all.
    pub top_k: f32,
    /// Of these, the fewest of the largest whose weights reach this share of theirs; 1: all.
    pub top_p: f32,
    /// Of these, those that weigh so much at least, where the largest weighs 1; 0: all.
    pub min_p: f32,
}

/// Tokens that [`draw_among`] looks at, if not at all: the largest. Where more may be left, it draws none.
pub const MOST_LEFT: usize = 256;

/// How much more others may weigh than the last of those that are looked at, since another logit's weight may be another
/// rounding away.
const SLACK: f64 = 1.001;

impl Limits {
    /// All tokens.
    pub const NONE: Self = Self {
        top_k: 0.0,
        top_p: 1.0,
        min_p: 0.0,
    };

    /// As the op has them, row by row.
    #[must_use]
    pub fn of([top_k, top_p, min_p]: [f32; 3]) -> Self {
        Self {
            top_k,
            top_p,
            min_p,
        }
    }

    /// How many of so many tokens are looked at; `None`: all.
    fn largest(&self, n: usize) -> Option<usize> {
        // What is no number is no limit.
        let k = self.top_k as usize;
        (k > 0 && k < n).then_some(k)
    }
}

/// The order of candidates, logit and token: the largest first, of equals the lowest token.
#[must_use]
pub fn best_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // `total_cmp` would put -0.0 below 0.0; the two are the same logit.
    let by_logit = b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal);
    by_logit.then(a.1.cmp(&b.1))
}

/// As [`draw`], among those tokens that limits leave. `None` as well where more than [`MOST_LEFT`] of them may be left, unless
/// all are.
#[must_use]
pub fn draw_among(
    path: CpuPath,
    logits: &[f32],
    temperature: f32,
    noise: [u32; 4],
    limits: Limits,
) -> Option<u32> {
    let n = logits.len();
    let (some, share, least_weight) = (limits.largest(n), limits.top_p, limits.min_p);
    if temperature == 0.0 || some == Some(1) {
        return draw(path, logits, 0.0, noise);
    }
    if some.is_none() && !(share < 1.0 || least_weight > 0.0) {
        return draw(path, logits, temperature, noise);
    }
    let max = largest(logits)?;
    if some.is_some_and(|k| k > MOST_LEFT) {
        return None;
    }
    let numbered = logits.iter().copied().zip(0u32..);
    let mut best: Vec<(f32, u32)> = numbered.filter(|c| c.0 > f32::NEG_INFINITY).collect();
    let is_full = best.len() > MOST_LEFT;
    if is_full {
        best.select_nth_unstable_by(MOST_LEFT - 1, best_first);
        best.truncate(MOST_LEFT);
    }
    best.sort_unstable_by(best_first);
    best.truncate(some.unwrap_or(MOST_LEFT));
    let mut weights: Vec<f32> = best.iter().map(|c| c.0).collect();
    weigh(path, &mut weights, max, temperature);
    let ids = best.into_iter().map(|c| c.1);
    let mut left: Vec<(f32, u32)> = weights.into_iter().zip(ids).collect();
    let last = left.last().map_or(0.0, |c| f64::from(c.0)) * SLACK;
    let by_place = |all: &mut Vec<(f32, u32)>| all.sort_unstable_by_key(|c| c.1);
    if share < 1.0 {
        let share = f64::from(share);
        let (total, least) = match some {
            Some(_) => {
                let mut placed = left.clone();
                by_place(&mut placed);
                (sum(&placed), 0.0)
            }
            None => {
                let mut room = [0.0f32; RUN];
                let run = |run: &[f32]| {
                    let weights = room.get_mut(..run.len()).unwrap_or_default();
                    weights.copy_from_slice(run);
                    weigh(path, weights, max, temperature);
                    run_sum(weights)
                };
                let total: f64 = logits.chunks(RUN).map(run).sum();
                // Those that are lighter weigh less than what need not be reached, all of them together.
                (total, (1.0 - share) * total / (n as f64 * 1.001))
            }
        };
        left.retain(|c| f64::from(c.0) >= least);
        let mut so_far = 0.0;
        let reached = left.iter().position(|c| {
            so_far += f64::from(c.0);
            so_far >= share * total
        });
        match reached {
            Some(at) => left.truncate(at + 1),
            None if some.is_none() && is_full && last >= least => return None,
            None => {}
        }
    } else if some.is_none() && is_full && last >= f64::from(least_weight) {
        return None;
    }
    if least_weight > 0.0 {
        left.retain(|c| c.0 >= least_weight);
    }
    by_place(&mut left);
    let target = of_noise(noise) * sum(&left);
    passing(left.into_iter(), 0.0, target)
}

fn sum(weights: &[(f32, u32)]) -> f64 {
    weights.iter().map(|c| f64::from(c.0)).sum()
}

/// What the op `draw` draws of a row; `noise` is a seed's lower and upper half, a branch, and a position. `None`: a logit is NaN
/// or plus infinity, or none weighs anything.
#[must_use]
pub fn draw(path: CpuPath, logits: &[f32], temperature: f32, noise: [u32; 4]) -> Option<u32> {
    let max = largest(logits)?;
    if temperature == 0.0 {
        // `position` finds the first of equals.
        let first = logits.iter().position(|&logit| logit == max)?;
        return u32::try_from(first).ok();
    }
    let mut room = [0.0f32; RUN];
    let mut weights = |run: &[f32]| {
        let weights = room.get_mut(..run.len()).unwrap_or_default();
        weights.copy_from_slice(run);
        weigh(path, weights, max, temperature);
        run_sum(weights)
    };
    let runs = || logits.chunks(RUN);
    let total: f64 = runs().map(&mut weights).sum();
    let target = of_noise(noise) * total;
    let (run, before) = passing_run(runs().map(&mut weights), target)?;
    let chosen = runs().nth(run)?;
    weights(chosen);
    let first = u32::try_from(run.checked_mul(RUN)?).ok()?;
    let numbered = room.iter().copied().take(chosen.len()).zip(first..);
    passing(numbered, before, target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        // From Random123's kat_vectors: "threefry2x32 20 <counter> <key> <result>".
        assert_eq!(threefry2x32([0, 0], [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry2x32([!0, !0], [!0, !0]), [0x1cb9_96fc, 0xbb00_2be7]);
        assert_eq!(
            threefry2x32([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]),
            [0xc492_3a9c, 0x483d_f7a0]
        );
    }

    #[test]
    fn uniform_stays_in_the_half_open_interval_and_fills_it() {
        let mut buckets = [0u32; 16];
        for position in 0..16_000 {
            let draw = uniform(0x0123_4567_89ab_cdef, 3, position);
            assert!((0.0..1.0).contains(&draw));
            buckets[(draw * 16.0) as usize] += 1;
        }
        // Chi-square with 15 degrees of freedom: 37.7 is the 0.1 % point.
        let chi: f64 = buckets
            .iter()
            .map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0)
            .sum();
        assert!(chi < 37.7, "chi-square {chi}");
    }

    #[test]
    fn every_coordinate_changes_the_draw() {
        let base = uniform(7, 0, 0);
        for other in [
            uniform(8, 0, 0),
            uniform(7, 1, 0),
            uniform(7, 0, 1),
            uniform(7 | 1 << 32, 0, 0),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
    }
}
