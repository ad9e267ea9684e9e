//! What a journal takes of a stranger's words, and what it refuses.

use hotcell_proto::v1::ToolCallPart;
use proptest::prelude::*;

use super::*;

const BOUNDS: Bounds = Bounds {
    vocabulary: 100,
    context: 16,
};

fn journal() -> Journal {
    let request = GenerateRequest {
        request_id: "r".into(),
        model: "m".into(),
        seed: Some(7),
        max_tokens: 4,
        branch: 3,
        stop: vec!["end".into()],
        ..GenerateRequest::default()
    };
    let mut journal = Journal::new(request, vec![1, 2], BOUNDS);
    journal.begin(&class("c"));
    journal
}

fn class(id: &str) -> NumericsClass {
    NumericsClass {
        id: id.into(),
        reproducible: true,
        model_hash: "h".into(),
    }
}

fn accepted() -> Accepted {
    Accepted {
        request_id: "whatever the worker calls it".into(),
        model: "m".into(),
        prompt_ids: vec![1, 2],
        seed: 7,
        numerics: Some(class("c")),
    }
}

fn delta(text: &str, ids: &[u32]) -> Event {
    Event::Delta(Delta {
        text: text.into(),
        token_ids: ids.to_vec(),
        ..Delta::default()
    })
}

fn finished() -> Event {
    finished_with(None)
}

fn finished_with(usage: Option<Usage>) -> Event {
    Event::Finished(Finished {
        reason: FinishReason::MaxTokens as i32,
        seed: 7,
        usage,
        timings: Some(Timings {
            queue_ms: f64::NAN,
            prefill_ms: -1.0,
            decode_ms: 2.0,
        }),
        ..Finished::default()
    })
}

fn take(journal: &mut Journal, event: Event) -> Result<Option<Event>, Violation> {
    let taken = journal.take(GenerateEvent { event: Some(event) })?;
    Ok(taken.and_then(|e| e.event))
}

#[test]
fn a_stream_goes_on_elsewhere_from_what_was_said() {
    let mut journal = journal();
    assert_eq!(journal.request().resume, None);
    let first = take(&mut journal, Event::Accepted(accepted())).unwrap();
    assert!(matches!(first, Some(Event::Accepted(a)) if a.request_id == "r"));
    take(&mut journal, delta("ab", &[10, 11])).unwrap();
    take(&mut journal, delta("", &[12])).unwrap();
    journal.count_death();
    journal.begin(&class("c"));

    let again = journal.request();
    let resume = again.resume.unwrap();
    assert_eq!(resume.generated_ids, [10, 11, 12]);
    assert_eq!(resume.text_bytes_emitted, 2);
    assert_eq!(
        (again.seed, again.branch, again.max_tokens),
        (Some(7), 3, 4)
    );
    assert_eq!(again.stop, ["end"]);
    assert_eq!(journal.estimate().decode, 1);

    assert_eq!(take(&mut journal, Event::Accepted(accepted())), Ok(None));
    take(&mut journal, delta("c", &[13])).unwrap();
    let counted = Usage {
        prompt_tokens: 99,
        generated_tokens: 4,
        cached_tokens: 50,
    };
    let Ok(Some(Event::Finished(end))) = take(&mut journal, finished_with(Some(counted))) else {
        panic!("not finished");
    };
    assert_eq!(end.deaths_survived, 1);
    let usage = end.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.generated_tokens), (2, 4));
    // No more than there are.
    assert_eq!(usage.cached_tokens, 2);
    let timings = end.timings.unwrap();
    assert_eq!((timings.queue_ms, timings.prefill_ms), (0.0, 0.0));
    assert!(journal.is_finished());
}

#[test]
fn what_a_client_is_told_of_the_numerics_was_declared() {
    let mut journal = journal();
    let mut odd = accepted();
    odd.numerics = Some(NumericsClass {
        reproducible: false,
        model_hash: "other".into(),
        ..class("c")
    });
    let Ok(Some(Event::Accepted(said))) = take(&mut journal, Event::Accepted(odd)) else {
        panic!("not accepted");
    };
    assert_eq!(said.numerics, Some(class("c")));
}

