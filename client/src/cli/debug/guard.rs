//! `hotcell debug guard`: watchpoints.

use std::path::{Path, PathBuf};

use clap::Args;
use hotcell_proto::v1::{
    CaptureOptions, Condition, GuardHit, GuardRequest, Range, ReplayRequest, condition::Kind,
    guard_event, replay_request::Which,
};
use serde_json::{Value, json};

use super::{
    capture::{Layers, all_layers, layers},
    told::{follow, named},
};
use crate::cli::{
    exit::Failure,
    interrupt::Interrupt,
    session::Session,
    table::bytes,
    ui::{DIM, Ui, one_line},
};

/// `hotcell debug guard`.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("condition").required(true).multiple(true))]
pub struct GuardFlags {
    /// The worker, where there are several
    #[arg(short, long, value_name = "NAME")]
    pub worker: Option<String>,
    /// The model, where the worker has several
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// A value is NaN
    #[arg(long, group = "condition")]
    pub nan: bool,
    /// A value is infinite
    #[arg(long, group = "condition")]
    pub inf: bool,
    /// An absolute value is above X
    #[arg(long, value_name = "X", group = "condition")]
    pub above: Option<f32>,
    /// The root of a row's mean square is outside of A to B
    #[arg(long, value_name = "A,B", value_parser = range, group = "condition")]
    pub rms_outside: Option<(f32, f32)>,
    /// All values of a row are zero
    #[arg(long, group = "condition")]
    pub zero: bool,
    /// Nodes whose name, op or weight is of this pattern (* stands for anything); may be given several times [default: all]
    #[arg(long = "node", value_name = "PATTERN")]
    pub nodes: Vec<String>,
    /// Nodes of this layer, or of 3-5; may be given several times [default: all]
    #[arg(long = "layer", value_name = "N", value_parser = layers)]
    pub layers: Vec<Layers>,
    /// End the request for which one holds; others go on
    #[arg(long)]
    pub end: bool,
    /// End after so many hits [default: with --capture 1, else none]
    #[arg(short = 'n', long, value_name = "N")]
    pub hits: Option<u64>,
    /// Capture what is computed for the first hit's token into this file, by running the request again from there in a
    /// throw-away worker. Needs a request whose stream the scheduler still knows: a running one, or one with an id of its
    /// client's
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,
    /// Tell the numbers of rows that follow from one token alone, and keep the prompt and the tokens in a capture, so that it
    /// can be run again
    #[arg(long)]
    pub reveal: bool,
}

/// Two numbers, the first not above the second.
pub(super) fn range(text: &str) -> Result<(f32, f32), String> {
    let parts = text.split_once(',');
    let parsed = parts.and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
    parsed
        .filter(|(a, b): &(f32, f32)| a <= b)
        .ok_or_else(|| "write A,B, for example 0.01,10".to_owned())
}

impl GuardFlags {
    /// Each condition, and how it is called.
    fn conditions(&self) -> Vec<(Kind, String)> {
        let mut all = Vec::new();
        let mut say = |is: bool, kind: Kind, name: String| all.extend(is.then_some((kind, name)));
        say(self.nan, Kind::Nan(true), "nan".to_owned());
        say(self.inf, Kind::Infinite(true), "inf".to_owned());
        let above = self.above.unwrap_or_default();
        say(
            self.above.is_some(),
            Kind::Above(above),
            format!("abs > {above}"),
        );
        let (least, most) = self.rms_outside.unwrap_or_default();
        let outside = Kind::RmsOutside(Range { least, most });
        let name = format!("rms outside [{least}, {most}]");
        say(self.rms_outside.is_some(), outside, name);
        say(self.zero, Kind::Zero(true), "zero".to_owned());
        all
    }
}

