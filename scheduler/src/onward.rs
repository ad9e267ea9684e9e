//! Where a stream goes on after its worker died: a function of what the journal knows.

use hotcell_proto::error::{Error, Reason};

use crate::{death::Death, journal::Journal, placement::Wish, suspicion::Next};

/// What becomes of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Onward<'a> {
    /// It goes on with a worker that fits this wish.
    Elsewhere(Wish<'a>),
    /// It goes on with a worker that fits this wish and has nothing else to do.
    Alone(Wish<'a>),
    /// It ends.
    Nowhere(Error),
}

/// What became of a stream's worker.
pub fn lost(worker: &str, why: String) -> Error {
    Error::new(Reason::WorkerLost, why).with("worker", worker)
}

/// The same class, if the stream has one, and rather not the worker that had it.
pub fn wish<'a>(journal: &'a Journal, had: &'a str) -> Wish<'a> {
    Wish {
        class: journal.class().map(|class| class.id.as_str()),
        avoid: Some(had),
        ..Wish::default()
    }
}

fn last(death: Option<&Death>) -> String {
    death.map_or_else(String::new, |death| format!(", the last one: {death}"))
}

/// `what` (a request, named) killed `worker`, where nothing else ran.
pub fn poison(what: &str, worker: &str, deaths: u32, death: Option<&Death>) -> Error {
    let why = format!(
        "{what} killed a worker on which nothing else ran, after {deaths} deaths in all{}; sent again it would do so again",
        last(death)
    );
    Error::new(Reason::RequestPoisoned, why)
        .with("worker", worker)
        .with("deaths", deaths)
}

/// So many workers died under a request, `worker` last.
pub fn too_often(worker: &str, deaths: u32, death: Option<&Death>) -> Error {
    let why = format!(
        "{deaths} workers died under this request{}; the request itself may be what kills them",
        last(death)
    );
    lost(worker, why)
}

/// After `died`, the death of which the journal has counted already and that is judged to mean `next`. `home` is the
/// worker whose device it ran on.
pub fn after_death<'a>(
    journal: &'a Journal,
    died: &str,
    death: Option<&Death>,
    home: &'a str,
    next: Next,
) -> Onward<'a> {
    let deaths = journal.deaths();
    match next {
        Next::GoOn => Onward::Elsewhere(wish(journal, home)),
        Next::Alone => Onward::Alone(wish(journal, home)),
        Next::Poison => {
            let (id, tokens) = (journal.request_id(), journal.generated());
            let what = format!("request {id}, {tokens} tokens along,");
            Onward::Nowhere(poison(&what, died, deaths, death))
        }
        Next::GiveUp => Onward::Nowhere(too_often(died, deaths, death)),
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::GenerateRequest;

    use super::*;
    use crate::{death::DeathKind, journal::Bounds};

    #[test]
    fn a_verdict_says_where_a_stream_goes_on_or_why_it_does_not() {
        let bounds = Bounds {
            vocabulary: 1,
            context: 1,
        };
        let request = GenerateRequest {
            request_id: "mine".into(),
            ..GenerateRequest::default()
        };
        let mut journal = Journal::new(request, vec![0], bounds);
        journal.count_death();
        let death = Death::new(DeathKind::Signal { number: 11 }, "");
        let after = |next| after_death(&journal, "w0.solo1", Some(&death), "w0", next);
        let wish = Wish {
            avoid: Some("w0"),
            ..Wish::default()
        };
        assert_eq!(after(Next::GoOn), Onward::Elsewhere(wish));
        assert_eq!(after(Next::Alone), Onward::Alone(wish));
        for (next, reason) in [
            (Next::Poison, Reason::RequestPoisoned),
            (Next::GiveUp, Reason::WorkerLost),
        ] {
            let Onward::Nowhere(error) = after(next) else {
                panic!("goes on after {next:?}");
            };
            assert_eq!(error.reason(), reason);
            assert_eq!(error.get("worker"), Some("w0.solo1"));
            assert!(error.message().contains("SIGSEGV"), "{error}");
        }
        let Onward::Nowhere(error) = after(Next::Poison) else {
            panic!("goes on");
        };
        assert!(error.message().contains("request mine"), "{error}");
    }
}
