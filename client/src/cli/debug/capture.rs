//! `hotcell debug capture`: what is computed for a request, into a file.

use std::path::PathBuf;

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{
        CaptureOptions, CaptureRequest, Captured, Condition, GuardRequest, Range, ReplayRequest,
        capture_request::Which, condition::Kind, guard_event, replay_request::Which as Again,
    },
};
use serde_json::json;

use super::{
    guard::{line as hit_line, range, view as hit_view},
    told::{Followed, Keeping, follow_all, left_out, token_view},
};
use crate::{
    cli::{
        exit::Failure,
        interrupt::Interrupt,
        session::Session,
        table::bytes,
        ui::{DIM, Ui, one_line},
    },
    control::Messages,
    debug::Spool,
};

/// Which nodes are looked at, and what of them is kept.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What is looked at")]
pub struct LookFlags {
    /// Nodes whose name, op or weight is of this pattern (* stands for anything); may be given several times [default: all]
    #[arg(long = "node", value_name = "PATTERN")]
    pub nodes: Vec<String>,
    /// Nodes of this layer, or of 3-5; may be given several times [default: all]
    #[arg(long = "layer", value_name = "N", value_parser = layers)]
    pub layers: Vec<Layers>,
    /// The logits only
    #[arg(long, conflicts_with_all = ["nodes", "layers"])]
    pub only_logits: bool,
    /// Values of each row to keep, from its first on; `all`
    #[arg(long, value_name = "N", default_value = "0", value_parser = values)]
    pub values: u32,
    /// Bytes of values to keep in all; what does not fit is counted [default: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub max_bytes: Option<u64>,
    /// Show and keep the prompt and the tokens too
    #[arg(long)]
    pub reveal: bool,
}

/// Some layers: the first and the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers(u32, u32);

pub(super) fn layers(text: &str) -> Result<Layers, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let parsed = first.parse().ok().zip(last.parse().ok());
    let some = parsed.filter(|(first, last)| first <= last && last - first < 1024);
    let (first, last) =
        some.ok_or_else(|| "write a layer such as 3, or some such as 3-5".to_owned())?;
    Ok(Layers(first, last))
}

fn values(text: &str) -> Result<u32, String> {
    match text {
        "all" => Ok(u32::MAX),
        number => number
            .parse()
            .map_err(|_| "write a number, or all".to_owned()),
    }
}

/// Each of them.
pub(super) fn all_layers(layers: &[Layers]) -> Vec<u32> {
    let all = layers.iter().flat_map(|&Layers(first, last)| first..=last);
    all.collect()
}

impl LookFlags {
    pub(super) fn options(&self, tokens: u64) -> CaptureOptions {
        CaptureOptions {
            nodes: self.nodes.clone(),
            layers: all_layers(&self.layers),
            only_logits: self.only_logits,
            tokens,
            values: self.values,
            max_bytes: self.max_bytes.unwrap_or(0),
            reveal: self.reveal,
            prefix: false,
        }
    }
}

/// A condition on nodes' values, and how it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct When(Kind, pub(in crate::cli) String);

impl When {
    pub(in crate::cli) fn wire(&self) -> Condition {
        Condition { kind: Some(self.0) }
    }
}

pub(in crate::cli) fn condition(text: &str) -> Result<When, String> {
    let kind = match text.split_once('=') {
        None => match text {
            "nan" => Some(Kind::Nan(true)),
            "inf" => Some(Kind::Infinite(true)),
            "zero" => Some(Kind::Zero(true)),
            _ => None,
        },
        Some(("above", most)) => most.parse().ok().map(Kind::Above),
        Some(("rms", outside)) => {
            let (least, most) = range(outside)?;
            Some(Kind::RmsOutside(Range { least, most }))
        }
        Some(_) => None,
    };
    let kind = kind.ok_or_else(|| "write nan, inf, zero, above=X or rms=A,B".to_owned())?;
    Ok(When(kind, text.to_owned()))
}

/// Waits for a request that meets one of the conditions, and has it run again from the token at which it does.
async fn met(
    ui: &mut Ui,
    session: &Session,
    flags: &CaptureFlags,
    interrupt: &mut Interrupt,
) -> Result<ReplayRequest, Failure> {
    let request = GuardRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        model: flags.model.clone().unwrap_or_default(),
        nodes: flags.at.clone(),
        conditions: flags.when.iter().map(When::wire).collect(),
        ..GuardRequest::default()
    };
    let mut events = session.client.guard(request).await?;
    loop {
        let event = tokio::select! {
            event = events.next() => event.transpose()?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        let event = event.ok_or_else(|| {
            let what = "nobody looks for it any more; try again";
            Failure::Call(Error::new(Reason::WorkerLost, what))
        })?;
        match event.kind {
            Some(guard_event::Kind::Armed(nodes)) if !ui.manner.json => {
                ui.note(DIM, &format!("looking at {nodes} nodes in every step"));
            }
            // What is read for its embedding cannot be run again.
            Some(guard_event::Kind::Hit(hit)) if !hit.request_id.is_empty() => {
                let when = flags.when.get(hit.condition as usize);
                let name = when.map_or("?", |when| when.1.as_str());
                match ui.manner.json {
                    true => ui.print_json(&hit_view(&hit, name))?,
                    false => ui.print(&hit_line(&hit, name))?,
                }
                return Ok(ReplayRequest {
                    worker: hit.worker,
                    at: hit.token,
                    options: Some(flags.look.options(flags.tokens)),
                    which: Some(Again::RequestId(hit.request_id)),
                    ..ReplayRequest::default()
                });
            }
            _ => {}
        }
    }
}

