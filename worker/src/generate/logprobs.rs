//! Log probabilities of the model's raw logits.
//!
//! What is reported is the log softmax of the logits as the model (and a grammar mask, if one was applied before)
//! left them: before bias, penalties, temperature and truncation. OpenAI's API and vLLM's default
//! (`raw_logprobs`) mean the same.

use hotcell_kernels::cpu::draw::best_first;

use super::sampler::SamplingError;

/// `log(sum(exp(logits)))`, kept as maximum and log of the scaled sum.
#[derive(Clone, Copy, Debug)]
pub struct Normalizer {
    max: f32,
    log_sum: f64,
}

impl Normalizer {
    /// Reads all logits once. Minus infinity counts as probability zero.
    ///
    /// # Errors
    /// [`SamplingError::NotANumber`], [`SamplingError::Infinite`] or [`SamplingError::NothingPossible`] when there is
    /// no distribution to normalise.
    pub fn of(logits: &[f32]) -> Result<Self, SamplingError> {
        let max = checked_max(logits)?;
        // Summed in id order, in doubles: the order is part of the result.
        let sum: f64 = logits
            .iter()
            .map(|&logit| f64::from(libm::expf(logit - max)))
            .sum();
        Ok(Self {
            max,
            log_sum: libm::log(sum),
        })
    }

    /// The log probability of a token with this logit.
    #[must_use]
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.log_sum) as f32
    }
}

/// The largest logit, refusing what no honest forward pass produces.
pub(super) fn checked_max(logits: &[f32]) -> Result<f32, SamplingError> {
    let mut max = f32::NEG_INFINITY;
    let mut nan = false;
    for &logit in logits {
        nan |= logit.is_nan();
        if logit > max {
            max = logit;
        }
    }
    if nan {
        let token = logits.iter().position(|l| l.is_nan()).unwrap_or_default();
        return Err(SamplingError::NotANumber {
            token: token as u32,
        });
    }
    if max == f32::INFINITY {
        let token = logits
            .iter()
            .position(|l| *l == f32::INFINITY)
            .unwrap_or_default();
        return Err(SamplingError::Infinite {
            token: token as u32,
        });
    }
    if max == f32::NEG_INFINITY {
        return Err(SamplingError::NothingPossible);
    }
    Ok(max)
}

/// The `count` most probable tokens, best first, equal logits by lowest id. Tokens with probability zero are left out.
pub fn top(
    logits: &[f32],
    normalizer: &Normalizer,
    count: usize,
    scratch: &mut Vec<(f32, u32)>,
) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    scratch.clear();
    let finite = logits
        .iter()
        .enumerate()
        .filter(|(_, l)| **l > f32::NEG_INFINITY);
    scratch.extend(finite.map(|(id, &logit)| (logit, id as u32)));
    if scratch.len() > count {
        scratch.select_nth_unstable_by(count - 1, best_first);
        scratch.truncate(count);
    }
    scratch.sort_unstable_by(best_first);
    scratch
        .iter()
        .map(|&(logit, id)| (id, normalizer.logprob(logit)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_of_a_hand_case() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 5f32.ln()];
        let normalizer = Normalizer::of(&logits).expect("a distribution");
        for (logit, expected) in [(0, 1.0f32 / 8.0), (1, 2.0 / 8.0), (3, 5.0 / 8.0)] {
            assert!((normalizer.logprob(logits[logit]) - expected.ln()).abs() < 1e-6);
        }
        assert_eq!(normalizer.logprob(f32::NEG_INFINITY), f32::NEG_INFINITY);
        let best = top(&logits, &normalizer, 10, &mut Vec::new());
        assert_eq!(
            best.iter().map(|t| t.0).collect::<Vec<_>>(),
            [3, 1, 0],
            "the impossible token is left out"
        );
    }

    #[test]
    fn equal_logits_are_listed_by_id() {
        let logits = [1.0, -0.0, 1.0, 0.0, 1.0];
        let normalizer = Normalizer::of(&logits).expect("a distribution");
        let ids = |n| {
            top(&logits, &normalizer, n, &mut Vec::new())
                .iter()
                .map(|t| t.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(2), [0, 2]);
        assert_eq!(ids(4), [0, 2, 4, 1]);
    }
}