#[test]
fn what_is_said_in_another_class_is_marked_where_it_begins() {
    let mut journal = journal();
    let greeting = |id: &str| {
        Event::Accepted(Accepted {
            numerics: Some(class(id)),
            ..accepted()
        })
    };
    let mark = |event: Option<Event>| match event {
        Some(Event::Delta(delta)) => delta.numerics.map(|n| n.id),
        other => panic!("no delta but {other:?}"),
    };
    take(&mut journal, greeting("c")).unwrap();
    // A worker's own mark is not believed.
    let Event::Delta(lie) = delta("a", &[1]) else {
        return;
    };
    let lie = Event::Delta(Delta {
        numerics: Some(class("x")),
        ..lie
    });
    assert_eq!(mark(take(&mut journal, lie).unwrap()), None);
    for (id, right) in [("c", None), ("d", Some("d")), ("d", None), ("c", Some("c"))] {
        journal.begin(&class(id));
        assert_eq!(take(&mut journal, greeting(id)), Ok(None));
        assert_eq!(journal.class().map(|c| c.id.as_str()), Some(id));
        if journal.generated() < 4 {
            let said = take(&mut journal, delta("a", &[1])).unwrap();
            assert_eq!(mark(said).as_deref(), right);
        }
    }
    let Ok(Some(Event::Finished(end))) = take(&mut journal, finished()) else {
        panic!("not finished");
    };
    assert_eq!(end.numerics, Some(class("c")));
    assert!(end.receipt.unwrap().continued_across);
}

#[test]
fn a_stream_that_began_elsewhere_starts_with_what_was_said_there() {
    let request = GenerateRequest {
        seed: Some(1),
        resume: Some(Resume {
            generated_ids: vec![5],
            text_bytes_emitted: 3,
        }),
        ..GenerateRequest::default()
    };
    let journal = Journal::new(request.clone(), vec![1], BOUNDS);
    assert_eq!(journal.request().resume, request.resume);
}

#[test]
fn whatever_breaks_the_protocol_is_found() {
    let refused = |events: Vec<Event>| {
        let mut journal = journal();
        let mut events = events.into_iter();
        let last = events.next_back().unwrap();
        for event in events {
            take(&mut journal, event).unwrap();
        }
        take(&mut journal, last).unwrap_err().0
    };
    let ok = || Event::Accepted(accepted());
    let odd = |change: fn(&mut Accepted)| {
        let mut a = accepted();
        change(&mut a);
        vec![Event::Accepted(a)]
    };
    let logprobs = Event::Delta(Delta {
        token_ids: vec![1],
        logprobs: vec![hotcell_proto::v1::TokenLogprob {
            token: 2,
            ..Default::default()
        }],
        ..Delta::default()
    });
    let one = Usage {
        prompt_tokens: 2,
        generated_tokens: 1,
        cached_tokens: 0,
    };
    for (events, words) in [
        (vec![delta("a", &[1])], "not Accepted"),
        (vec![finished()], "not Accepted"),
        (vec![ok(), ok()], "twice"),
        (odd(|a| a.prompt_ids.push(1)), "prompt"),
        (odd(|a| a.seed = 8), "seed"),
        (odd(|a| a.numerics = None), "without"),
        (odd(|a| a.numerics = Some(class("d"))), "class"),
        (vec![ok(), delta("a", &[100])], "vocabulary"),
        (vec![ok(), delta("a", &[1, 2, 3, 4, 5])], "asked"),
        (vec![ok(), logprobs], "logprobs"),
        (vec![ok(), delta("", &[])], "neither"),
        (vec![ok(), delta("a", &[])], "more text"),
        (vec![ok(), delta(&"x".repeat(1025), &[1])], "more text"),
        (
            vec![ok(), delta(&"x".repeat(limits::MAX_DELTA_BYTES + 1), &[])],
            "bytes",
        ),
        (vec![ok(), Event::Finished(Finished::default())], "reason"),
        (
            vec![ok(), delta("", &[1, 1]), finished_with(Some(one))],
            "another number of tokens",
        ),
        (vec![ok(), finished(), finished()], "after Finished"),
        (vec![ok(), finished(), delta("", &[])], "after Finished"),
    ] {
        let found = refused(events);
        assert!(found.contains(words), "{found} / {words}");
    }
    assert!(journal().take(GenerateEvent { event: None }).is_err());
}

