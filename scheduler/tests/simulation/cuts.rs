//! One conversation, recorded and then spoilt: cut at every byte, held up, with frames said twice or garbage between.
//!
//! Whatever is spoilt, the stream is complete and exact, or ends with a typed status, within its bounds of time.

use std::{sync::Arc, thread, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    v1::{GenerateRequest, Prompt, TokenIds, generate_event::Event, prompt::Kind},
};
use hotcell_scheduler::stream::EventStream;
use tokio::time::timeout;
use tokio_stream::StreamExt;

use crate::{
    House,
    wire::{Break, Fault},
    worker::{text, token},
    world::{Conversation, Script, Traffic, World},
};

const PROMPT: [u32; 3] = [5, 6, 7];
const SEED: u64 = 99;
const TOKENS: u32 = 8;

/// All that may take time: greeting, load, patience with what hangs, restart.
const LONGEST: Duration = Duration::from_secs(300);

/// How a stream ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exact,
    Typed(Reason),
}

/// Reads a stream to its end, and checks that every token but those that were said twice is right.
async fn read(mut stream: EventStream, repeated: bool) -> Result<End, String> {
    let (mut ids, mut said) = (Vec::new(), String::new());
    let expected: Vec<_> = (0..TOKENS as usize)
        .map(|i| token(&PROMPT, SEED, i))
        .collect();
    loop {
        match stream.next().await {
            None => return Err("ends without a word".to_owned()),
            Some(Err(status)) => {
                let error = Error::typed(&status).ok_or(format!("untyped: {status:?}"))?;
                return Ok(End::Typed(error.reason()));
            }
            Some(Ok(event)) => match event.event {
                Some(Event::Delta(delta)) => {
                    ids.extend(delta.token_ids);
                    said.push_str(&delta.text);
                    if !repeated && !expected.starts_with(&ids) {
                        return Err(format!("says {ids:?} instead of {expected:?}"));
                    }
                }
                Some(Event::Finished(_)) if ids == expected => {
                    let whole: String = expected.iter().map(|&id| text(id)).collect();
                    // Nothing counts the text.
                    return match said == whole || repeated {
                        true => Ok(End::Exact),
                        false => Err(format!("says {said:?} instead of {whole:?}")),
                    };
                }
                Some(Event::Finished(_)) => return Err(format!("is complete with {ids:?}")),
                Some(Event::Accepted(_)) => {}
                None => return Err("an empty event".to_owned()),
            },
        }
    }
}

/// One worker, one request.
fn converse(script: Option<Script>) -> (Result<End, String>, Traffic) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::scripted(script);
        let house = House::simple(Arc::clone(&world));
        let request = GenerateRequest {
            model: "a".to_owned(),
            prompt: Some(Prompt {
                kind: Some(Kind::Ids(TokenIds {
                    ids: PROMPT.to_vec(),
                })),
            }),
            seed: Some(SEED),
            max_tokens: TOKENS,
            ..GenerateRequest::default()
        };
        let repeated = script.is_some_and(|s| s.fault.what == Break::Repeat);
        let whole = async {
            let stream = house
                .shared
                .generate(request, None, &hotcell_scheduler::access::Caller::own())
                .map_err(|e| format!("refused: {e}"))?;
            read(stream, repeated).await
        };
        let end = timeout(LONGEST, whole).await;
        let end = end.unwrap_or_else(|_| Err("hangs".to_owned()));
        let end = end.and_then(|end| match world.wrongs().first() {
            None => Ok(end),
            Some(wrong) => Err(wrong.clone()),
        });
        if timeout(LONGEST, house.fleet.stop()).await.is_err() {
            return (Err("the fleet does not stop".to_owned()), world.traffic());
        }
        (end, world.traffic())
    })
}

/// Tries all, and returns how many streams were complete.
fn try_all(scripts: Vec<Script>) -> usize {
    assert!(!scripts.is_empty());
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let parts: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|part| {
                let scripts = &scripts;
                scope.spawn(move || {
                    let mine = scripts.iter().skip(part).step_by(threads);
                    mine.map(|&script| (script, converse(Some(script)).0))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        started.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut exact = 0;
    for (script, end) in parts.into_iter().flatten() {
        match end {
            Ok(End::Exact) => exact += 1,
            Ok(End::Typed(Reason::WorkerLost | Reason::NoWorker | Reason::ProtocolViolation)) => {}
            other => panic!("{script:?}: {other:?}"),
        }
    }
    exact
}

/// Every place in what was said, or every so-manieth: bytes, or the frames that a worker writes.
fn places(spoil: Break, step: usize) -> Vec<Script> {
    let (calm, traffic) = converse(None);
    assert_eq!(calm, Ok(End::Exact));
    let mut all = Vec::new();
    for conversation in [Conversation::Control, Conversation::Tokens] {
        for writing in [false, true] {
            let bytes = traffic.bytes(conversation, writing);
            assert!(bytes > 100, "{conversation:?} {writing}: {bytes} bytes");
            let end = match (spoil, writing) {
                (Break::Repeat | Break::Garbage, false) => 0,
                (Break::Repeat, true) => traffic.frames(conversation),
                _ => bytes,
            };
            all.extend((0..end).step_by(step).map(|at| Script {
                conversation,
                fault: Fault {
                    at,
                    writing,
                    what: spoil,
                },
            }));
        }
    }
    all
}

#[test]
fn a_conversation_cut_at_any_byte_goes_on_with_the_next_process() {
    let scripts = places(Break::Cut, 1);
    let all = scripts.len();
    let exact = try_all(scripts);
    // Only its first process is cut off.
    assert_eq!(exact, all);
}

#[test]
fn a_conversation_held_up_at_any_byte_is_late_or_given_up() {
    for pause in [Duration::from_millis(700), Duration::from_secs(60)] {
        let scripts = places(Break::Late(pause), 5);
        let all = scripts.len();
        assert_eq!(try_all(scripts), all);
    }
}

#[test]
fn garbage_at_any_byte_ends_the_process_and_not_the_stream() {
    let scripts = places(Break::Garbage, 3);
    let (all, exact) = (scripts.len(), try_all(scripts));
    assert!(exact * 10 >= all * 9, "{exact} of {all}");
}

#[test]
fn a_frame_said_twice_is_noticed() {
    let scripts = places(Break::Repeat, 1);
    assert!(scripts.len() > 20, "{} frames", scripts.len());
    try_all(scripts);
}
