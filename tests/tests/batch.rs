//! The batch when memory is short: sequences are put back and computed again, and nobody's tokens change.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_client::v1::{self, generate_event};
use hotcell_graph::DType;
use hotcell_ipc::blackbox::Writer;
use hotcell_kernels::{
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_proto::{error::Reason, limits};
use hotcell_tests::{cluster::golden, model::open};
use hotcell_worker::{
    generate::{
        batch::Batch,
        sampler::SamplingParams,
        sequence::{Event, Outlet, Place, Request, Sequence},
    },
    model::{
        run::{RunShape, Runner},
        text::ModelText,
    },
};
use tokio::sync::{mpsc, oneshot};

struct Bench {
    batch: Batch,
    text: ModelText,
    context: usize,
}

impl Bench {
    /// A model with this many cache blocks.
    fn new(blocks: usize) -> Self {
        Self::of("llama2", blocks)
    }

    fn of(model: &str, blocks: usize) -> Self {
        let source = open(&golden(model)).unwrap();
        let shape = RunShape {
            context: 128,
            blocks,
            ..RunShape::for_model(&source.config, DType::F16)
        };
        let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
        let runner = Runner::new(&device, &source, shape, &PlanHints::default(), &|| {}).unwrap();
        let text = ModelText::open(&source).unwrap();
        Self {
            batch: Batch::new(runner, Writer::private([].into_iter())),
            text,
            context: shape.context,
        }
    }

    fn push(&mut self, seed: u32, room: usize) -> mpsc::Receiver<Event> {
        let (events, reader) = mpsc::channel(room);
        let request = Request {
            hash: [0; 32],
            id: format!("r{seed}"),
            prompt: (0..20 + seed).map(|i| (i * 7 + seed * 13) % 250).collect(),
            generated: vec![],
            text_bytes_emitted: 0,
            sampling: SamplingParams {
                temperature: 0.8,
                seed: u64::from(seed),
                ..SamplingParams::default()
            },
            max_tokens: Some(60),
            stop: vec![],
            end_tokens: HashSet::new(),
            deadline: None,
        };
        let place = Place::take(&Arc::default(), 99).unwrap();
        let outlet = Outlet {
            events,
            paused: Arc::new(AtomicBool::new(false)),
            place,
        };
        let numerics = v1::NumericsClass::default();
        let (sequence, end) = Sequence::new(
            request,
            &self.text.tokenizer,
            self.context,
            numerics,
            outlet,
        )
        .unwrap();
        assert!(end.is_none());
        self.batch.push(sequence);
        reader
    }
}

/// Tokens of a stream so far, and whether it finished.
fn drain(reader: &mut mpsc::Receiver<Event>) -> (Vec<u32>, bool) {
    let (mut tokens, mut finished) = (vec![], false);
    while let Ok(event) = reader.try_recv() {
        match event.unwrap().event {
            Some(generate_event::Event::Delta(d)) => tokens.extend(d.token_ids),
            Some(generate_event::Event::Finished(_)) => finished = true,
            _ => {}
        }
    }
    (tokens, finished)
}

fn alone(seed: u32) -> Vec<u32> {
    let mut bench = Bench::new(64);
    let mut reader = bench.push(seed, 100);
    while bench.batch.step() {}
    let (tokens, finished) = drain(&mut reader);
    assert!(finished && tokens.len() == 60);
    tokens
}

#[test]
fn too_few_blocks_for_all_change_nothing_but_the_order() {
    let expected: Vec<Vec<u32>> = (0..6).map(alone).collect();
    // One sequence needs up to 6 blocks of 16; six of them would need 36.
    for blocks in [8, 11, 17] {
        let mut bench = Bench::new(blocks);
        let mut readers: Vec<_> = (0..6).map(|seed| bench.push(seed, 100)).collect();
        let mut steps = 0;
        while bench.batch.step() {
            steps += 1;
            assert!(steps < 2000, "{blocks} blocks: no progress");
        }
        assert!(bench.batch.is_empty());
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            let (tokens, finished) = drain(reader);
            assert!(finished, "{blocks} blocks");
            assert_eq!(&tokens, expected, "{blocks} blocks");
        }
    }
}

