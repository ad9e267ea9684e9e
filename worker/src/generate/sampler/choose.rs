//! Steps 3 to 7: from adjusted logits to a token.
//!
//! A vocabulary is long and a draw wants a few of its tokens, so what looks at all of them does it in loops that the
//! compiler turns into vectors, without keeping more than one number of each. All sums are of `f64` in an
//! order that only the lengths decide.

use hotcell_kernels::cpu::{
    draw::{RUN, best_first, passing, passing_run, run_sum, uniform, weigh},
    path::CpuPath,
};

use super::{Allowed, SamplingError, SamplingParams};
use crate::generate::logprobs::checked_max;

/// Memory that draws use again and again.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// The row with what a grammar forbids made impossible.
    row: Vec<f32>,
    weights: Vec<f32>,
    sums: Vec<f64>,
    candidates: Vec<(f32, u32)>,
}

impl Scratch {
    /// Room for some of the tokens.
    pub fn candidates(&mut self) -> &mut Vec<(f32, u32)> {
        &mut self.candidates
    }
}

/// Truncates and draws, among the allowed tokens if not all are.
pub(super) fn choose(
    params: &SamplingParams,
    scratch: &mut Scratch,
    logits: &[f32],
    allowed: Option<Allowed<'_>>,
    position: u32,
) -> Result<u32, SamplingError> {
    // What is not allowed may not hide that the model is broken.
    let max = checked_max(logits)?;
    let Some(allowed) = allowed else {
        return choose_of(params, scratch, logits, max, position);
    };
    let mut row = std::mem::take(&mut scratch.row);
    forbid(allowed, logits, &mut row);
    let max = checked_max(&row);
    let chosen = max.and_then(|max| choose_of(params, scratch, &row, max, position));
    scratch.row = row;
    chosen
}

/// A copy of the logits in which all but the allowed tokens are impossible.
fn forbid(allowed: Allowed<'_>, logits: &[f32], row: &mut Vec<f32>) {
    row.clear();
    row.resize(logits.len(), f32::NEG_INFINITY);
    let words = allowed.0.iter().copied();
    for ((row, logits), word) in row.chunks_mut(32).zip(logits.chunks(32)).zip(words) {
        match word {
            0 => {}
            u32::MAX => row.copy_from_slice(logits),
            _ => {
                for (bit, (to, logit)) in row.iter_mut().zip(logits).enumerate() {
                    if word >> bit & 1 == 1 {
                        *to = *logit;
                    }
                }
            }
        }
    }
}

fn choose_of(
    params: &SamplingParams,
    scratch: &mut Scratch,
    logits: &[f32],
    max: f32,
    position: u32,
) -> Result<u32, SamplingError> {
    if params.temperature == 0.0 || params.top_k == 1 {
        // The first of equals: `position` finds the lowest id.
        let first = logits.iter().position(|&logit| logit == max);
        return first
            .map(|id| id as u32)
            .ok_or(SamplingError::NothingPossible);
    }
    let noise = uniform(params.seed, params.branch, position);
    let Scratch {
        weights,
        sums,
        candidates,
        ..
    } = scratch;
    // A weight is exp((logit - max) / temperature), 1 for the best.
    let temperature = params.temperature;
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < logits.len() {
        largest(top_k, logits, candidates, weights);
        let path = CpuPath::detect();
        weights.clear();
        weights.resize(candidates.len(), 0.0);
        for (weight, candidate) in weights.iter_mut().zip(&*candidates) {
            *weight = candidate.0;
        }
        weigh(path, weights, max, temperature);
        for (candidate, weight) in candidates.iter_mut().zip(&*weights) {
            candidate.0 = *weight;
        }
        if params.top_p < 1.0 {
            let total = candidates.iter().map(|c| f64::from(c.0)).sum();
            top_p(candidates, f64::from(params.top_p), total, logits);
        }
    } else {
        weights.clear();
        weights.extend_from_slice(logits);
        weigh(CpuPath::detect(), weights, max, temperature);
        let numbered = || weights.iter().zip(0u32..);
        if params.top_p < 1.0 {
            let share = f64::from(params.top_p);
            let total = run_sums(weights, sums);
            // All tokens lighter than this together weigh less than (1 - share) * total, so none of them is needed to
            // reach the share: they go before sorting, and sorting is over a few hundred instead of the vocabulary.
            let negligible = (1.0 - share) * total / (weights.len() as f64 * 1.001);
            let heavy = numbered().filter(|(weight, _)| f64::from(**weight) >= negligible);
            candidates.clear();
            candidates.extend(heavy.map(|(&weight, id)| (weight, id)));
            top_p(candidates, share, total, logits);
        } else if params.min_p > 0.0 {
            let heavy = numbered().filter(|(weight, _)| **weight >= params.min_p);
            candidates.clear();
            candidates.extend(heavy.map(|(&weight, id)| (weight, id)));
        } else {
            return draw_of_all(weights, sums, noise);
        }
    }
    if params.min_p > 0.0 {
        candidates.retain(|candidate| candidate.0 >= params.min_p);
    }
    // The best candidate has weight 1, so the total is at least 1 and the loop below ends inside.
    let total: f64 = candidates
        .iter()
        .map(|candidate| f64::from(candidate.0))
        .sum();
    let numbered = candidates.iter().copied();
    passing(numbered, 0.0, noise * total).ok_or(SamplingError::NothingPossible)
}

