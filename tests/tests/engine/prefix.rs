//! Prompts that were read before, by the same tenant: less is computed, and the same comes out, bit for bit.

use hotcell_graph::DType;

use crate::bench::{Ask, Bench, SIZE, Size, all_kinds, alone, ask, prompt, together};

/// With the log probabilities of the best, whose bits are those of the logits as far as one can see.
fn shown(ask: Ask) -> Ask {
    Ask {
        sampling: hotcell_worker::generate::sampler::SamplingParams {
            top_logprobs: 10,
            ..ask.sampling
        },
        ..ask
    }
}

#[test]
fn a_prompt_that_was_read_before_gives_the_same_bits() {
    let asks: Vec<Ask> = all_kinds().into_iter().map(shown).collect();
    for (model, cache) in [
        ("llama2", DType::F16),
        ("llama2", DType::F32),
        ("qwen3", DType::BF16),
        ("mistral", DType::F16),
        ("gguf/llama3-q8_0.gguf", DType::F16),
        ("gemma3", DType::F16),
        ("qwen3_moe", DType::F16),
    ] {
        let size = Size {
            model,
            cache,
            ..SIZE
        };
        let expected = alone(size, &asks);
        // In small pieces, and at once.
        let rows = if model == "llama2" { 128 } else { 7 };
        {
            let mut bench = Bench::new(Size { rows, ..size });
            for (ask, expected) in asks.iter().zip(&expected) {
                assert_eq!(bench.say(ask).same(), expected.same(), "{model} cold");
                let warm = bench.say(ask);
                assert_eq!(warm.same(), expected.same(), "{model} warm, {rows} rows");
                // Whole blocks, all but the last token.
                let len = ask.prompt.len() as u32;
                assert!(warm.cached() >= (len - 1) / 16 * 16, "{model}");
            }
            together(&mut bench, &asks, &expected, "all warm");
        }
    }
}

#[test]
fn what_a_prompt_shares_with_others_is_counted() {
    let mut bench = Bench::new(SIZE);
    let base = prompt(1, 64);
    let with = |len: usize, more: &[u32]| Ask {
        prompt: [&base[..len], more].concat(),
        max_tokens: 3,
        ..ask(1)
    };
    assert_eq!(bench.say(&with(50, &[])).cached(), 0);
    // Its three tokens were drawn, and two of them computed: 52 are there, 48 in whole blocks.
    assert_eq!(bench.say(&with(50, &[])).cached(), 48);
    assert_eq!(bench.say(&with(40, &[1, 2, 3])).cached(), 32);
    assert_eq!(bench.say(&with(15, &[])).cached(), 0);
    // All of its blocks are there: the last token alone is computed again.
    assert_eq!(bench.say(&with(32, &[])).cached(), 31);
    // A conversation goes on: what was drawn is there too.
    let first = bench.say(&Ask {
        max_tokens: 30,
        ..with(20, &[])
    });
    let next = Ask {
        prompt: [&base[..20], &first.tokens, &[7, 8, 9]].concat(),
        ..ask(1)
    };
    assert_eq!(bench.say(&next).cached(), 48);
    let status = bench.status();
    assert_eq!(status.cached_tokens, 48 + 32 + 31 + 16 + 48);
    assert_eq!(status.prompt_tokens, 50 + 50 + 43 + 15 + 32 + 20 + 53);
    assert!(status.kept_blocks > 0 && status.used_blocks == 0);
}

#[test]
fn tenants_share_nothing() {
    let mut bench = Bench::new(SIZE);
    let of = |tenant| Ask {
        tenant,
        prompt: prompt(1, 50),
        ..ask(1)
    };
    let first = bench.say(&of("a"));
    for (tenant, cached) in [("b", 0), ("", 0), ("a", 48), ("b", 48), ("", 48)] {
        let said = bench.say(&of(tenant));
        assert_eq!(said.cached(), cached, "{tenant}");
        assert_eq!(said.same(), first.same());
    }
    // Neither while they run at the same time.
    let mut bench = Bench::new(SIZE);
    let mut readers: Vec<_> = ["a", "b", "c"]
        .map(of)
        .iter()
        .map(|a| bench.push(a))
        .collect();
    bench.run();
    for reader in &mut readers {
        reader.read();
        assert_eq!(reader.said.cached(), 0);
        assert_eq!(reader.said.same(), first.same());
    }
}

