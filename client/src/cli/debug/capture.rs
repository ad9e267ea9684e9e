//! `hotcell debug capture`: what is computed for a request, into a file.

use std::path::PathBuf;

use clap::Args;
use hotcell_proto::v1::{CaptureOptions, CaptureRequest, capture_request::Which};
use serde_json::json;

use super::told::{follow, token_view};
use crate::cli::{
    exit::Failure,
    interrupt::Interrupt,
    session::Session,
    table::bytes,
    ui::{DIM, Ui, one_line},
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

/// `hotcell debug capture`.
#[derive(Args, Clone, Debug)]
pub struct CaptureFlags {
    /// The request's id, as `hotcell debug watch --verbose` shows it, also of one that comes later
    #[arg(required_unless_present = "next", conflicts_with = "next")]
    pub request: Option<String>,
    /// The next request that comes
    #[arg(long)]
    pub next: bool,
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

pub(super) async fn capture(
    ui: &mut Ui,
    session: &Session,
    flags: &CaptureFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let request = CaptureRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        model: flags.model.clone().unwrap_or_default(),
        which: Some(match &flags.request {
            Some(id) => Which::RequestId(id.clone()),
            None => Which::Next(true),
        }),
        options: Some(flags.look.options(flags.tokens)),
    };
    let messages = session.client.capture(request).await?;
    if !ui.manner.json {
        ui.note(
            DIM,
            "waiting for the request's tokens; Ctrl-C keeps what came so far",
        );
    }
    // What came before Ctrl-C is of use, too.
    let recording = follow(messages, interrupt, true, |_, token| match ui.manner.json {
        true => ui.print_json(&token_view(token)),
        false => Ok(()),
    })
    .await?;
    let size = recording.write(&flags.output)?;
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
        }));
    }
    let mut text = format!(
        "{}: {} tokens of {} nodes, {}",
        one_line(&path),
        recording.tokens.len(),
        recording.head.nodes.len(),
        bytes(size)
    );
    if missed > 0 {
        text.push_str(&format!("; {missed} tokens were left out: too slow"));
    }
    if end.left_out > 0 {
        text.push_str(&format!(
            "; values of {} rows were left out: {} beyond the budget",
            end.left_out,
            bytes(end.left_out_bytes)
        ));
    }
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
    }
}
