//! Captures as they are shown: followed, put together, compared.

use std::fmt::Write as _;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{self, Captured},
};
use serde_json::{Value, json};

use crate::{
    cli::{exit::Failure, interrupt::Interrupt, ui::one_line},
    control::Messages,
    debug::{Compared, Difference, Recorded, Recorder, Recording},
};

/// Puts a capture together and shows each token as it comes. If it `keeps` what came before Ctrl-C, that ends it.
pub(in crate::cli) async fn follow(
    mut messages: Messages<Captured>,
    interrupt: &mut Interrupt,
    keeps: bool,
    mut show: impl FnMut(&v1::CaptureHead, &Recorded) -> Result<(), Failure>,
) -> Result<Recording, Failure> {
    let mut recorder = Recorder::default();
    let (mut tokens, mut prefix) = (Vec::new(), Vec::new());
    let mut interrupted = false;
    loop {
        let told = tokio::select! {
            told = messages.next() => told.transpose()?,
            () = interrupt.pressed() => match keeps && !tokens.is_empty() {
                true => {
                    interrupted = true;
                    None
                }
                false => return Err(Failure::Interrupted),
            },
        };
        let Some(told) = told else { break };
        let token = recorder.push(told)?;
        if let Some(row) = token.as_ref().filter(|token| token.of_prefix) {
            prefix.push(row.clone());
        } else if let Some(token) = token {
            if let Some(head) = recorder.head() {
                show(head, &token)?;
            }
            tokens.push(token);
        }
    }
    if recorder.end().is_none() && !interrupted {
        let what = "what was told broke off before its end; ask again";
        return Err(Failure::Call(Error::new(Reason::WorkerLost, what)));
    }
    let head = recorder.head().cloned().ok_or_else(|| {
        let what = "the request ended before a token of it was seen";
        Failure::Call(Error::new(Reason::RequestNotFound, what))
    })?;
    Ok(Recording {
        head,
        tokens,
        prefix,
        end: recorder.end().cloned(),
    })
}

/// A token's rows as JSON, without their values.
pub(super) fn token_view(token: &Recorded) -> Value {
    json!({
        "token": token.index,
        "position": token.position,
        "id": token.token,
        "as_expected": token.as_expected,
        "missed": token.missed,
        "rows": token.nodes.len(),
    })
}

pub(super) fn row_view(node: &v1::CapturedNode, row: &v1::NodeValues) -> Value {
    json!({
        "node": node.name,
        "op": node.op,
        "layer": node.layer,
        "weight": node.weight,
        "dtype": node.dtype,
        "dims": node.dims,
        "sha256": row.hash.iter().map(|b| format!("{b:02x}")).collect::<String>(),
        "nan": row.nan,
        "infinite": row.infinite,
        "zero": row.zero,
        "least": row.least,
        "greatest": row.greatest,
        "mean": row.mean,
        "rms": row.rms,
    })
}

/// A node by its name, and the weight that it reads.
pub(super) fn named(node: &v1::CapturedNode) -> String {
    match node.weight.as_str() {
        "" => node.name.clone(),
        weight => format!("{} ({weight})", node.name),
    }
}

/// What a row is like, in a line.
pub(super) fn row_line(row: &v1::NodeValues) -> String {
    let mut text = format!(
        "least {:.6}, greatest {:.6}, mean {:.6}, rms {:.6}",
        row.least, row.greatest, row.mean, row.rms
    );
    for (what, count) in [
        ("NaN", row.nan),
        ("infinite", row.infinite),
        ("zero", row.zero),
    ] {
        if count > 0 {
            // Writing to a string cannot fail.
            let _ = write!(text, ", {count} {what}");
        }
    }
    text
}

/// A node and its row in a line of their own.
pub(super) fn node_line(node: &v1::CapturedNode, row: &v1::NodeValues) -> String {
    format!("  {}: {}\n", one_line(&named(node)), row_line(row))
}

/// The first difference in words.
pub(super) fn difference(first: &Difference) -> String {
    let [ours, reference] = &first.rows;
    let mut text = format!(
        "token {}, node {} is the first that differs",
        first.token,
        named(&first.node)
    );
    if let Some(likeness) = &first.likeness {
        let _ = write!(
            text,
            ": by {:.3e} at most, cosine {:.9}, {} values no numbers on one side only",
            likeness.max_abs, likeness.cosine, likeness.mismatched
        );
    }
    let _ = write!(
        text,
        "; now {}; before {}",
        row_line(ours),
        row_line(reference)
    );
    one_line(&text)
}

pub(super) fn compared_view(compared: &Compared) -> Value {
    let first = compared.first.as_ref().map(|first| {
        let [ours, reference] = &first.rows;
        let likeness = first.likeness.as_ref().map(|l| {
            json!({
                "cosine": l.cosine,
                "max_abs": l.max_abs,
                "max_rel": l.max_rel,
                "nmse": l.nmse,
                "mismatched": l.mismatched,
            })
        });
        json!({
            "token": first.token,
            "now": row_view(&first.node, ours),
            "before": row_view(&first.node, reference),
            "likeness": likeness,
        })
    });
    json!({
        "tokens": compared.tokens,
        "rows": compared.rows,
        "same": compared.same,
        "equal": compared.rows > 0 && compared.same == compared.rows,
        "first": first,
    })
}
