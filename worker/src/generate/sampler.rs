//! From one row of logits to one token: pure, deterministic, and the same on every machine.
//!
//! The steps, in this order:
//!
//! 1. logit bias is added;
//! 2. penalties: repetition (over prompt and output: positive logits divided, negative multiplied), then frequency
//!    (times the count in the output) and presence (once if in the output), as vLLM and OpenAI define them;
//!    Then what a grammar forbids becomes impossible;
//! 3. temperature 0: the largest logit, lowest id among equals. Otherwise logits are divided by the temperature;
//! 4. top-k keeps the k largest; 5. top-p keeps the smallest set of the most probable whose share of what
//!    top-k left reaches p (the token that crosses the line is kept); 6. min-p drops what is less probable than
//!    p times the most probable. Equal logits are ordered by id, so each set is unique;
//! 7. one uniform number, keyed by (seed, branch, absolute position), picks by inverse CDF in id order.
//!
//! Exponentials are the kernels' own, equal on every instruction path, those of log probabilities and logarithms the
//! `libm` crate's, and sums run in a fixed order, so that a system's math library has no say. llama.cpp and vLLM order the truncations alike up to min-p, which vLLM applies first.

use std::collections::HashMap;

use hotcell_kernels::cpu::draw::{Limits, MOST_LEFT};
use hotcell_proto::limits::{MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS};

mod choose;

use super::logprobs::{self, Normalizer};
use choose::{Scratch, choose};

/// How a request wants its tokens chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; 1 is the model's own distribution. In [0, 100].
    pub temperature: f32,
    /// Keep the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most probable tokens with this share. In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less probable than this times the most probable one. In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) logits of tokens in prompt or output. In (0, 100]; 1 is none.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the output. In [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the output, times their count. In [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens. Values in [-100, 100]; each token at most once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Keys the noise.
    pub seed: u64,
    /// Keys the noise: which of a request's several answers this is.
    pub branch: u32,
    /// Report the chosen token's log probability.
    pub logprobs: bool,
    /// Report that many of the most probable tokens as well (then `logprobs` is implied). At most 20.
    pub top_logprobs: u32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            branch: 0,
            logprobs: false,
            top_logprobs: 0,
        }
    }
}

/// Why parameters were refused or no token could be drawn.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is NaN or outside its range.
    #[error("{field} is {value}; it must be in {range}")]
    OutOfRange {
        /// The parameter's name.
        field: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        range: &'static str,
    },
    /// A biased token is not in the vocabulary.
    #[error("logit_bias names token {token}; the vocabulary has {vocab} tokens")]
    BiasToken {
        /// The token.
        token: u32,
        /// The vocabulary's size.
        vocab: u32,
    },
    /// A token is biased twice.
    #[error("logit_bias names token {token} more than once")]
    BiasTwice {
        /// The token.
        token: u32,
    },
    /// The row of logits is not as wide as the parameters were checked for.
    #[error("token {token} has no logit; the row has {width}")]
    Width {
        /// A token that was biased or counted.
        token: u32,
        /// The row's length.
        width: usize,
    },
    /// The model gave NaN: its weights or the device are broken, and any token would be made up.
    #[error("the logit of token {token} is NaN")]
    NotANumber {
        /// The first such token.
        token: u32,
    },
    /// The model gave plus infinity (or penalties overflowed to it).
    #[error("the logit of token {token} is infinite")]
    Infinite {
        /// The first such token.
        token: u32,
    },
    /// Every logit is minus infinity: a mask left nothing to draw.
    #[error("no token is possible: every logit is minus infinity")]
    NothingPossible,
}

