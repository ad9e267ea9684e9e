//! `hotcell debug compare`: two sides of one request, node by node.

use std::{io::Write, path::PathBuf};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CaptureOptions, GenerateRequest},
};
use serde_json::{Value, json};

use super::{
    capture::{Layers, all_layers, layers},
    replay::known,
    report,
    sides::{Side, SideFlags},
    told::named,
};
use crate::{
    cli::{
        GlobalFlags,
        exit::Failure,
        interrupt::Interrupt,
        table::Table,
        ui::{DIM, Ui, one_line},
    },
    debug::{Bisected, Likeness, NodeLikeness, Recording, Ulps, bisect, dumped, liken},
    local::Bundled,
    whole::{self, Readers},
};

/// Nodes that are listed unless all are wanted.
const LISTED: usize = 24;

/// `hotcell debug compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareFlags {
    /// A file that `hotcell debug capture` or `replay` wrote
    pub capture: PathBuf,
    /// What it is compared with: another capture, or a .safetensors file with tensors named as the nodes
    pub reference: Option<PathBuf>,
    /// What is compared.
    #[command(flatten)]
    pub sides: SideFlags,
    /// Nodes whose name, op or weight is of this pattern (* stands for anything); may be given several times [default: all]
    #[arg(long = "node", value_name = "PATTERN")]
    pub nodes: Vec<String>,
    /// Nodes of this layer, or of 3-5; may be given several times [default: all]
    #[arg(long = "layer", value_name = "N", value_parser = layers)]
    pub layers: Vec<Layers>,
    /// Find the first token that differs by looking at a few of the capture's, and compare that one
    #[arg(long, conflicts_with = "reference")]
    pub bisect: bool,
    /// Allow so many times what an op may be off: rows are computed from rows that differ already
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub times: f64,
    /// List all nodes, also those that do not differ
    #[arg(long)]
    pub all: bool,
    /// Write a report with plots, an HTML file that needs no other
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// Two recordings that are to be compared, and how they came about.
struct Both {
    labels: [String; 2],
    recordings: [Recording; 2],
    bisected: Option<Bisected>,
}

pub(super) fn invalid(what: impl Into<String>) -> Failure {
    Failure::Call(Error::new(Reason::InvalidArgument, what))
}

/// Of a capture, the part that is one token.
fn only(recording: &Recording, token: u64) -> Recording {
    let tokens = recording.tokens.iter().filter(|one| one.index == token);
    Recording {
        head: recording.head.clone(),
        tokens: tokens.cloned().collect(),
        end: recording.end.clone(),
        ..Recording::default()
    }
}

/// Whether two have the same bits if they computed the same.
fn is_exact(ours: &Recording, reference: &Recording) -> bool {
    let class = |of: &Recording| of.head.numerics.clone().unwrap_or_default();
    let (ours, reference) = (class(ours), class(reference));
    ours.id == reference.id && ours.reproducible && reference.reproducible
}

/// A request that is run again on one or two sides.
pub(super) struct Again<'a> {
    capture: &'a Recording,
    pub(super) request: GenerateRequest,
    pub(super) sides: Vec<Side>,
    pub(super) options: CaptureOptions,
    times: f64,
}