pub(super) async fn guard(
    ui: &mut Ui,
    session: &Session,
    flags: &GuardFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let conditions = flags.conditions();
    let kinds = conditions
        .iter()
        .map(|(kind, _)| Condition { kind: Some(*kind) });
    let request = GuardRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        model: flags.model.clone().unwrap_or_default(),
        nodes: flags.nodes.clone(),
        layers: all_layers(&flags.layers),
        conditions: kinds.collect(),
        end: flags.end,
        reveal: flags.reveal,
    };
    let mut events = session.client.guard(request).await?;
    let (mut hits, mut captured) = (0, false);
    let most = flags.hits.or(flags.capture.as_ref().map(|_| 1));
    while most.is_none_or(|most| hits < most) {
        let event = tokio::select! {
            event = events.next() => event.transpose()?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        let Some(event) = event else { break };
        match event.kind {
            Some(guard_event::Kind::Armed(nodes)) if ui.manner.json => {
                ui.print_json(&json!({ "armed": nodes }))?;
            }
            Some(guard_event::Kind::Armed(nodes)) => {
                ui.note(DIM, &format!("looking at {nodes} nodes in every step"));
            }
            Some(guard_event::Kind::Hit(hit)) => {
                hits += 1;
                let which = conditions.get(hit.condition as usize);
                let name = which.map_or("?", |(_, name)| name);
                match ui.manner.json {
                    true => ui.print_json(&view(&hit, name))?,
                    false => ui.print(&line(&hit, name))?,
                }
                // A prompt that is read for its embedding cannot be run again.
                let is_first = !captured && !hit.request_id.is_empty();
                if let Some(path) = flags.capture.as_deref().filter(|_| is_first) {
                    captured = true;
                    capture(ui, session, (&hit, path, flags.reveal), interrupt).await?;
                }
            }
            None => {}
        }
    }
    Ok(())
}

/// Has the request of a hit run again from the hit's token, and keeps what is computed for that.
async fn capture(
    ui: &mut Ui,
    session: &Session,
    (hit, path, reveal): (&GuardHit, &Path, bool),
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let request = ReplayRequest {
        worker: hit.worker.clone(),
        at: hit.token,
        options: Some(CaptureOptions {
            tokens: 1,
            values: u32::MAX,
            reveal,
            ..CaptureOptions::default()
        }),
        which: Some(Which::RequestId(hit.request_id.clone())),
        ..ReplayRequest::default()
    };
    let messages = session.client.replay(request).await?;
    let recording = follow(messages, interrupt, |_, _| Ok(())).await?;
    let size = recording.write(path)?;
    let path = path.display().to_string();
    match ui.manner.json {
        true => ui.print_json(&json!({ "file": path, "bytes": size })),
        false => ui.print(&format!("{}: {}\n", one_line(&path), bytes(size))),
    }
}

/// A hit in a line.
pub(in crate::cli) fn line(hit: &GuardHit, condition: &str) -> String {
    let node = hit.node.clone().unwrap_or_default();
    let id = match hit.request_id.as_str() {
        "" => "an embedding",
        id => id,
    };
    let mut text = format!(
        "{condition} at {} in {id} of {}, token {}, position {}",
        named(&node),
        hit.model,
        hit.token,
        hit.position,
    );
    match hit.withheld {
        true => text.push_str("; its numbers would tell the token, and are told with --reveal"),
        false => text.push_str(&format!(": peak {}, rms {}", hit.peak, hit.rms)),
    }
    if hit.further > 0 {
        text.push_str(&format!("; {} nodes after it", hit.further));
    }
    if hit.ended {
        text.push_str("; the request was ended");
    }
    if hit.missed > 0 {
        text.push_str(&format!("; {} hits before it were missed", hit.missed));
    }
    format!("{}\n", one_line(&text))
}

pub(in crate::cli) fn view(hit: &GuardHit, condition: &str) -> Value {
    let node = hit.node.clone().unwrap_or_default();
    // JSON has no NaN: what is none is null.
    json!({
        "condition": condition,
        "worker": hit.worker,
        "epoch": hit.epoch,
        "model": hit.model,
        "request_id": hit.request_id,
        "node": node.name,
        "op": node.op,
        "layer": node.layer,
        "weight": node.weight,
        "token": hit.token,
        "position": hit.position,
        "peak": (!hit.withheld).then_some(hit.peak),
        "rms": (!hit.withheld).then_some(hit.rms),
        "withheld": hit.withheld,
        "further": hit.further,
        "ended": hit.ended,
        "missed": hit.missed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_is_one_line_that_names_the_node() {
        let hit = GuardHit {
            model: "m\u{1b}".into(),
            request_id: "r1".into(),
            token: 3,
            peak: f32::NAN,
            further: 2,
            ended: true,
            ..GuardHit::default()
        };
        let text = line(&hit, "nan");
        assert!(text.starts_with("nan at  in r1 of m"), "{text}");
        assert!(
            text.contains("2 nodes after it; the request was ended"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}') && text.lines().count() == 1);
        assert!(view(&hit, "nan")["peak"].is_null());
        let hit = GuardHit {
            withheld: true,
            ..hit
        };
        let text = line(&hit, "nan");
        assert!(
            text.contains("--reveal") && !text.contains("peak"),
            "{text}"
        );
        assert!(view(&hit, "nan")["rms"].is_null());
        assert_eq!(range("0.5,2"), Ok((0.5, 2.0)));
        assert!(range("2,1").is_err() && range("1").is_err());
    }
}
