//! The known answer, beside whatever else is in the batch.

use std::collections::HashSet;

use hotcell_proto::{error::Reason, limits};
use tokio::sync::oneshot;

use crate::bench::{Bench, SIZE, Size, ask};

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
fn it_is_the_same_beside_any_requests_and_changes_none_of_them() {
    let known = known_answer(&mut Bench::new(SIZE), WHOLE).unwrap();
    assert_eq!(known.len(), WHOLE as usize);
    let distinct: HashSet<_> = known.iter().collect();
    assert_eq!(distinct.len(), known.len());
    // A brief one is its beginning.
    assert_eq!(known_answer(&mut Bench::new(SIZE), 1).unwrap(), known[..1]);

    let alone: Vec<_> = (0..6).map(|i| Bench::new(SIZE).say(&ask(i))).collect();
    let mut bench = Bench::new(SIZE);
    let mut readers: Vec<_> = (0..6).map(|seed| bench.push(&ask(seed))).collect();
    for _ in 0..7 {
        assert_eq!(known_answer(&mut bench, WHOLE).unwrap(), known);
    }
    bench.run();
    for (reader, expected) in readers.iter_mut().zip(&alone) {
        reader.read();
        assert_eq!(reader.said.same(), expected.same());
    }
    assert_eq!(known_answer(&mut bench, WHOLE).unwrap(), known);
}

#[test]
fn it_takes_no_room_from_requests_and_gives_back_what_it_took() {
    // Two blocks hold a check, or a request of 20 tokens.
    let mut bench = Bench::with_blocks(2);
    for _ in 0..5 {
        known_answer(&mut bench, WHOLE).unwrap();
        // One that nobody waits for any more.
        let (reply, answer) = oneshot::channel();
        bench.batch.check(WHOLE, reply);
        assert!(bench.batch.check_step());
        drop(answer);
        assert!(bench.batch.check_step() && !bench.batch.check_step());
    }
    let mut reader = bench.push(&ask(0));
    assert!(bench.batch.step());
    assert_eq!(known_answer(&mut bench, WHOLE), Err(Reason::Overloaded));
    reader.read();
    assert_eq!(reader.said.tokens.len(), 1);
}

#[test]
fn other_weights_have_another_one() {
    let answer = |model| known_answer(&mut Bench::new(Size { model, ..SIZE }), 1).unwrap();
    assert_ne!(answer("llama2"), answer("mistral"));
    assert_eq!(answer("llama2"), answer("llama2"));
}
