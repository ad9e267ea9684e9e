//! `hotcell debug trace`: a timeline of what a worker does, for Perfetto.

use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    ids::RequestId,
    v1::{TraceEnd, TraceHead, TraceRequest, TraceSpan, TraceTrack, trace_piece::Kind},
};
use serde_json::json;
use tokio::sync::oneshot;

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
    debug::perfetto::{self, ClientSpan},
    tokens::{Event, GenerateOptions},
    whole::{self, Readers},
};

/// `hotcell debug trace`.
#[derive(Args, Clone, Debug)]
pub struct TraceFlags {
    /// The worker's name, as `hotcell ps` shows it; the only one if missing
    pub worker: Option<String>,
    /// How long: 500ms, 2s; a minute at most [default: 1s, with --steps a minute]
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub time: Option<Duration>,
    /// End after so many steps, if that is sooner
    #[arg(long, value_name = "N")]
    pub steps: Option<std::num::NonZeroU32>,
    /// What plans compute, too; steps take longer meanwhile
    #[arg(long)]
    pub nodes: bool,
    /// Have this text continued meanwhile, so that the client's side of a request is on the timeline, too
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Tokens of that continuation
    #[arg(long, value_name = "N", default_value_t = 32, requires = "prompt")]
    pub tokens: u32,
    /// Where to write it; opens in https://ui.perfetto.dev
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// What was written.
pub(in crate::cli) struct Written {
    bytes: usize,
    spans: usize,
    steps: usize,
    counts: usize,
    missed: u64,
    deaths: u32,
    /// Why there is no more of it.
    broke_off: Option<String>,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} spans, {}", self.spans, bytes(self.bytes as u64))?;
        if self.missed > 0 {
            write!(f, "; {} were left out: too many", self.missed)?;
        }
        match self.deaths {
            0 => {}
            1 => f.write_str("; its process died, which is on the track events")?,
            many => write!(f, "; {many} processes died, which is on the track events")?,
        }
        match &self.broke_off {
            Some(why) => write!(f, "; it broke off: {why}"),
            None => Ok(()),
        }
    }
}

/// A request that is made while a trace is: its prompt and how many tokens it gets.
pub(in crate::cli) type Asked<'a> = Option<(&'a str, u32)>;

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

/// A call or a part of one, from then until then.
fn span(call: &str, name: &str, (begin, end): (u64, u64), trace_id: &str) -> ClientSpan {
    ClientSpan {
        call: call.to_owned(),
        name: name.to_owned(),
        begin_ns: begin,
        duration_ns: end.saturating_sub(begin),
        trace_id: trace_id.to_owned(),
    }
}

/// Digits of a trace of its own, and of a span in it.
fn random_trace() -> Result<(String, String), Error> {
    let digits = || Ok::<_, Error>(RequestId::random()?.as_str().replacen("r-", "", 1));
    let (trace, span) = (digits()?, digits()?);
    Ok((trace, span.chars().take(16).collect()))
}

/// Has a text continued, and tells when what happened.
async fn ask(client: &Client, prompt: &str, tokens: u32) -> Result<Vec<ClientSpan>, Error> {
    const CALL: &str = "Tokens.Generate";
    let (trace, own) = random_trace()?;
    let options = GenerateOptions {
        max_tokens: tokens,
        ignore_eos: true,
        // Its trace goes on in the scheduler's part of the timeline.
        traceparent: format!("00-{trace}-{own}-01"),
        ..GenerateOptions::default()
    };
    let begin = now();
    let mut stream = client.generate(prompt, options).await?;
    let (mut accepted, mut first) = (None, None);
    while let Some(event) = stream.next().await.transpose()? {
        match event {
            Event::Accepted(_) => accepted = Some(now()),
            Event::Delta(_) => _ = first.get_or_insert_with(now),
            Event::Finished(_) => {}
        }
    }
    let end = now();
    let mut spans = vec![span(CALL, CALL, (begin, end), &trace)];
    let accepted = accepted.unwrap_or(end);
    let first = first.unwrap_or(end);
    for (name, from, to) in [
        ("until it is accepted", begin, accepted),
        ("until the first token", accepted, first),
        ("tokens", first, end),
    ] {
        spans.push(span(CALL, name, (from, to), &trace));
    }
    Ok(spans)
}

/// How far the worker's clock is ahead of this one's, in nanoseconds: none if it may be the same one, as when the worker
/// began after it was asked and before it said so.
fn ahead(began: u64, asked: u64, heard: u64) -> i128 {
    match (asked..=heard).contains(&began) {
        true => 0,
        false => i128::from(began) - i128::from(asked / 2 + heard / 2),
    }
}