impl<'a> Again<'a> {
    /// Has the sides that are wanted ready, and says which tokens the capture has: the first, and the one after the last.
    pub(super) async fn prepare(
        ui: &mut Ui,
        global: &GlobalFlags,
        (flags, capture): (&SideFlags, &'a Recording),
        (nodes, layers): (&[String], &[Layers]),
        (times, bundled): (f64, Bundled),
    ) -> Result<(Self, (u64, u64)), Failure> {
        let (request, first) = known(capture)?;
        let last = capture.tokens.iter().map(|token| token.index).max();
        let tokens = last.map_or(0, |last| last.saturating_sub(first) + 1);
        let count = flags.count();
        if count > 2 {
            return Err(Failure::Usage("there are two sides at most".to_owned()));
        }
        let mut sides = Vec::new();
        for side in 0..count {
            let (which, model) = ((flags, side), Some(request.model.as_str()));
            let prepared = Side::prepare(ui, global, which, model, bundled).await?;
            sides.push(prepared);
        }
        let options = CaptureOptions {
            nodes: nodes.to_vec(),
            layers: all_layers(layers),
            tokens,
            values: u32::MAX,
            max_bytes: hotcell_proto::limits::MAX_CAPTURE_BYTES,
            reveal: true,
            ..CaptureOptions::default()
        };
        let again = Self {
            capture,
            request,
            sides,
            options,
            times,
        };
        Ok((again, (first, first.saturating_add(tokens))))
    }

    /// Ends what was started for it.
    pub(super) async fn end(self) {
        for side in self.sides {
            side.end().await;
        }
    }

    /// What both sides have from this token on; with one side, the capture is the other.
    pub(super) async fn from(
        &mut self,
        at: u64,
        options: &CaptureOptions,
        interrupt: &mut Interrupt,
    ) -> Result<[Recording; 2], Failure> {
        let mut all = Vec::new();
        for side in &mut self.sides {
            let from = (&self.request, at);
            all.push(side.replay(from, options.clone(), interrupt).await?);
        }
        let mut all = all.into_iter();
        let first = all.next().unwrap_or_default();
        let second = match (all.next(), options.tokens) {
            (Some(second), _) => second,
            (None, 1) => only(self.capture, at),
            (None, _) => self.capture.clone(),
        };
        Ok([first, second])
    }

    /// Whether the logits of one token differ.
    async fn differs(&mut self, at: u64, interrupt: &mut Interrupt) -> Result<bool, Failure> {
        let options = CaptureOptions {
            only_logits: true,
            tokens: 1,
            ..self.options.clone()
        };
        let options = CaptureOptions {
            nodes: Vec::new(),
            layers: Vec::new(),
            ..options
        };
        let [ours, reference] = self.from(at, &options, interrupt).await?;
        let likeness = liken(&ours, &reference, self.times);
        if likeness.rows() == 0 {
            return Err(invalid(format!(
                "neither side tells the logits of token {at}"
            )));
        }
        Ok(match is_exact(&ours, &reference) {
            true => likeness.same() < likeness.rows(),
            false => likeness.first.is_some(),
        })
    }
}

impl Again<'_> {
    /// What both sides have of the tokens in a range, or of the first one of them that differs.
    pub(super) async fn compared(
        &mut self,
        bisected: bool,
        (first, to): (u64, u64),
        interrupt: &mut Interrupt,
    ) -> Result<([Recording; 2], Option<Bisected>), Failure> {
        let options = self.options.clone();
        if !bisected {
            return Ok((self.from(first, &options, interrupt).await?, None));
        }
        let found = bisect(first, to, async |at| self.differs(at, interrupt).await).await?;
        // Without a difference the last token says how like they are.
        let at = found.first.or(to.checked_sub(1)).unwrap_or(first);
        let one = CaptureOptions {
            tokens: 1,
            ..options
        };
        Ok((self.from(at, &one, interrupt).await?, Some(found)))
    }
}

