//! `hotcell debug trace`: a timeline of what a worker does, for Perfetto.

use std::{fs, path::PathBuf, time::Duration};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::trace_piece::Kind,
};
use serde_json::json;

use crate::{
    cli::{
        exit::Failure,
        flags::duration,
        interrupt::Interrupt,
        session::Session,
        table::bytes,
        ui::{Ui, one_line},
    },
    debug::perfetto,
};

/// `hotcell debug trace`.
#[derive(Args, Clone, Debug)]
pub struct TraceFlags {
    /// The worker's name, as `hotcell ps` shows it; the only one if missing
    pub worker: Option<String>,
    /// How long: 500ms, 2s; a minute at most
    #[arg(long = "for", value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub time: Duration,
    /// What plans compute, too; steps take longer meanwhile
    #[arg(long)]
    pub nodes: bool,
    /// Where to write it; opens in https://ui.perfetto.dev
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

pub(super) async fn trace(
    ui: &mut Ui,
    session: &Session,
    flags: &TraceFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let worker = flags.worker.as_deref().unwrap_or_default();
    let tracing = session.client.trace_worker(worker, flags.time, flags.nodes);
    let mut pieces = tracing.await?;
    let (mut head, mut end) = (None, None);
    let (mut spans, mut counts) = (Vec::new(), Vec::new());
    loop {
        let piece = tokio::select! {
            piece = pieces.next() => piece.transpose()?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        match piece.map(|piece| piece.kind) {
            Some(Some(Kind::Head(said))) => head = Some(said),
            Some(Some(Kind::Spans(some))) => {
                spans.extend(some.spans);
                counts.extend(some.counts);
            }
            Some(Some(Kind::End(said))) => end = Some(said),
            Some(None) => {}
            None => break,
        }
    }
    let broken = || {
        let what = "the trace broke off; try again";
        Failure::Call(Error::new(Reason::ProtocolViolation, what))
    };
    let (head, end) = head.zip(end).ok_or_else(broken)?;
    let trace = perfetto::encode(&head, &spans, &counts);
    let path = flags.output.display().to_string();
    let written = fs::write(&flags.output, &trace);
    written.map_err(|e| {
        let what = format!("{path} cannot be written: {e}");
        Failure::Call(Error::new(Reason::InvalidArgument, what))
    })?;
    let missed = end.missed_steps.saturating_add(end.missed_nodes);
    if ui.manner.json {
        return ui.print_json(&json!({
            "file": path,
            "bytes": trace.len(),
            "spans": spans.len(),
            "counts": counts.len(),
            "missed": missed,
        }));
    }
    let mut text = format!(
        "{path}: {} spans, {}",
        spans.len(),
        bytes(trace.len() as u64)
    );
    if missed > 0 {
        text.push_str(&format!("; {missed} were left out: too many"));
    }
    ui.print(&format!("{}\n", one_line(&text)))
}