/// A moment at which a trace broke off, on the track of what became of the worker.
fn broken(head: &TraceHead, why: &str, at: u64, ahead: i128) -> TraceSpan {
    let at = u64::try_from(i128::from(at).saturating_add(ahead)).unwrap_or(0);
    TraceSpan {
        track: TraceTrack::Events.into(),
        begin_ns: at.saturating_sub(head.begun_ns),
        name: format!("broke off: {why}"),
        ..TraceSpan::default()
    }
}

/// Traces a worker, and writes that into a file: also what came of it before it broke off.
pub(in crate::cli) async fn write(
    client: &Client,
    request: TraceRequest,
    asked: Asked<'_>,
    path: &Path,
) -> Result<Written, Failure> {
    let (mut head, mut end) = (None, None::<TraceEnd>);
    let mut broke_off = None;
    let (mut spans, mut counts) = (Vec::new(), Vec::new());
    let (begun, begins) = oneshot::channel();
    let sent = now();
    let tracing = async {
        let mut begun = Some(begun);
        let mut pieces = client.trace(request).await?;
        while let Some(piece) = pieces.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) if head.is_none() => return Err(error.into()),
                Err(error) => {
                    broke_off = Some(one_line(error.message()));
                    break;
                }
            };
            match piece.kind {
                Some(Kind::Head(said)) => {
                    head = Some((said, now()));
                    // Nobody waits for it if nothing is to be asked.
                    begun.take().map(|begun| begun.send(()));
                }
                Some(Kind::Spans(some)) => {
                    spans.extend(some.spans);
                    counts.extend(some.counts);
                }
                Some(Kind::End(said)) => end = Some(said),
                None => {}
            }
        }
        Ok::<_, Failure>(now())
    };
    let asking = async {
        match (asked, begins.await) {
            (Some((prompt, tokens)), Ok(())) => Ok(ask(client, prompt, tokens).await?),
            _ => Ok(Vec::new()),
        }
    };
    let (done, mut calls) = tokio::try_join!(tracing, asking)?;
    let (head, heard) = head.ok_or_else(|| {
        let what = "the trace ended before it began; try again";
        Failure::Call(Error::new(Reason::ProtocolViolation, what))
    })?;
    if end.is_none() {
        broke_off.get_or_insert_with(|| "nothing says that this is all".to_owned());
    }
    let end = end.unwrap_or_default();
    calls.push(span("Debug.Trace", "Debug.Trace", (sent, done), ""));
    let ahead = ahead(head.begun_ns, sent, heard);
    spans.extend(broke_off.iter().map(|why| broken(&head, why, done, ahead)));
    for call in &mut calls {
        let there = i128::from(call.begin_ns).saturating_add(ahead);
        call.begin_ns = u64::try_from(there).unwrap_or(0);
    }
    let trace = perfetto::encode_with(&head, &spans, &counts, &calls);
    whole::write(path, Readers::Owner, |file| file.write_all(&trace)).map_err(|e| {
        let what = format!("{} cannot be written: {e}", path.display());
        Failure::Call(Error::new(Reason::InvalidArgument, what))
    })?;
    Ok(Written {
        bytes: trace.len(),
        spans: spans.len() + calls.len(),
        steps: (spans
            .iter()
            .filter(|span| span.track() == TraceTrack::Steps))
        .count(),
        counts: counts.len(),
        missed: end.missed_steps.saturating_add(end.missed_nodes),
        deaths: end.deaths,
        broke_off,
    })
}

pub(super) async fn trace(
    ui: &mut Ui,
    session: &Session,
    flags: &TraceFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let request = TraceRequest {
        worker: flags.worker.clone().unwrap_or_default(),
        duration_ms: flags.time.map_or(0, millis),
        nodes: flags.nodes,
        steps: flags.steps.map_or(0, std::num::NonZeroU32::get),
    };
    let asked = flags.prompt.as_deref().map(|prompt| (prompt, flags.tokens));
    let written = tokio::select! {
        written = write(&session.client, request, asked, &flags.output) => written?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let path = flags.output.display().to_string();
    if ui.manner.json {
        return ui.print_json(&json!({
            "file": path,
            "bytes": written.bytes,
            "spans": written.spans,
            "steps": written.steps,
            "counts": written.counts,
            "missed": written.missed,
            "deaths": written.deaths,
            "broke_off": written.broke_off,
        }));
    }
    let text = format!("{path}: {written}");
    ui.print(&format!("{}\n", one_line(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_spans_are_on_the_workers_clock() {
        assert_eq!(ahead(150, 100, 200), 0);
        assert_eq!(ahead(1150, 100, 200), 1000);
        assert_eq!(ahead(50, 1100, 1200), -1100);
    }

    #[test]
    fn a_trace_of_its_own_is_one_that_others_read() {
        let (trace, span) = random_trace().unwrap();
        assert_eq!((trace.len(), span.len()), (32, 16));
        assert!(
            trace
                .chars()
                .chain(span.chars())
                .all(|c| c.is_ascii_hexdigit())
        );
        assert_ne!(trace, random_trace().unwrap().0);
    }
}