impl SamplingParams {
    /// Checks every parameter once, when the request comes in.
    ///
    /// # Errors
    /// The first parameter out of range, by name, with its value and what is allowed.
    pub fn validate(&self, vocab: u32) -> Result<(), SamplingError> {
        let within = |field, value: f32, inside: bool, range| {
            if inside {
                Ok(())
            } else {
                Err(SamplingError::OutOfRange {
                    field,
                    value: f64::from(value),
                    range,
                })
            }
        };
        // NaN is in no range, so that these tests refuse it too.
        let Self {
            temperature: t,
            top_p,
            min_p,
            repetition_penalty: r,
            ..
        } = *self;
        within("temperature", t, (0.0..=100.0).contains(&t), "[0, 100]")?;
        within("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "(0, 1]")?;
        within("min_p", min_p, (0.0..=1.0).contains(&min_p), "[0, 1]")?;
        within("repetition_penalty", r, r > 0.0 && r <= 100.0, "(0, 100]")?;
        let two = -2.0..=2.0;
        within(
            "presence_penalty",
            self.presence_penalty,
            two.contains(&self.presence_penalty),
            "[-2, 2]",
        )?;
        within(
            "frequency_penalty",
            self.frequency_penalty,
            two.contains(&self.frequency_penalty),
            "[-2, 2]",
        )?;
        if self.top_logprobs > MAX_TOP_LOGPROBS {
            let value = f64::from(self.top_logprobs);
            return Err(SamplingError::OutOfRange {
                field: "top_logprobs",
                value,
                range: "[0, 20]",
            });
        }
        if self.logit_bias.len() > MAX_LOGIT_BIASES {
            let value = self.logit_bias.len() as f64;
            return Err(SamplingError::OutOfRange {
                field: "logit_bias's length",
                value,
                range: "[0, 1024]",
            });
        }
        let mut seen = std::collections::HashSet::new();
        for &(token, bias) in &self.logit_bias {
            if token >= vocab {
                return Err(SamplingError::BiasToken { token, vocab });
            }
            if !seen.insert(token) {
                return Err(SamplingError::BiasTwice { token });
            }
            within(
                "logit_bias",
                bias,
                (-100.0..=100.0).contains(&bias),
                "[-100, 100]",
            )?;
        }
        Ok(())
    }

    /// Whether a draw is all that they ask for: by a temperature, from the model's own logits, among so few of the largest as
    /// devices do. The temperature to draw by, and what is left.
    #[must_use]
    pub fn plain_draw(&self) -> Option<(f32, Limits)> {
        let is_greedy = self.temperature == 0.0 || self.top_k == 1;
        let is_few = self.top_k as usize <= MOST_LEFT;
        let is_plain = !self.penalises()
            && self.logit_bias.is_empty()
            && !self.logprobs
            && self.top_logprobs == 0;
        match is_greedy {
            true => is_plain.then_some((0.0, Limits::NONE)),
            false => (is_plain && is_few).then_some((
                self.temperature,
                Limits {
                    top_k: self.top_k as f32,
                    top_p: self.top_p,
                    min_p: self.min_p,
                },
            )),
        }
    }

    /// Whether tokens of the prompt are penalised.
    #[must_use]
    pub fn repeats(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    fn penalises(&self) -> bool {
        self.repeats() || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Which tokens were seen, and the sampler's scratch memory.
///
/// Repetition looks at prompt and output, presence and frequency at the output only. It can be rebuilt at any time
/// from the prompt's and the generated ids, which is what a worker does that takes over a stream.
#[derive(Clone, Debug, Default)]
pub struct PenaltyState {
    /// Occurrences in the output; 0 for a token that only the prompt has.
    counts: HashMap<u32, u32>,
    /// Logits before bias and penalties, to put them back.
    originals: Vec<(u32, f32)>,
    scratch: Scratch,
}

impl PenaltyState {
    /// The state after `prompt` was read and `generated` was drawn.
    #[must_use]
    pub fn new(prompt: &[u32], generated: &[u32]) -> Self {
        let mut state = Self::default();
        for &token in prompt {
            state.counts.entry(token).or_insert(0);
        }
        for &token in generated {
            state.push(token);
        }
        state
    }

    /// Counts a token that became part of the output.
    pub fn push(&mut self, token: u32) {
        let count = self.counts.entry(token).or_insert(0);
        *count = count.saturating_add(1);
    }

    /// How often the token was generated.
    #[must_use]
    pub fn generated(&self, token: u32) -> u32 {
        self.counts.get(&token).copied().unwrap_or(0)
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token. It is not counted in the [`PenaltyState`] yet: the caller pushes what it accepts.
    pub token: u32,
    /// Its log probability under the model's raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens under the raw logits, best first; empty unless asked for.
    pub top: Vec<(u32, f32)>,
}

impl Sampled {
    /// A token of which nothing else was asked.
    #[must_use]
    pub fn plain(token: u32) -> Self {
        Self {
            token,
            logprob: None,
            top: Vec::new(),
        }
    }
}

/// Draws the token at `position` (absolute: prompt included) from the model's `logits`, one per token of the vocabulary.
///
/// `logits` is scratch while this runs and holds the model's values again when it returns `Ok`. `params` must have
/// passed [`SamplingParams::validate`] for a vocabulary no larger than the row.
///
/// # Errors
/// NaN or infinite logits, a row without any possible token, or a row narrower than the tokens it should cover. Never
/// a made-up token.
pub fn sample(
    params: &SamplingParams,
    state: &mut PenaltyState,
    logits: &mut [f32],
    position: u32,
) -> Result<Sampled, SamplingError> {
    sample_among(params, state, None, logits, position)
}

/// Tokens that may be drawn: bit `t % 32` of word `t / 32` for token `t`, none past the end.
#[derive(Clone, Copy, Debug)]
pub struct Allowed<'a>(pub &'a [u32]);

/// As [`sample`], from the allowed tokens only. Log probabilities are the model's own, as if all were allowed.
///
/// # Errors
/// As [`sample`].
pub fn sample_among(
    params: &SamplingParams,
    state: &mut PenaltyState,
    allowed: Option<Allowed<'_>>,
    logits: &mut [f32],
    position: u32,
) -> Result<Sampled, SamplingError> {
    let normalizer = match params.logprobs || params.top_logprobs > 0 {
        true => Some(Normalizer::of(logits)?),
        false => None,
    };
    adjust(params, state, logits)?;
    let token = choose(params, &mut state.scratch, logits, allowed, position)?;
    // In reverse, because a token can have been biased and penalised.
    for (token, logit) in state.originals.drain(..).rev() {
        logits[token as usize] = logit;
    }
    let Some(normalizer) = normalizer else {
        return Ok(Sampled::plain(token));
    };
    let top = logprobs::top(
        logits,
        &normalizer,
        params.top_logprobs as usize,
        state.scratch.candidates(),
    );
    Ok(Sampled {
        token,
        logprob: Some(normalizer.logprob(logits[token as usize])),
        top,
    })
}

/// Bias and penalties, remembering what was there.
fn adjust(
    params: &SamplingParams,
    state: &mut PenaltyState,
    logits: &mut [f32],
) -> Result<(), SamplingError> {
    let width = logits.len();
    let PenaltyState {
        counts, originals, ..
    } = state;
    originals.clear();
    for &(token, bias) in &params.logit_bias {
        let logit = logits
            .get_mut(token as usize)
            .ok_or(SamplingError::Width { token, width })?;
        originals.push((token, *logit));
        *logit += bias;
    }
    if !params.penalises() {
        return Ok(());
    }
    // The map's order is arbitrary, but every token is changed on its own, once.
    for (&token, &count) in counts.iter() {
        let logit = logits
            .get_mut(token as usize)
            .ok_or(SamplingError::Width { token, width })?;
        originals.push((token, *logit));
        if *logit > 0.0 {
            *logit /= params.repetition_penalty;
        } else {
            *logit *= params.repetition_penalty;
        }
        if count > 0 {
            *logit -= params.frequency_penalty * count as f32;
            *logit -= params.presence_penalty;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_kernels::cpu::{
        draw::{draw_among, halves, uniform},
        lanes::exp,
    };
    use proptest::prelude::*;

    fn draw(params: &SamplingParams, logits: &[f32], position: u32) -> u32 {
        let mut row = logits.to_vec();
        let drawn =
            sample(params, &mut PenaltyState::default(), &mut row, position).expect("a token");
        assert_eq!(
            row.iter().map(|l| l.to_bits()).collect::<Vec<_>>(),
            bits(logits),
            "the row is put back"
        );
        drawn.token
    }

    fn bits(logits: &[f32]) -> Vec<u32> {
        logits.iter().map(|l| l.to_bits()).collect()
    }

    fn warm() -> SamplingParams {
        SamplingParams {
            temperature: 1.0,
            seed: 42,
            ..SamplingParams::default()
        }
    }

    /// The set of tokens that come up in many draws.
    fn support(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
        let drawn: std::collections::BTreeSet<u32> =
            (0..4000).map(|p| draw(params, logits, p)).collect();
        drawn.into_iter().collect()
    }

    fn logits_of(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_ids() {
        let params = SamplingParams::default();
        assert_eq!(draw(&params, &[0.5, 2.0, 2.0, 1.0], 0), 1);
        assert_eq!(draw(&params, &[-0.0, 0.0], 0), 0);
        assert_eq!(draw(&params, &[f32::NEG_INFINITY, -3.0], 0), 1);
        let one = SamplingParams { top_k: 1, ..warm() };
        assert_eq!(draw(&one, &[0.5, 2.0, 2.0, 1.0], 9), 1);
    }

    #[test]
    fn draws_follow_the_softmax() {
        for temperature in [0.5f32, 1.0, 2.0] {
            let logits = [0.1f32, 1.3, -0.7, 0.9, 2.0, -1.5, 0.0, 0.4];
            let weights: Vec<f64> = logits
                .iter()
                .map(|&l| (f64::from(l) / f64::from(temperature)).exp())
                .collect();
            let total: f64 = weights.iter().sum();
            let mut counts = [0f64; 8];
            let draws = 40_000;
            let params = SamplingParams {
                temperature,
                ..warm()
            };
            for position in 0..draws {
                counts[draw(&params, &logits, position) as usize] += 1.0;
            }
            let chi: f64 = (0..8)
                .map(|i| {
                    let expected = weights[i] / total * f64::from(draws);
                    (counts[i] - expected).powi(2) / expected
                })
                .sum();
            assert!(
                chi < 24.3,
                "chi-square {chi} with 7 degrees of freedom (0.1 % point 24.3)"
            );
        }
    }

    #[test]
    fn top_k_keeps_the_largest_and_the_lowest_ids_among_equals() {
        let logits = [1.0, 3.0, 2.0, 3.0, 2.0];
        assert_eq!(
            support(&SamplingParams { top_k: 2, ..warm() }, &logits),
            [1, 3]
        );
        assert_eq!(
            support(&SamplingParams { top_k: 3, ..warm() }, &logits),
            [1, 2, 3]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    top_k: 99,
                    ..warm()
                },
                &logits
            ),
            [0, 1, 2, 3, 4]
        );
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_the_line() {
        let logits = logits_of(&[0.1, 0.5, 0.1, 0.3]);
        assert_eq!(
            support(
                &SamplingParams {
                    top_p: 0.4,
                    ..warm()
                },
                &logits
            ),
            [1]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    top_p: 0.6,
                    ..warm()
                },
                &logits
            ),
            [1, 3]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    top_p: 0.85,
                    ..warm()
                },
                &logits
            ),
            [0, 1, 3],
            "of equals the lower id"
        );
        assert_eq!(
            support(
                &SamplingParams {
                    top_p: 0.95,
                    ..warm()
                },
                &logits
            ),
            [0, 1, 2, 3]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    top_p: 1e-6,
                    ..warm()
                },
                &logits
            ),
            [1]
        );
        // The share is of what top-k left: 0.5 and 0.3 become 0.625 and 0.375.
        assert_eq!(
            support(
                &SamplingParams {
                    top_k: 2,
                    top_p: 0.6,
                    ..warm()
                },
                &logits
            ),
            [1]
        );
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let logits = logits_of(&[0.1, 0.5, 0.05, 0.35]);
        assert_eq!(
            support(
                &SamplingParams {
                    min_p: 0.15,
                    ..warm()
                },
                &logits
            ),
            [0, 1, 3]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    min_p: 0.5,
                    ..warm()
                },
                &logits
            ),
            [1, 3]
        );
        assert_eq!(
            support(
                &SamplingParams {
                    min_p: 1.0,
                    ..warm()
                },
                &logits
            ),
            [1]
        );
    }

    #[test]
    fn penalties_as_computed_by_hand() {
        let mut state = PenaltyState::new(&[0, 1], &[1, 2, 2]);
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(3, 1.5), (1, -1.0)],
            ..SamplingParams::default()
        };
        let mut logits = [4.0, -2.0, 4.0, 1.0];
        adjust(&params, &mut state, &mut logits).expect("all in the vocabulary");
        // 0: prompt only: 4/2. 1: (-2-1)*2 - 0.25 - 0.5. 2: 4/2 - 2*0.25 - 0.5. 3: bias only.
        assert_eq!(logits, [2.0, -6.75, 1.0, 2.5]);
        let drawn = sample(&params, &mut state, &mut [4.0, -2.0, 4.0, 1.0], 0).expect("a token");
        assert_eq!(drawn.token, 3);
    }

    #[test]
    fn bias_forces_and_forbids() {
        let logits = [0.0, 5.0, 1.0];
        let forced = SamplingParams {
            logit_bias: vec![(2, 100.0)],
            ..warm()
        };
        assert_eq!(support(&forced, &logits), [2]);
        let forbidden = SamplingParams {
            logit_bias: vec![(1, -100.0)],
            ..warm()
        };
        assert_eq!(support(&forbidden, &logits), [0, 2]);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_logits() {
        let params = SamplingParams {
            temperature: 0.1,
            top_k: 1,
            logit_bias: vec![(0, 50.0)],
            top_logprobs: 2,
            ..SamplingParams::default()
        };
        let drawn = sample(
            &params,
            &mut PenaltyState::default(),
            &mut logits_of(&[0.2, 0.5, 0.3]),
            0,
        )
        .expect("a token");
        assert_eq!(drawn.token, 0);
        assert!((drawn.logprob.expect("asked for") - 0.2f32.ln()).abs() < 1e-6);
        assert_eq!(drawn.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert!((drawn.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn broken_logits_are_errors_not_tokens() {
        for params in [
            SamplingParams::default(),
            warm(),
            SamplingParams {
                logprobs: true,
                ..warm()
            },
        ] {
            let mut state = PenaltyState::default();
            let mut go =
                |mut row: Vec<f32>| sample(&params, &mut state, &mut row, 0).expect_err("broken");
            assert_eq!(
                go(vec![f32::NAN; 4]),
                SamplingError::NotANumber { token: 0 }
            );
            assert_eq!(
                go(vec![0.0, 1.0, f32::NAN]),
                SamplingError::NotANumber { token: 2 }
            );
            assert_eq!(
                go(vec![f32::NEG_INFINITY; 4]),
                SamplingError::NothingPossible
            );
            assert_eq!(go(vec![]), SamplingError::NothingPossible);
            assert_eq!(
                go(vec![0.0, f32::INFINITY]),
                SamplingError::Infinite { token: 1 }
            );
        }
        let mut state = PenaltyState::new(&[9], &[]);
        let params = SamplingParams {
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        };
        assert_eq!(
            sample(&params, &mut state, &mut [0.0; 4], 0),
            Err(SamplingError::Width { token: 9, width: 4 })
        );
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let base = SamplingParams::default;
        let wrong = [
            (
                SamplingParams {
                    temperature: -0.5,
                    ..base()
                },
                "temperature is -0.5; it must be in [0, 100]",
            ),
            (
                SamplingParams {
                    temperature: f32::NAN,
                    ..base()
                },
                "temperature is NaN; it must be in [0, 100]",
            ),
            (
                SamplingParams {
                    top_p: 0.0,
                    ..base()
                },
                "top_p is 0; it must be in (0, 1]",
            ),
            (
                SamplingParams {
                    min_p: 1.5,
                    ..base()
                },
                "min_p is 1.5; it must be in [0, 1]",
            ),
            (
                SamplingParams {
                    repetition_penalty: 0.0,
                    ..base()
                },
                "repetition_penalty is 0; it must be in (0, 100]",
            ),
            (
                SamplingParams {
                    presence_penalty: 3.0,
                    ..base()
                },
                "presence_penalty is 3; it must be in [-2, 2]",
            ),
            (
                SamplingParams {
                    frequency_penalty: -3.0,
                    ..base()
                },
                "frequency_penalty is -3; it must be in [-2, 2]",
            ),
            (
                SamplingParams {
                    top_logprobs: 21,
                    ..base()
                },
                "top_logprobs is 21; it must be in [0, 20]",
            ),
            (
                SamplingParams {
                    logit_bias: vec![(1, f32::INFINITY)],
                    ..base()
                },
                "logit_bias is inf; it must be in [-100, 100]",
            ),
            (
                SamplingParams {
                    logit_bias: vec![(10, 1.0)],
                    ..base()
                },
                "logit_bias names token 10; the vocabulary has 10 tokens",
            ),
            (
                SamplingParams {
                    logit_bias: vec![(1, 1.0), (1, 2.0)],
                    ..base()
                },
                "logit_bias names token 1 more than once",
            ),
        ];
        for (params, message) in wrong {
            assert_eq!(params.validate(10).expect_err(message).to_string(), message);
        }
        assert_eq!(base().validate(10), Ok(()));
    }

    #[test]
    fn a_rebuilt_state_draws_the_same_continuation() {
        let params = SamplingParams {
            temperature: 0.9,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.01,
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            seed: 99,
            branch: 2,
            ..SamplingParams::default()
        };
        // A stand-in for the model: logits from the last token and the position.
        let row = |last: u32, position: u32| -> Vec<f32> {
            (0..200)
                .map(|id| (uniform(u64::from(last), id, position) * 8.0) as f32)
                .collect()
        };
        let prompt = [5, 6, 7, 6];
        let go_on = |state: &mut PenaltyState, generated: &mut Vec<u32>, until: usize| {
            while generated.len() < until {
                let last = generated.last().copied().unwrap_or(7);
                let position = (prompt.len() + generated.len()) as u32;
                let token = sample(&params, state, &mut row(last, position), position)
                    .expect("a token")
                    .token;
                state.push(token);
                generated.push(token);
            }
        };
        let mut whole = Vec::new();
        go_on(&mut PenaltyState::new(&prompt, &[]), &mut whole, 60);
        for death in [0, 1, 17, 59] {
            let mut resumed = whole[..death].to_vec();
            go_on(
                &mut PenaltyState::new(&prompt, &whole[..death]),
                &mut resumed,
                60,
            );
            assert_eq!(resumed, whole);
        }
    }

    proptest! {
        /// Whatever the parameters, the token is one that a plain reading of the rules allows.
        #[test]
        fn the_token_is_in_the_set_that_a_full_sort_allows(
            logits in proptest::collection::vec(prop_oneof![(-8i8..8).prop_map(f32::from), -8f32..8f32], 1..60),
            top_k in 0u32..70,
            top_p in 0.01f32..=1.0,
            min_p in 0f32..=1.0,
            temperature in 0.05f32..3.0,
            position in any::<u32>(),
        ) {
            let params = SamplingParams { temperature, top_k, top_p, min_p, ..warm() };
            let token = draw(&params, &logits, position);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            if top_k > 0 {
                order.truncate(top_k as usize);
            }
            let max = logits[order[0]];
            let weight = |&id: &usize| f64::from(exp((logits[id] - max) / temperature));
            let total: f64 = order.iter().map(weight).sum();
            let mut before = 0.0;
            let mut allowed = Vec::new();
            for id in &order {
                // A hair of tolerance: the sums run in another order than the sampler's.
                if before < f64::from(top_p) * total * (1.0 + 1e-9) && weight(id) >= f64::from(min_p) {
                    allowed.push(*id as u32);
                }
                before += weight(id);
            }
            prop_assert!(allowed.contains(&token), "{token} not in {allowed:?}");
        }
    }

    #[test]
    fn what_is_forbidden_is_never_drawn_and_the_row_comes_back() {
        let logits: Vec<f32> = (0..70).map(|id| id as f32 / 7.0).collect();
        // Tokens 3, 31, 32 and 64; the words end before the row does.
        let words = [1 << 3 | 1 << 31, 1, 1];
        let params = SamplingParams {
            temperature: 1.0,
            repetition_penalty: 1.3,
            logprobs: true,
            top_logprobs: 1,
            ..SamplingParams::default()
        };
        let mut seen = std::collections::HashSet::new();
        for position in 0..200 {
            let mut row = logits.clone();
            let mut state = PenaltyState::new(&[3, 64, 69], &[64]);
            let allowed = Some(Allowed(&words));
            let drawn = sample_among(&params, &mut state, allowed, &mut row, position);
            let drawn = drawn.expect("a token");
            assert_eq!(row, logits);
            // The most likely token of all, though it could not be drawn.
            assert_eq!(drawn.top[0].0, 69);
            seen.insert(drawn.token);
        }
        assert!(seen.contains(&64) && seen.contains(&32));
        assert!(seen.is_subset(&[3, 31, 32, 64].into()));
        let nothing = sample_among(
            &SamplingParams::default(),
            &mut PenaltyState::default(),
            Some(Allowed(&[])),
            &mut logits.clone(),
            0,
        );
        assert_eq!(nothing, Err(SamplingError::NothingPossible));
        let mut broken = logits;
        broken[5] = f32::NAN;
        let drawn = sample_among(
            &params,
            &mut PenaltyState::default(),
            Some(Allowed(&words)),
            &mut broken,
            0,
        );
        assert_eq!(drawn, Err(SamplingError::NotANumber { token: 5 }));
    }

    #[test]
    fn what_devices_draw_is_what_the_sampler_draws() {
        let path = hotcell_kernels::cpu::path::CpuPath::detect();
        let (mut drawn, mut left_to_it) = (0, 0);
        for row in 0..2000u32 {
            let n = [3, 50, 300, 1003][row as usize % 4];
            let sharp = [8.0, 2.0, 0.2][row as usize % 3];
            // Of a coarse grid, so that many are equal.
            let logit = |id: u32| ((uniform(9, row, id) - 0.5) * 40.0 * sharp).round() as f32 / 4.0;
            let mut logits: Vec<f32> = (0..n).map(logit).collect();
            if row % 5 == 0 {
                logits[n as usize / 2] = f32::NEG_INFINITY;
            }
            let params = SamplingParams {
                temperature: [0.7, 1.0, 2.5][row as usize / 3 % 3],
                top_k: [0, 1, 2, 0, 40, 256, 257][row as usize / 4 % 7],
                top_p: [1.0, 0.5, 0.95, 0.999][row as usize / 28 % 4],
                min_p: [0.0, 0.02, 0.3, 1.0][row as usize / 112 % 4],
                seed: u64::from(row) << 30,
                branch: row % 3,
                ..SamplingParams::default()
            };
            let expected = draw(&params, &logits, row);
            let Some((temperature, limits)) = params.plain_draw() else {
                assert!(params.top_k > 256);
                continue;
            };
            let [low, high] = halves(params.seed);
            let noise = [low, high, params.branch, row];
            match draw_among(path, &logits, temperature, noise, limits) {
                Some(token) => {
                    assert_eq!(token, expected, "{params:?}");
                    drawn += 1;
                }
                None => left_to_it += 1,
            }
        }
        assert!(drawn > 1500 && left_to_it > 20, "{drawn}, {left_to_it}");
    }
}