/// `hotcell debug capture`.
#[derive(Args, Clone, Debug)]
pub struct CaptureFlags {
    /// The request's id, as `hotcell debug watch --verbose` shows it, also of one that comes later
    #[arg(required_unless_present_any = ["next", "when"], conflicts_with = "next")]
    pub request: Option<String>,
    /// The next request that comes
    #[arg(long)]
    pub next: bool,
    /// The next request for which this holds at a node, from that token on: `nan`, `inf`, `zero`, `above=X`, `rms=A,B`
    /// (the root of a row's mean square is outside); may be given several times. It is run again from there in a throw-away
    /// worker, so that nothing is kept of others. Needs a request whose stream the scheduler still knows: a running one,
    /// or one with an id of its client's
    #[arg(long, value_name = "CONDITION", value_parser = condition, conflicts_with_all = ["next", "request"])]
    pub when: Vec<When>,
    /// With --when: nodes at which it may hold, by name, op or weight (* stands for anything); may be given several times
    /// [default: all]
    #[arg(long, value_name = "PATTERN", requires = "when")]
    pub at: Vec<String>,
    /// Where to write it; it is there once it is whole
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The worker, where there are several
    #[arg(short, long, value_name = "NAME")]
    pub worker: Option<String>,
    /// The model, where the worker has several
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Tokens to look at; 0: until the request ends
    #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
    pub tokens: u64,
    /// What is looked at.
    #[command(flatten)]
    pub look: LookFlags,
}

/// Has a request looked at while it is served.
async fn asked(session: &Session, flags: &CaptureFlags) -> Result<Messages<Captured>, Failure> {
    let request = CaptureRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        model: flags.model.clone().unwrap_or_default(),
        which: Some(match &flags.request {
            Some(id) => Which::RequestId(id.clone()),
            None => Which::Next(true),
        }),
        options: Some(flags.look.options(flags.tokens)),
    };
    Ok(session.client.capture(request).await?)
}

pub(super) async fn capture(
    ui: &mut Ui,
    session: &Session,
    flags: &CaptureFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    // Where it cannot be written, nobody has to wait to be told.
    let mut spool = Spool::beside(&flags.output)?;
    let messages = match flags.when.is_empty() {
        true => asked(session, flags).await?,
        false => {
            let again = met(ui, session, flags, interrupt).await?;
            tokio::select! {
                messages = session.client.replay(again) => messages?,
                () = interrupt.pressed() => return Err(Failure::Interrupted),
            }
        }
    };
    if !ui.manner.json {
        ui.note(
            DIM,
            "waiting for the request's tokens; Ctrl-C keeps what came so far",
        );
    }
    // What came before Ctrl-C, or a death, is of use, too.
    let kept = Keeping::All(&mut spool);
    let followed = follow_all(messages, interrupt, kept, |_, token| match ui.manner.json {
        true => ui.print_json(&token_view(token)),
        false => Ok(()),
    });
    let Followed {
        recording,
        broke_off,
    } = followed.await?;
    let size = recording.write_with(&flags.output, spool)?;
    let end = recording.end.clone().unwrap_or_default();
    let missed: u64 = recording.tokens.iter().map(|token| token.missed).sum();
    let path = flags.output.display().to_string();
    if ui.manner.json {
        return ui.print_json(&json!({
            "file": path,
            "bytes": size,
            "tokens": recording.tokens.len(),
            "nodes": recording.head.nodes.len(),
            "missed": missed,
            "left_out": end.left_out,
            "left_out_bytes": end.left_out_bytes,
            "full": end.full,
            "whole": recording.end.is_some(),
            "broke_off": broke_off,
        }));
    }
    let mut text = format!(
        "{}: {} tokens of {} nodes, {}",
        one_line(&path),
        recording.tokens.len(),
        recording.head.nodes.len(),
        bytes(size)
    );
    if let Some(why) = &broke_off {
        text.push_str(&format!("; it broke off, and these are kept: {why}"));
    }
    if missed > 0 {
        text.push_str(&format!("; {missed} tokens were left out: too slow"));
    }
    text.push_str(&left_out(&end));
    if end.full {
        text.push_str("; no more tokens of so many nodes fit: choose some with --node or --layer");
    }
    if !recording.head.revealed {
        text.push_str("; without the prompt, which --reveal keeps: it cannot be run again");
    }
    ui.print(&format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_one_or_some() {
        assert_eq!(layers("3"), Ok(Layers(3, 3)));
        assert_eq!(layers("3-5"), Ok(Layers(3, 5)));
        for odd in ["", "a", "5-3", "-1", "0-4294967295"] {
            assert!(layers(odd).is_err(), "{odd}");
        }
        assert_eq!(values("all"), Ok(u32::MAX));
        assert!(values("some").is_err());
        assert_eq!(condition("nan").unwrap().0, Kind::Nan(true));
        assert_eq!(condition("above=2.5").unwrap().0, Kind::Above(2.5));
        let outside = Range {
            least: 0.5,
            most: 2.0,
        };
        assert_eq!(condition("rms=0.5,2").unwrap().0, Kind::RmsOutside(outside));
        for odd in ["", "above", "above=x", "rms=2,1", "nan=1"] {
            assert!(condition(odd).is_err(), "{odd}");
        }
    }
}
