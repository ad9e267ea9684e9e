//! Holding answers against one another.

use hotcell_client::{Completion, v1};

use crate::cluster::counted;

/// All that a client can see of two answers, but times and deaths, is the same.
///
/// # Panics
/// When it is not, saying of `what`.
pub fn assert_same(got: &Completion, calm: &Completion, what: &str) {
    assert_eq!(got.token_ids, calm.token_ids, "{what}");
    assert_eq!(got.text, calm.text, "{what}");
    assert_eq!(got.logprobs, calm.logprobs, "{what}");
    assert_eq!(got.accepted.prompt_ids, calm.accepted.prompt_ids, "{what}");
    assert_eq!(got.accepted.numerics, calm.accepted.numerics, "{what}");
    let (end, calm_end) = (&got.finished, &calm.finished);
    assert_eq!(counted(end), counted(calm_end), "{what}");
    assert_eq!(end.reason, calm_end.reason, "{what}");
    assert_eq!(end.matched_stop, calm_end.matched_stop, "{what}");
    let receipt = |f: &v1::Finished| {
        let told = f.receipt.clone();
        assert_eq!(
            told.as_ref().map(|r| r.deaths_survived),
            Some(f.deaths_survived)
        );
        told.map(|receipt| v1::Receipt {
            deaths_survived: 0,
            ..receipt
        })
    };
    assert_eq!(receipt(end), receipt(calm_end), "{what}");
}
