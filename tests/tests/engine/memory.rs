//! When memory is short, sequences are put back and computed again.

use std::time::{Duration, Instant};

use hotcell_graph::{CacheSpec, DType};
use hotcell_kernels::{
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_tests::{cluster::golden, model::open};
use hotcell_worker::model::run::{KINDS, Parts, Row, RunShape, Runner};

use crate::bench::{Ask, Bench, SIZE, Size, all_kinds, alone, ask, prompt, together};

#[test]
fn too_few_blocks_for_all_change_nothing_but_the_order() {
    let asks = all_kinds();
    let expected = alone(SIZE, &asks);
    // One sequence needs up to 6 blocks of 16; all of them would need 30.
    for blocks in [8, 9, 11, 17] {
        let mut bench = Bench::with_blocks(blocks);
        together(&mut bench, &asks, &expected, &format!("{blocks} blocks"));
        let preempted = bench.status().preemptions;
        assert!(preempted > 0 || blocks > 11, "{blocks} blocks are enough");
    }
}

#[test]
fn neither_rows_nor_places_nor_threads_nor_the_cache_change_a_token() {
    let asks = all_kinds();
    for cache in CacheSpec::DTYPES {
        // Of these two, only this one's heads are whole blocks.
        let model = if cache.is_block() {
            "qwen3"
        } else {
            SIZE.model
        };
        let size = Size {
            cache,
            model,
            ..SIZE
        };
        let expected = alone(size, &asks);
        for (rows, sequences, threads) in [(1, 3, 1), (3, 2, 2), (7, 64, 1), (128, 6, 3)] {
            let size = Size {
                rows,
                sequences,
                threads,
                ..size
            };
            let what = format!("{size:?}");
            together(&mut Bench::new(size), &asks, &expected, &what);
        }
    }
}

#[test]
fn readers_that_do_not_read_do_not_keep_the_cache_from_others() {
    let calm = |seed| Ask {
        speculate: false,
        ..ask(seed)
    };
    let expected = alone(SIZE, &[calm(0), calm(1), calm(5)]);
    let mut bench = Bench::with_blocks(8);
    // Both stop after a few tokens and hold blocks.
    let stalled = |seed| Ask {
        room: 8,
        ..calm(seed)
    };
    let mut stalled: Vec<_> = (0..2).map(|seed| bench.push(&stalled(seed))).collect();
    bench.run();
    let said = bench.say(&calm(5));
    assert_eq!(said.same(), expected[2].same());
    // The stalled ones go on where they were when somebody reads.
    for _ in 0..200 {
        stalled.iter_mut().for_each(|reader| reader.read());
        bench.run();
    }
    for (reader, expected) in stalled.iter().zip(&expected) {
        assert_eq!(reader.said.same(), expected.same());
    }
}

#[test]
fn readers_that_do_not_read_for_long_do_not_keep_places_from_others() {
    let calm = |seed| Ask {
        speculate: false,
        ..ask(seed)
    };
    let stalled = |seed| Ask {
        room: 8,
        ..calm(seed)
    };
    let expected = alone(SIZE, &[calm(0), calm(1), calm(5)]);
    // Of the one there are two places, of the other blocks for two.
    let few = Size {
        sequences: 2,
        ..SIZE
    };
    for size in [few, Size { blocks: 6, ..SIZE }] {
        let mut bench = Bench::new(size);
        let begun = Instant::now();
        let mut readers: Vec<_> = (0..2).map(|seed| bench.push(&stalled(seed))).collect();
        bench.run();
        let mut other = bench.push(&calm(5));
        bench.run();
        other.read();
        // Unless this machine was slower than a reader may be.
        if begun.elapsed() < Duration::from_secs(1) {
            assert!(other.said.tokens.is_empty(), "a reader may be slow");
            assert_eq!(bench.status().preemptions, 0);
            let again = bench.batch.next_deadline().expect("somebody waits");
            std::thread::sleep(again.saturating_duration_since(Instant::now()));
            bench.run();
        }
        other.read();
        assert!(bench.status().preemptions > 0);
        assert_eq!(other.said.same(), expected[2].same(), "{size:?}");
        assert_eq!(bench.batch.next_deadline(), None);
        for _ in 0..200 {
            readers.iter_mut().for_each(|reader| reader.read());
            bench.run();
        }
        for (reader, expected) in readers.iter().zip(&expected) {
            assert_eq!(reader.said.same(), expected.same(), "{size:?}");
        }
    }
}

#[test]
fn a_request_that_can_never_fit_fails_and_others_do_not() {
    let mut bench = Bench::with_blocks(3);
    let long = Ask {
        prompt: prompt(0, 60),
        ..ask(0)
    };
    let grows = Ask {
        prompt: prompt(0, 20),
        ..ask(0)
    };
    let fits = Ask {
        max_tokens: 20,
        ..ask(1)
    };
    let expected = alone(SIZE, std::slice::from_ref(&fits));
    let doomed = [bench.push(&long), bench.push(&grows)];
    let mut reader = bench.push(&fits);
    bench.run();
    assert!(bench.batch.is_empty());
    reader.read();
    assert_eq!(reader.said.same(), expected[0].same());
    for mut reader in doomed {
        reader.read();
        let error = reader.said.error.unwrap();
        assert!(error.contains("no room"), "{error}");
    }
}

#[test]
fn what_lies_behind_the_window_is_given_back() {
    // All layers look 24 tokens back. Of a long stream only the last few blocks are held.
    let size = Size {
        model: "mistral",
        context: 512,
        ..SIZE
    };
    let long = Ask {
        max_tokens: 300,
        room: 400,
        ..ask(1)
    };
    let expected = alone(size, std::slice::from_ref(&long));
    let small = Size {
        blocks: 6,
        rows: 16,
        ..size
    };
    let mut bench = Bench::new(small);
    let mut reader = bench.push(&long);
    let mut most = 0;
    while bench.batch.step() {
        most = most.max(bench.status().used_blocks);
    }
    reader.read();
    assert_eq!(reader.said.same(), expected[0].same());
    assert!(most <= 4, "{most} blocks of 16 for a window of 24");
    // Beside others, put back and computed again, a piece at a time: there is not room for all of one either.
    let asks: Vec<Ask> = (0..3)
        .map(|seed| Ask {
            max_tokens: 90,
            ..ask(seed)
        })
        .collect();
    let expected = alone(size, &asks);
    let mut bench = Bench::new(small);
    together(&mut bench, &asks, &expected, "window");
    assert!(bench.status().preemptions > 0);
}

#[test]
fn beside_layers_that_look_back_to_the_beginning_those_with_a_window_hold_no_more_than_it() {
    // Five of six layers look 8 tokens back.
    let size = Size {
        model: "gemma3",
        context: 512,
        ..SIZE
    };
    let long = Ask {
        max_tokens: 300,
        room: 400,
        ..ask(1)
    };
    let expected = alone(size, std::slice::from_ref(&long));
    let small = Size {
        blocks: 22,
        window_blocks: 3,
        rows: 16,
        ..size
    };
    let mut bench = Bench::new(small);
    let mut reader = bench.push(&long);
    let (mut whole, mut windowed) = (0, 0);
    while bench.batch.step() {
        let status = bench.status();
        let [all, few] = &status.layers[..] else {
            panic!("{:?}", status.layers);
        };
        assert_eq!(
            (all.layers, all.window, few.layers, few.window),
            (1, 0, 5, 8)
        );
        assert_eq!(status.used_blocks, all.used_blocks + few.used_blocks);
        whole = whole.max(all.used_blocks);
        windowed = windowed.max(few.used_blocks);
        // It is alone: all that is used is its own.
        for request in &status.requests {
            let bytes = all.used_blocks * all.block_bytes + few.used_blocks * few.block_bytes;
            assert_eq!((request.blocks, request.bytes), (status.used_blocks, bytes));
            assert_eq!((&*request.request_id, request.tokens > 0), ("r", true));
        }
    }
    reader.read();
    assert_eq!(reader.said.same(), expected[0].same());
    assert!(whole >= 20, "{whole} blocks of 16 for 320 tokens");
    assert!(windowed <= 2, "{windowed} blocks of 16 for a window of 8");
    // Beside others, put back for want of blocks of either kind, and computed again.
    let asks: Vec<Ask> = (0..3)
        .map(|seed| Ask {
            max_tokens: 90,
            ..ask(seed)
        })
        .collect();
    let expected = alone(size, &asks);
    for (blocks, window_blocks) in [(64, 3), (9, 64), (9, 3)] {
        let small = Size {
            blocks,
            window_blocks,
            ..small
        };
        let mut bench = Bench::new(small);
        together(&mut bench, &asks, &expected, &format!("{small:?}"));
        assert!(bench.status().preemptions > 0, "{small:?}");
    }
}

#[test]
fn a_block_of_one_tenant_is_wiped_before_another_one_has_it() {
    for model in ["llama2", "gemma3"] {
        let only = Size {
            model,
            blocks: 1,
            window_blocks: 1,
            ..SIZE
        };
        // Fills 13 places of the only block, and then two.
        let many = |tenant| Ask {
            tenant,
            prompt: prompt(1, 12),
            max_tokens: 2,
            ..ask(1)
        };
        let few = Ask {
            tenant: "b",
            prompt: prompt(2, 2),
            max_tokens: 1,
            ..ask(2)
        };
        let left_after = |asks: &[&Ask]| {
            let mut bench = Bench::new(only);
            asks.iter().for_each(|ask| drop(bench.say(ask)));
            let runner = bench.batch.runner();
            let kinds = runner.windows().len();
            let read = |kind| runner.read_block(kind, 0).unwrap();
            (0..kinds).map(read).collect::<Vec<Vec<u8>>>()
        };
        let alone = left_after(&[&few]);
        assert_eq!(left_after(&[&many("a"), &few]), alone, "{model}");
        // Its own is left there: what another one left would have been seen.
        assert_ne!(left_after(&[&many("b"), &few]), alone, "{model}");
    }
}

#[test]
fn a_short_prompt_has_its_first_token_while_a_long_one_is_read() {
    let mut bench = Bench::new(Size {
        context: 512,
        rows: 32,
        ..SIZE
    });
    let long = Ask {
        prompt: prompt(1, 480),
        max_tokens: 3,
        ..ask(1)
    };
    let mut long = bench.push(&long);
    for _ in 0..3 {
        assert!(bench.batch.step());
    }
    let mut short = bench.push(&Ask {
        prompt: prompt(2, 30),
        ..ask(2)
    });
    let mut steps = 0;
    while short.said.tokens.is_empty() {
        assert!(bench.batch.step());
        short.read();
        steps += 1;
    }
    assert!(steps <= 2, "{steps}");
    long.read();
    assert!(long.said.tokens.is_empty());
    bench.run();
    long.read();
    assert_eq!(long.said.tokens.len(), 3);
}

#[test]
fn a_wiped_block_is_as_if_it_had_never_been_written() {
    let source = open(&golden("llama2")).unwrap();
    let shape = RunShape {
        context: 64,
        blocks: 4,
        ..RunShape::for_model(&source.config, DType::F16)
    };
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    // Logits of a row that looks at block 2.
    let after = |change: &dyn Fn(&mut Runner)| {
        let mut runner =
            Runner::new(&device, &source, shape, &PlanHints::default(), &|| {}).unwrap();
        runner.set_table(0, 0, 0, &[2, 1]).unwrap();
        change(&mut runner);
        let row = Row {
            token: 5,
            position: 16,
            sequence: 0,
            slots: [16; KINDS],
        };
        runner.step(&[row], &[0]).unwrap();
        let mut logits = vec![0.0; runner.vocab()];
        runner.logits(0, &mut logits).unwrap();
        logits.iter().map(|l| l.to_bits()).collect::<Vec<u32>>()
    };
    let write = |runner: &mut Runner, block: usize| {
        let rows: Vec<Row> = (0..16)
            .map(|position| Row {
                token: 7 + position as u32,
                position,
                sequence: 0,
                slots: [block * 16 + position; KINDS],
            })
            .collect();
        runner.step(&rows, &[]).unwrap();
    };
    let fresh = after(&|_| {});
    let written = after(&|runner| write(runner, 2));
    assert_ne!(fresh, written);
    let wiped = after(&|runner| {
        write(runner, 2);
        runner.wipe_block(0, 2).unwrap();
    });
    assert_eq!(fresh, wiped);
    let copied = after(&|runner| {
        write(runner, 2);
        runner.copy_block(0, 2, 3).unwrap();
        runner.wipe_block(0, 2).unwrap();
        runner.copy_block(0, 3, 2).unwrap();
    });
    assert_eq!(written, copied);
}

#[test]
fn a_budget_is_kept_and_what_does_not_fit_is_cut_or_refused() {
    for model in ["llama2", "gemma3"] {
        let source = open(&golden(model)).unwrap();
        let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
        let within =
            |bytes| RunShape::within(&device, &source, DType::F16, bytes, Parts::default());
        let whole = RunShape::for_model(&source.config, DType::F16);
        assert_eq!(within(u64::MAX).unwrap(), whole);
        let mut last = 0;
        let mut refused = 0;
        // Whether one whole context had room with fewer blocks for layers with a window than for the others.
        let mut gained = false;
        for bytes in (1..=40).map(|i| i * 50_000) {
            let Ok(shape) = within(bytes) else {
                refused += 1;
                assert_eq!(last, 0, "{bytes}");
                continue;
            };
            assert!(shape.blocks >= last.max(1), "{shape:?}");
            let windowed = source.config.kinds() > 1;
            assert_eq!(shape.window_blocks > 0, windowed);
            let most = whole.context.min(shape.blocks * 16);
            assert!(0 < shape.context && shape.context <= most);
            assert!(windowed || shape.context == most);
            let fewer = windowed && shape.window_blocks * 16 < shape.context;
            gained |= fewer && shape.context == whole.context;
            last = shape.blocks;
            let runner =
                Runner::new(&device, &source, shape, &PlanHints::default(), &|| {}).unwrap();
            assert!((runner.cache_bytes() as u64) < bytes);
        }
        assert!(refused > 0 && last > 8, "{refused} refused, {last} blocks");
        assert_eq!(gained, model == "gemma3");
    }
}
