//! `hotcell debug trace`: a timeline of what a worker does, for Perfetto.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

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
    connect::Client,
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

/// What was written.
pub(in crate::cli) struct Written {
    bytes: usize,
    spans: usize,
    counts: usize,
    missed: u64,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} spans, {}", self.spans, bytes(self.bytes as u64))?;
        match self.missed {
            0 => Ok(()),
            missed => write!(f, "; {missed} were left out: too many"),
        }
    }
}

/// Traces a worker for so long, with what plans compute if `nodes` are wanted, and writes that into a file.
pub(in crate::cli) async fn write(
    client: &Client,
    worker: &str,
    (time, nodes): (Duration, bool),
    path: &Path,
) -> Result<Written, Failure> {
    let mut pieces = client.trace_worker(worker, time, nodes).await?;
    let (mut head, mut end) = (None, None);
    let (mut spans, mut counts) = (Vec::new(), Vec::new());
    while let Some(piece) = pieces.next().await.transpose()? {
        match piece.kind {
            Some(Kind::Head(said)) => head = Some(said),
            Some(Kind::Spans(some)) => {
                spans.extend(some.spans);
                counts.extend(some.counts);
            }
            Some(Kind::End(said)) => end = Some(said),
            None => {}
        }
    }
    let broken = || {
        let what = "the trace broke off; try again";
        Failure::Call(Error::new(Reason::ProtocolViolation, what))
    };
    let (head, end) = head.zip(end).ok_or_else(broken)?;
    let trace = perfetto::encode(&head, &spans, &counts);
    fs::write(path, &trace).map_err(|e| {
        let what = format!("{} cannot be written: {e}", path.display());
        Failure::Call(Error::new(Reason::InvalidArgument, what))
    })?;
    Ok(Written {
        bytes: trace.len(),
        spans: spans.len(),
        counts: counts.len(),
        missed: end.missed_steps.saturating_add(end.missed_nodes),
    })
}

pub(super) async fn trace(
    ui: &mut Ui,
    session: &Session,
    flags: &TraceFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let worker = flags.worker.as_deref().unwrap_or_default();
    let how = (flags.time, flags.nodes);
    let written = tokio::select! {
        written = write(&session.client, worker, how, &flags.output) => written?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let path = flags.output.display().to_string();
    if ui.manner.json {
        return ui.print_json(&json!({
            "file": path,
            "bytes": written.bytes,
            "spans": written.spans,
            "counts": written.counts,
            "missed": written.missed,
        }));
    }
    let text = format!("{path}: {written}");
    ui.print(&format!("{}\n", one_line(&text)))
}