#[test]
fn readers_that_do_not_read_do_not_keep_the_cache_from_others() {
    let expected = alone(5);
    let mut bench = Bench::new(8);
    // Both stop after a few tokens and hold blocks.
    let mut stalled: Vec<_> = (0..2).map(|seed| bench.push(seed, 8)).collect();
    while bench.batch.step() {}
    let mut reader = bench.push(5, 100);
    while bench.batch.step() {}
    let (tokens, finished) = drain(&mut reader);
    assert!(finished);
    assert_eq!(tokens, expected);
    // The stalled ones go on where they were when somebody reads.
    let mut got: Vec<Vec<u32>> = vec![vec![]; 2];
    let mut done = [false; 2];
    for _ in 0..200 {
        for (i, reader) in stalled.iter_mut().enumerate() {
            let (tokens, finished) = drain(reader);
            got[i].extend(tokens);
            done[i] |= finished;
        }
        while bench.batch.step() {}
    }
    assert_eq!(done, [true, true]);
    assert_eq!(got, [alone(0), alone(1)]);
}

/// The known answer of a model, computed between the steps of whatever else is in the batch.
fn known_answer(bench: &mut Bench, steps: u32) -> Result<Vec<[u8; 32]>, Reason> {
    let (reply, mut answer) = oneshot::channel();
    bench.batch.check(steps, reply);
    loop {
        match answer.try_recv() {
            Ok(answer) => return answer.map_err(|error| error.reason()),
            Err(oneshot::error::TryRecvError::Empty) => {
                bench.batch.step();
                assert!(bench.batch.check_step());
            }
            Err(error) => panic!("{error}"),
        }
    }
}

const WHOLE: u32 = limits::MAX_CHECK_STEPS;

#[test]
fn the_known_answer_is_the_same_beside_any_requests_and_changes_none_of_them() {
    let known = known_answer(&mut Bench::new(64), WHOLE).unwrap();
    assert_eq!(known.len(), WHOLE as usize);
    let distinct: HashSet<_> = known.iter().collect();
    assert_eq!(distinct.len(), known.len());
    // A brief one is its beginning.
    assert_eq!(known_answer(&mut Bench::new(64), 1).unwrap(), known[..1]);

    let expected: Vec<Vec<u32>> = (0..6).map(alone).collect();
    let mut bench = Bench::new(64);
    let mut readers: Vec<_> = (0..6).map(|seed| bench.push(seed, 100)).collect();
    for _ in 0..7 {
        assert_eq!(known_answer(&mut bench, WHOLE).unwrap(), known);
    }
    while bench.batch.step() {}
    for (reader, expected) in readers.iter_mut().zip(&expected) {
        assert_eq!(&drain(reader).0, expected);
    }
    assert_eq!(known_answer(&mut bench, WHOLE).unwrap(), known);
}

#[test]
fn a_check_takes_no_room_from_requests_and_gives_back_what_it_took() {
    // Two blocks hold a check, or a request of 20 tokens.
    let mut bench = Bench::new(2);
    for _ in 0..5 {
        known_answer(&mut bench, WHOLE).unwrap();
        // One that nobody waits for any more.
        let (reply, answer) = oneshot::channel();
        bench.batch.check(WHOLE, reply);
        assert!(bench.batch.check_step());
        drop(answer);
        assert!(bench.batch.check_step() && !bench.batch.check_step());
    }
    let mut reader = bench.push(0, 100);
    assert!(bench.batch.step());
    assert_eq!(known_answer(&mut bench, WHOLE), Err(Reason::Overloaded));
    assert_eq!(drain(&mut reader).0.len(), 1);
}

#[test]
fn other_weights_have_another_answer() {
    let answer = |folder: &str| {
        let mut bench = Bench::of(folder, 64);
        known_answer(&mut bench, 1).unwrap()
    };
    assert_ne!(answer("llama2"), answer("mistral"));
    assert_eq!(answer("llama2"), answer("llama2"));
}
