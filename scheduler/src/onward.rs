//! Where a stream goes on after its worker died: a function of what the journal knows.

use hotcell_proto::{
    error::{Error, Reason},
    limits,
};

use crate::{journal::Journal, placement::Wish};

/// What becomes of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Onward<'a> {
    /// It goes on with a worker that fits this wish.
    Elsewhere(Wish<'a>),
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
    }
}

/// After `died`, the death of which the journal has counted already.
pub fn after_death<'a>(journal: &'a Journal, died: &'a str) -> Onward<'a> {
    let deaths = journal.deaths();
    if deaths > limits::MAX_CONTINUATIONS {
        return Onward::Nowhere(lost(
            died,
            format!(
                "{deaths} workers died under this request; the request itself may be what kills them"
            ),
        ));
    }
    Onward::Elsewhere(wish(journal, died))
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::GenerateRequest;

    use super::*;
    use crate::journal::Bounds;

    #[test]
    fn a_stream_goes_on_as_often_as_allowed() {
        let bounds = Bounds {
            vocabulary: 1,
            context: 1,
        };
        let mut journal = Journal::new(GenerateRequest::default(), vec![0], bounds);
        for _ in 0..limits::MAX_CONTINUATIONS {
            journal.count_death();
            let wish = Wish {
                class: None,
                avoid: Some("w0"),
            };
            assert_eq!(after_death(&journal, "w0"), Onward::Elsewhere(wish));
        }
        journal.count_death();
        let Onward::Nowhere(error) = after_death(&journal, "w0") else {
            panic!("goes on for ever");
        };
        assert_eq!(error.reason(), Reason::WorkerLost);
        assert_eq!(error.get("worker"), Some("w0"));
    }
}