async fn again(
    ui: &mut Ui,
    global: &GlobalFlags,
    (flags, capture): (&CompareFlags, Recording),
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<Both, Failure> {
    let which = (&flags.sides, &capture);
    let looked = (&flags.nodes[..], &flags.layers[..]);
    let (mut again, range) =
        Again::prepare(ui, global, which, looked, (flags.times, bundled)).await?;
    let mut labels: Vec<String> = again.sides.iter().map(|side| side.label.clone()).collect();
    labels.push(flags.capture.display().to_string());
    let done = again.compared(flags.bisect, range, interrupt).await;
    again.end().await;
    let (recordings, bisected) = done?;
    let mut labels = labels.into_iter();
    let mut label = || labels.next().unwrap_or_default();
    Ok(Both {
        labels: [label(), label()],
        recordings,
        bisected,
    })
}

pub(super) async fn compare(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &CompareFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    if !(flags.times > 0.0 && flags.times.is_finite()) {
        return Err(Failure::Usage("--times must be above 0".to_owned()));
    }
    let capture = Recording::read(&flags.capture)?;
    let both = match (&flags.reference, flags.sides.count()) {
        (Some(file), 0) => {
            let is_dump = file.extension().is_some_and(|end| end == "safetensors");
            let reference = match is_dump {
                true => dumped(file, &capture)?,
                false => Recording::read(file)?,
            };
            Both {
                labels: [&flags.capture, file].map(|path| path.display().to_string()),
                recordings: [capture, reference],
                bisected: None,
            }
        }
        (Some(_), _) => {
            let what = "name another file, or say where the request is run again, not both";
            return Err(Failure::Usage(what.to_owned()));
        }
        (None, 0) => {
            let what = "compare it with what? Name another file, or give --backend, --worker, --program, --model-path or --kv-cache once or twice";
            return Err(Failure::Usage(what.to_owned()));
        }
        (None, _) => again(ui, global, (flags, capture), bundled, interrupt).await?,
    };
    let [ours, reference] = &both.recordings;
    let likeness = liken(ours, reference, flags.times);
    if likeness.rows() == 0 {
        return Err(invalid(
            "there is nothing to compare: no node and token that both have",
        ));
    }
    if let Some(path) = &flags.html {
        let page = report::page(&both.labels, both.bisected.as_ref(), &likeness);
        whole::write(path, Readers::Owner, |file| file.write_all(page.as_bytes()))
            .map_err(|e| invalid(format!("{} cannot be written: {e}", path.display())))?;
    }
    told(ui, flags, &both, &likeness)
}

/// A number as it is shown; bits that do not differ are a dash.
fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3e}"))
}

fn list(ui: &mut Ui, flags: &CompareFlags, likeness: &Likeness) -> Result<(), Failure> {
    let heading = [
        "NODE", "ROWS", "SAME", "COSINE", "MAX ABS", "MAX REL", "NMSE", "BOUND", "BEYOND",
    ];
    let mut table = Table::new(&heading);
    let listed = |node: &&NodeLikeness| flags.all || node.same < node.rows;
    let nodes: Vec<&NodeLikeness> = likeness.nodes.iter().filter(listed).collect();
    let most = if flags.all { nodes.len() } else { LISTED };
    // The first one beyond is among those that are listed.
    let from = nodes.iter().position(|node| node.beyond > 0).unwrap_or(0);
    let from = match flags.all {
        true => 0,
        false => from.saturating_sub(LISTED / 3),
    };
    for node in nodes.iter().skip(from).take(most) {
        let worst = node.worst.as_ref();
        table.row([
            named(&node.node),
            node.rows.to_string(),
            node.same.to_string(),
            worst.map_or_else(|| "-".to_owned(), |w| format!("{:.9}", w.cosine)),
            number(worst.map(|w| w.max_abs)),
            number(worst.map(|w| w.max_rel)),
            number(worst.map(|w| w.nmse)),
            format!("{:.0e}", node.tolerance),
            node.beyond.to_string(),
        ]);
    }
    if !nodes.is_empty() {
        table.print(ui, "")?;
        let left = nodes.len().saturating_sub(most.min(nodes.len()));
        if left > 0 {
            ui.note(
                DIM,
                &format!("{left} further nodes differ; --all lists them"),
            );
        }
    }
    Ok(())
}

