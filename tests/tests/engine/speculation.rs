//! Guessing what comes next changes how many steps it takes, and nothing else.

use std::time::Duration;

use hotcell_worker::generate::{pace::Pace, sampler::SamplingParams};

use crate::bench::{Ask, Bench, SIZE, Size, all_kinds, ask, prompt};

fn round(seed: u32) -> Ask {
    Ask {
        prompt: prompt(seed, 5).repeat(5),
        max_tokens: 90,
        ..ask(seed)
    }
}

/// As for a model whose weights take their time: a guess costs little. Measured, it would depend on who else has the
/// processor.
fn cheap_guesses() -> Pace {
    Pace::fixed(Duration::from_millis(10), Duration::from_micros(100))
}

#[test]
fn streams_are_the_same_with_it_and_without() {
    let mut asks = all_kinds();
    for seed in 0..4 {
        for temperature in [0.0, 0.3, 1.0] {
            let sampling = SamplingParams {
                temperature,
                top_logprobs: 4,
                ..ask(seed).sampling
            };
            asks.push(Ask {
                sampling,
                ..round(seed)
            });
        }
    }
    // Few tokens, so that guesses are right.
    for seed in 0..3 {
        let sampling = SamplingParams {
            logit_bias: (0..4).map(|token| (token, 60.0)).collect(),
            temperature: 0.5 * seed as f32,
            ..ask(seed).sampling
        };
        asks.push(Ask {
            sampling,
            ..round(seed)
        });
    }
    // Lengths that end in the middle of a guess.
    for max_tokens in [1, 2, 3, 5] {
        asks.push(Ask {
            sampling: SamplingParams::default(),
            max_tokens,
            ..round(1)
        });
    }
    // One that fills the context.
    asks.push(Ask {
        sampling: SamplingParams::default(),
        max_tokens: 1000,
        ..round(2)
    });
    let (mut guessed, mut right) = (0, 0);
    for ask in &asks {
        let say = |speculate| {
            let mut bench = Bench::new(SIZE);
            bench.batch.set_pace(cheap_guesses());
            let said = bench.say(&Ask {
                speculate,
                ..ask.clone()
            });
            (said, bench.status())
        };
        let (without, status) = say(false);
        assert_eq!(status.guessed_tokens, 0);
        let (with, status) = say(true);
        assert_eq!(with.same(), without.same(), "{ask:?}");
        guessed += if ask.speculate {
            status.guessed_tokens
        } else {
            0
        };
        right += status.guessed_right;
    }
    assert!(guessed > 100 && right > 50, "{right} of {guessed}");
}

#[test]
fn a_text_that_goes_round_takes_fewer_steps() {
    let greedy = |speculate| Ask {
        sampling: SamplingParams {
            // The same few tokens again and again.
            logit_bias: (0..3).map(|token| (token, 100.0)).collect(),
            ..SamplingParams::default()
        },
        speculate,
        ..round(1)
    };
    let steps = |speculate| {
        let mut bench = Bench::new(SIZE);
        bench.batch.set_pace(cheap_guesses());
        let mut reader = bench.push(&greedy(speculate));
        let steps = bench.run();
        reader.read();
        (steps, reader.said)
    };
    let (many, without) = steps(false);
    assert_eq!(many, 90);
    let (few, with) = steps(true);
    assert_eq!(with.same(), without.same());
    assert!(2 * few < many, "{few} steps of {many}");
}

#[test]
fn beside_others_and_with_little_memory_too() {
    let asks: Vec<Ask> = (0..6).map(round).chain(all_kinds()).collect();
    let expected = crate::bench::alone(SIZE, &asks);
    for (blocks, sequences) in [(64, 64), (12, 64), (64, 5)] {
        let size = Size {
            blocks,
            sequences,
            ..SIZE
        };
        crate::bench::together(
            &mut Bench::new(size),
            &asks,
            &expected,
            &format!("{size:?}"),
        );
    }
}