#[test]
fn parts_are_of_the_text_and_asked_for() {
    let part = |kind| OutputPart { kind };
    let content = |text: &str| part(Some(Part::Content(text.into())));
    let call = |index, name: &str| {
        part(Some(Part::ToolCall(ToolCallPart {
            index,
            name: name.into(),
            arguments: String::new(),
        })))
    };
    let with = |text: &str, parts| {
        Event::Delta(Delta {
            text: text.into(),
            token_ids: vec![1],
            parts,
            ..Delta::default()
        })
    };
    let begun = |parse_output| {
        let mut journal = journal();
        journal.request.parse_output = parse_output;
        take(&mut journal, Event::Accepted(accepted())).unwrap();
        journal
    };
    let mut asked = begun(true);
    // What one delta held back, another one says.
    take(&mut asked, with("abc", vec![content("a")])).unwrap();
    let Ok(Some(Event::Delta(said))) = take(&mut asked, with("d", vec![call(0, "bcd")])) else {
        panic!("refused");
    };
    assert_eq!(said.parts, [call(0, "bcd")]);
    assert!(take(&mut asked, with("e", vec![content("ef")])).is_err());
    for bad in [
        part(None),
        content(""),
        call(0, ""),
        call(limits::MAX_TOOL_CALLS as u32, "f"),
        call(0, &"f".repeat(limits::MAX_TOOL_NAME + 1)),
    ] {
        let text = "x".repeat(100);
        assert!(take(&mut begun(true), with(&text, vec![bad])).is_err());
    }
    let many = vec![content("x"); limits::MAX_DELTA_TOKENS + 1];
    let text = "x".repeat(1024);
    assert!(take(&mut begun(true), with(&text, many)).is_err());
    assert!(take(&mut begun(false), with("a", vec![content("a")])).is_err());
}

#[test]
fn a_stream_ends_with_its_context_even_if_the_worker_does_not() {
    let request = GenerateRequest {
        seed: Some(7),
        ..GenerateRequest::default()
    };
    let mut journal = Journal::new(request, vec![1, 2], BOUNDS);
    journal.begin(&class("c"));
    take(&mut journal, Event::Accepted(accepted())).unwrap();
    let said = (0..1000).take_while(|_| take(&mut journal, delta("a", &[1])).is_ok());
    assert_eq!(said.count(), 15);
}

proptest! {
    /// Cut anywhere and as often as one likes, the tokens are said once each.
    #[test]
    fn no_token_is_lost_or_said_twice(cuts in proptest::collection::vec(0usize..4, 0..8)) {
        let script = [10, 11, 12, 13];
        let mut journal = journal();
        let (mut said, mut greeted) = (Vec::new(), 0);
        for cut in cuts.iter().copied().map(Some).chain([None]) {
            journal.begin(&class("c"));
            let done = journal.request().resume.map_or(0, |r| r.generated_ids.len());
            let rest = script[done..].iter().map(|&id| delta("t", &[id]));
            let events = [Event::Accepted(accepted())].into_iter().chain(rest);
            for event in events.take(cut.map_or(usize::MAX, |c| c + 1)) {
                match take(&mut journal, event).unwrap() {
                    Some(Event::Accepted(_)) => greeted += 1,
                    Some(Event::Delta(d)) => said.extend(d.token_ids),
                    _ => {}
                }
            }
        }
        prop_assert_eq!(said, script);
        prop_assert_eq!(greeted, 1);
    }
}