fn told(
    ui: &mut Ui,
    flags: &CompareFlags,
    both: &Both,
    likeness: &Likeness,
) -> Result<(), Failure> {
    let [one, two] = &both.labels;
    match ui.manner.json {
        true => ui.print_json(&view(both, likeness))?,
        false => list(ui, flags, likeness)?,
    }
    let mut text = match both.bisected {
        Some(Bisected {
            first: Some(first),
            looks,
        }) => format!("token {first} is the first that differs ({looks} looks); "),
        Some(Bisected { first: None, looks }) => {
            format!("the last token does not differ ({looks} look); ")
        }
        None => String::new(),
    };
    if let Some((token, node)) = likeness.first_beyond() {
        let found = match &node.worst {
            Some(worst) if worst.mismatched > 0 => {
                format!(
                    "{} values are no numbers on one side only",
                    worst.mismatched
                )
            }
            Some(worst) => format!(
                "NMSE {:.3e}, where {:.0e} is its bound; by {:.3e} at most, cosine {:.9}",
                worst.nmse, node.tolerance, worst.max_abs, worst.cosine
            ),
            None => "numbers on one side only".to_owned(),
        };
        text.push_str(&format!(
            "token {token}, node {} is the first beyond its bound: {found}",
            named(&node.node)
        ));
        let error = Error::new(Reason::ChecksumMismatch, one_line(&text));
        let error = error.with("node", &node.node.name).with("token", token);
        return Err(Failure::Differs(error));
    }
    let unknown = likeness.unknown();
    if unknown > 0 {
        let what = format!(
            "{text}{unknown} of {} rows differ, and nothing tells how far; capture with --values all",
            likeness.rows()
        );
        let error = Error::new(Reason::ChecksumMismatch, what);
        return Err(Failure::Differs(error));
    }
    if ui.manner.json {
        return Ok(());
    }
    let (rows, tokens) = (likeness.rows(), likeness.tokens);
    let same = likeness.same();
    text.push_str(&match same == rows {
        true => format!("same bits: {rows} rows of {tokens} tokens"),
        false => {
            format!("within bounds: {rows} rows of {tokens} tokens, {same} of them the same bits")
        }
    });
    if let Some(token) = likeness.parted {
        text.push_str(&format!(
            "; token {token} was drawn differently, and nothing after it is compared"
        ));
    }
    ui.print(&format!("{}: {one}, {two}\n", one_line(&text)))
}

fn node_view(node: &NodeLikeness) -> Value {
    let worst = node.worst.as_ref().map(|worst| {
        json!({
            "cosine": worst.cosine,
            "max_abs": worst.max_abs,
            "max_rel": worst.max_rel,
            "nmse": worst.nmse,
            "mismatched": worst.mismatched,
        })
    });
    let ulps = node.ulps.counts.iter().enumerate();
    let ulps = ulps
        .filter(|(_, count)| **count > 0)
        .map(|(bits, count)| json!({ "ulps": Ulps::range(bits), "values": count }));
    json!({
        "node": node.node.name,
        "op": node.node.op,
        "layer": node.node.layer,
        "weight": node.node.weight,
        "rows": node.rows,
        "same": node.same,
        "unknown": node.unknown,
        "worst": worst,
        "ulps": ulps.collect::<Vec<_>>(),
        "bound": node.tolerance,
        "beyond": node.beyond,
        "first_token_beyond": node.first,
    })
}

fn view(both: &Both, likeness: &Likeness) -> Value {
    let first = likeness.first_beyond();
    json!({
        "sides": both.labels,
        "numerics_classes": both.recordings.each_ref().map(|of| {
            of.head.numerics.as_ref().map(|class| class.id.clone())
        }),
        "bisected": both.bisected.map(|found| json!({ "first": found.first, "looks": found.looks })),
        "tokens": likeness.tokens,
        "rows": likeness.rows(),
        "same": likeness.same(),
        "unknown": likeness.unknown(),
        "equal": likeness.same() == likeness.rows(),
        "parted": likeness.parted,
        "first": first.map(|(token, node)| json!({ "token": token, "node": node.node.name, "weight": node.node.weight })),
        "nodes": likeness.nodes.iter().map(node_view).collect::<Vec<_>>(),
    })
}
