//! Captures as they are shown: followed, put together, compared.

use std::fmt::Write as _;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{self, Captured},
};
use serde_json::{Value, json};

use crate::{
    cli::{exit::Failure, interrupt::Interrupt, table::bytes, ui::one_line},
    control::Messages,
    debug::{Compared, Difference, Recorded, Recorder, Recording, Spool},
};

/// What is done about a capture that does not come to its end.
pub(in crate::cli) enum Keeping<'a> {
    /// It is of no use.
    Nothing,
    /// Nor is that; values are put there meanwhile.
    Values(&'a mut Spool),
    /// What came is kept, and its values are put there.
    All(&'a mut Spool),
}

/// A capture put together.
pub(in crate::cli) struct Followed {
    pub(in crate::cli) recording: Recording,
    /// Why there is no more of it, if it broke off. Ctrl-C is no such reason.
    pub(in crate::cli) broke_off: Option<String>,
}

/// Puts a capture together and shows each token as it comes; what does not come to its end fails.
pub(in crate::cli) async fn follow(
    messages: Messages<Captured>,
    interrupt: &mut Interrupt,
    show: impl FnMut(&v1::CaptureHead, &Recorded) -> Result<(), Failure>,
) -> Result<Recording, Failure> {
    let followed = follow_all(messages, interrupt, Keeping::Nothing, show).await?;
    Ok(followed.recording)
}

/// What was left out for want of budget, in words that follow others; nothing if nothing was.
pub(super) fn left_out(end: &v1::CaptureEnd) -> String {
    match end.left_out {
        0 => String::new(),
        rows => format!(
            "; values of {rows} rows were left out: {} beyond the budget",
            bytes(end.left_out_bytes)
        ),
    }
}

/// The same, also of one that breaks off if it is `kept`.
pub(in crate::cli) async fn follow_all(
    mut messages: Messages<Captured>,
    interrupt: &mut Interrupt,
    mut kept: Keeping<'_>,
    mut show: impl FnMut(&v1::CaptureHead, &Recorded) -> Result<(), Failure>,
) -> Result<Followed, Failure> {
    let mut recorder = Recorder::default();
    let (mut tokens, mut prefix) = (Vec::new(), Vec::new());
    let (mut interrupted, mut broke_off) = (false, None);
    loop {
        let is_kept = matches!(kept, Keeping::All(_)) && !tokens.is_empty();
        let told = tokio::select! {
            told = messages.next() => match told.transpose() {
                Ok(told) => told,
                // The worker died, or who passes its words on: what came before is what one wants to see.
                Err(error) if is_kept => {
                    broke_off = Some(one_line(error.message()));
                    None
                }
                Err(error) => return Err(error.into()),
            },
            () = interrupt.pressed() => match is_kept {
                true => {
                    interrupted = true;
                    None
                }
                false => return Err(Failure::Interrupted),
            },
        };
        let Some(told) = told else { break };
        let mut token = recorder.push(told)?;
        if let (Some(token), Keeping::All(spool) | Keeping::Values(spool)) = (&mut token, &mut kept)
        {
            spool.take(token)?;
        }
        if let Some(row) = token.as_ref().filter(|token| token.of_prefix) {
            prefix.push(row.clone());
        } else if let Some(token) = token {
            if let Some(head) = recorder.head() {
                show(head, &token)?;
            }
            tokens.push(token);
        }
    }
    if recorder.end().is_none() && !interrupted && broke_off.is_none() {
        let what = "what was told broke off before its end; ask again";
        match matches!(kept, Keeping::All(_)) && !tokens.is_empty() {
            true => broke_off = Some(what.to_owned()),
            false => return Err(Failure::Call(Error::new(Reason::WorkerLost, what))),
        }
    }
    let head = recorder.head().cloned().ok_or_else(|| {
        let what = "the request ended before a token of it was seen";
        Failure::Call(Error::new(Reason::RequestNotFound, what))
    })?;
    let recording = Recording {
        head,
        tokens,
        prefix,
        end: recorder.end().cloned(),
    };
    Ok(Followed {
        recording,
        broke_off,
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
pub(in crate::cli) fn named(node: &v1::CapturedNode) -> String {
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