#[test]
fn what_was_not_used_longest_goes_first() {
    // Room for one request and two blocks more.
    let mut bench = Bench::with_blocks(8);
    let of = |seed| Ask {
        prompt: prompt(seed, 33),
        max_tokens: 2,
        ..ask(seed)
    };
    assert_eq!(bench.say(&of(1)).cached(), 0);
    assert_eq!(bench.say(&of(2)).cached(), 0);
    assert_eq!(bench.say(&of(1)).cached(), 32);
    assert_eq!(bench.say(&of(3)).cached(), 0);
    assert_eq!(bench.say(&of(4)).cached(), 0);
    // Number 2 was used longest ago, and a block was needed; of what is kept, ends go before beginnings.
    assert_eq!(bench.say(&of(2)).cached(), 16);
    assert!(bench.status().kept_blocks <= 8);
}

#[test]
fn a_beginning_of_which_the_window_is_lost_is_read_again() {
    let of = |seed| {
        shown(Ask {
            prompt: prompt(seed, 60),
            max_tokens: 20,
            ..ask(seed)
        })
    };
    let whole = Size {
        model: "gemma3",
        ..SIZE
    };
    let expected = alone(whole, &[of(1), of(2)]);
    // Where there are few blocks for layers with a window, another request takes those that were kept.
    for (window_blocks, cached) in [(64, 48), (4, 0)] {
        let mut bench = Bench::new(Size {
            window_blocks,
            rows: 16,
            ..whole
        });
        for (seed, expected) in [(1, &expected[0]), (2, &expected[1])] {
            let said = bench.say(&of(seed));
            assert_eq!((said.same(), said.cached()), (expected.same(), 0));
        }
        let said = bench.say(&of(1));
        assert_eq!(said.same(), expected[0].same(), "{window_blocks} blocks");
        assert_eq!(said.cached(), cached, "{window_blocks} blocks");
        // What was said before, and more.
        let next = Ask {
            prompt: [&of(1).prompt[..], &said.tokens, &[7, 8, 9]].concat(),
            ..of(1)
        };
        let expected = alone(whole, std::slice::from_ref(&next));
        let said = bench.say(&next);
        assert_eq!(said.same(), expected[0].same());
        // Its end is there in any case.
        assert!(said.cached() >= 64, "{}", said.cached());
    }
}

#[test]
fn branches_of_one_prompt_are_read_once_and_say_what_each_says_alone() {
    let branch = |branch| {
        let mut ask = shown(ask(1));
        ask.prompt = prompt(1, 40);
        ask.sampling.branch = branch;
        ask
    };
    let asks: Vec<Ask> = (0..8).map(branch).collect();
    for (model, rows, sequences, blocks) in [
        (SIZE.model, 128, 64, 64),
        (SIZE.model, 7, 64, 64),
        (SIZE.model, 7, 3, 64),
        (SIZE.model, 128, 64, 20),
        ("gemma3", 128, 64, 64),
        ("gemma3", 7, 64, 64),
        ("gemma3", 7, 3, 64),
    ] {
        let expected = alone(Size { model, ..SIZE }, &asks);
        let different: std::collections::HashSet<_> = expected.iter().map(|s| &s.tokens).collect();
        assert_eq!(different.len(), 8);
        let size = Size {
            model,
            rows,
            sequences,
            blocks,
            ..SIZE
        };
        let mut bench = Bench::new(size);
        let mut readers: Vec<_> = asks.iter().map(|ask| bench.push(ask)).collect();
        bench.run();
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            reader.read();
            assert_eq!(reader.said.same(), expected.same(), "{size:?}");
        }
        let cached: Vec<u32> = readers.iter().map(|r| r.said.cached()).collect();
        assert_eq!(cached[0], 0, "{size:?}");
        // A block that is not full is shared too while its first owner is there.
        assert!(cached[1..].iter().all(|&c| c >= 32), "{size:?}: {cached:?}");
        if sequences == 64 {
            assert!(cached[1..].contains(&39), "{size:?}: {cached:?}");
        }
        assert_eq!(bench.status().used_blocks, 0);
    }
    // While they draw, the prompt's two whole blocks are held once.
    let mut bench = Bench::new(SIZE);
    let readers: Vec<_> = asks.iter().map(|ask| bench.push(ask)).collect();
    while bench.status().running < 8 {
        assert!(bench.batch.step());
    }
    assert!(bench.status().used_blocks <= 2 + 8 + 1);
    drop(readers);
    bench.run();
    assert_eq!(bench.status().used_blocks, 0);
}