/// The `k` largest logits, in the order of their ids; `room` is scratch.
fn largest(k: usize, logits: &[f32], candidates: &mut Vec<(f32, u32)>, room: &mut Vec<f32>) {
    // Of many pieces the k-th largest maximum: at least k logits reach it, and few others do.
    let piece = logits.len() / k.saturating_mul(8).max(1);
    let mut floor = f32::NEG_INFINITY;
    if piece >= 8 {
        room.clear();
        let max = |a: f32, b: &f32| if *b > a { *b } else { a };
        let maxima = logits.chunks(piece);
        room.extend(maxima.map(|piece| piece.iter().fold(f32::NEG_INFINITY, max)));
        let (_, kth, _) = room.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        // The order of zeros does not matter: what equals the floor stays.
        floor = *kth;
    }
    candidates.clear();
    let possible = |(logit, _): &(&f32, u32)| **logit >= floor && **logit > f32::NEG_INFINITY;
    let numbered = logits.iter().zip(0u32..).filter(possible);
    candidates.extend(numbered.map(|(&logit, id)| (logit, id)));
    if k < candidates.len() {
        // On logits, not weights: exponentials can make different logits equal.
        candidates.select_nth_unstable_by(k - 1, best_first);
        candidates.truncate(k);
        candidates.sort_unstable_by_key(|candidate| candidate.1);
    }
}

/// Keeps the smallest set of the heaviest candidates whose weight reaches `share` of the total; leaves them in id order.
fn top_p(candidates: &mut Vec<(f32, u32)>, share: f64, total: f64, logits: &[f32]) {
    let logit = |candidate: &(f32, u32)| {
        logits
            .get(candidate.1 as usize)
            .copied()
            .unwrap_or(f32::NEG_INFINITY)
    };
    candidates.sort_unstable_by(|a, b| best_first(&(logit(a), a.1), &(logit(b), b.1)));
    let mut sum = 0.0;
    let reached = candidates.iter().position(|candidate| {
        sum += f64::from(candidate.0);
        sum >= share * total
    });
    candidates.truncate(reached.map_or(candidates.len(), |index| index + 1));
    candidates.sort_unstable_by_key(|candidate| candidate.1);
}

/// The sums of [`RUN`] weights each, and their sum.
fn run_sums(weights: &[f32], sums: &mut Vec<f64>) -> f64 {
    sums.clear();
    sums.extend(weights.chunks(RUN).map(run_sum));
    sums.iter().sum()
}

/// Draws among all tokens: first a run, then a token in it.
fn draw_of_all(weights: &[f32], sums: &mut Vec<f64>, noise: f64) -> Result<u32, SamplingError> {
    let total = run_sums(weights, sums);
    let target = noise * total;
    let chosen = passing_run(sums.iter().copied(), target);
    let (run, before) = chosen.ok_or(SamplingError::NothingPossible)?;
    let first = run * RUN;
    let weights = weights.iter().copied().zip(0u32..);
    let run = weights.skip(first).take(RUN);
    passing(run, before, target).ok_or(SamplingError::NothingPossible)
}

#[cfg(test)]
mod tests {
    use hotcell_kernels::cpu::lanes;

    use super::*;

    /// Numbers of a coarse grid, so that many are equal.
    fn logits(n: u32) -> Vec<f32> {
        (0..n)
            .map(|id| (uniform(3, 0, id) * 40.0).floor() as f32 / 4.0 - 3.0)
            .collect()
    }

    #[test]
    fn the_largest_are_found_among_many_as_by_sorting_them() {
        for n in [70, 1000, 5000] {
            let mut logits = logits(n);
            logits[7] = f32::NEG_INFINITY;
            for k in [1, 2, 5, 40, 69, 4999] {
                let (mut found, mut room) = (vec![], vec![]);
                largest(k, &logits, &mut found, &mut room);
                let numbered = logits.iter().copied().zip(0u32..);
                let mut all: Vec<(f32, u32)> = numbered.filter(|c| c.1 != 7).collect();
                all.sort_by(best_first);
                all.truncate(k);
                all.sort_by_key(|candidate| candidate.1);
                assert_eq!(found, all, "{k} of {n}");
            }
        }
    }

    #[test]
    fn a_draw_among_all_is_where_the_sum_of_weights_passes_the_noise() {
        let logits = logits(2000);
        let params = SamplingParams {
            temperature: 0.7,
            seed: 5,
            ..SamplingParams::default()
        };
        let max = checked_max(&logits).unwrap_or(0.0);
        let weight = |logit: &f32| f64::from(lanes::exp((logit - max) / 0.7));
        let total: f64 = logits.iter().map(weight).sum();
        let mut scratch = Scratch::default();
        for position in 0..3000 {
            let target = uniform(5, 0, position) * total;
            let mut sum = 0.0;
            let expected = logits.iter().position(|logit| {
                sum += weight(logit);
                target < sum
            });
            let token = choose(&params, &mut scratch, &logits, None, position);
            assert_eq!(token.ok().map(|t| t as usize), expected, "{position}");
        }
    }

    #[test]
    fn paths_weigh_alike_in_every_bit() {
        let logits = logits(1003);
        let weights = CpuPath::available().into_iter().map(|path| {
            let mut weights = logits.clone();
            weigh(path, &mut weights, 7.0, 0.3);
            weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>()
        });
        let weights: Vec<Vec<u32>> = weights.collect();
        assert!(weights.iter().all(|w| *w == weights[0]));
    }
}
