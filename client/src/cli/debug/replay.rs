//! `hotcell debug replay`: whether what was computed comes again, bit by bit, and where it first does not.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CaptureHead, CaptureOptions, GenerateRequest, ReplayRequest, replay_request::Which},
};
use serde_json::json;

use super::{
    capture::LookFlags,
    sides::worker_of,
    told::{Keeping, compared_view, difference, follow_all, left_out, node_line, token_view},
};
use crate::{
    cli::{
        crashes::ran,
        exit::Failure,
        interrupt::Interrupt,
        session::Session,
        ui::{DIM, Ui, one_line},
    },
    connect::Client,
    debug::{Compared, Recorded, Recording, Spool, compare},
};

/// `hotcell debug replay`.
#[derive(Args, Clone, Debug)]
pub struct ReplayFlags {
    /// A request's id, running or ended; a crash report's, for the request that ran then, as `hotcell crashes list` shows
    /// it; or a file that `hotcell debug capture --reveal` wrote
    pub what: String,
    /// Begin with this token of the answer [default: 0, of a file its first]
    #[arg(long, value_name = "TOKEN")]
    pub at: Option<u64>,
    /// Tokens to compute; 0: until the request ends [default: of a file as many as it has]
    #[arg(short = 'n', long, value_name = "N")]
    pub tokens: Option<u64>,
    /// Show each node up to the one of this name
    #[arg(long, value_name = "NODE")]
    pub until: Option<String>,
    /// Show each node
    #[arg(long)]
    pub show: bool,
    /// Write what was computed into a file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// On the device of this worker
    #[arg(short, long, value_name = "NAME")]
    pub worker: Option<String>,
    /// On a device of this backend, as `hotcell devices` shows it
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Take turns on the host's processors with those who serve there, instead of running on what time they leave
    #[arg(long)]
    pub hurry: bool,
    /// What is looked at.
    #[command(flatten)]
    pub look: LookFlags,
}

/// How long nothing may come before it is said why that may be.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is said then.
const STARVES: &str = "nothing yet; a replay runs on the time that others leave, which may be none, and with --hurry in turns with them";

/// A name that ends so, or of which there is a file, is a file's.
pub(super) fn is_file(what: &str) -> bool {
    what.ends_with(".hotcell") || what.contains('/') || Path::new(what).is_file()
}

/// The request that is meant by an id: its own, or that of the crash report of the process that ran it. Requests' ids have
/// no dots, reports' do.
///
/// # Errors
/// The server's about the report; [`Reason::InvalidArgument`] naming the requests if there were several.
pub(super) async fn request_id(client: &Client, what: &str) -> Result<String, Failure> {
    if !what.contains('.') {
        return Ok(what.to_owned());
    }
    let crash = client.crash(what).await?;
    let mut ids = ran(&crash)?;
    match ids.len() {
        1 => Ok(ids.remove(0)),
        many => {
            let what = format!(
                "{many} requests ran when {what} was written: {}; name one of them, or run all again with `hotcell crashes replay {what}`",
                ids.join(", ")
            );
            Err(Error::new(Reason::InvalidArgument, one_line(&what)).into())
        }
    }
}

/// The request of a file, with all that it drew as far as it is known, and the token that the file begins with.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a capture without its prompt.
pub(super) fn known(recording: &Recording) -> Result<(GenerateRequest, u64), Error> {
    let invalid = |what: &str| Error::new(Reason::InvalidArgument, what);
    if !recording.head.revealed {
        let what = "the capture has no prompt, so that it cannot be run again; capture with --reveal, or name the request";
        return Err(invalid(what));
    }
    let request = recording.head.request.clone();
    let mut request = request.ok_or_else(|| invalid("the capture has no request"))?;
    request.model.clone_from(&recording.head.model);
    let mut resume = request.resume.take().unwrap_or_default();
    let first = resume.generated_ids.len() as u64;
    for token in &recording.tokens {
        if token.index == resume.generated_ids.len() as u64 {
            resume.generated_ids.extend(token.token);
        }
    }
    request.resume = Some(resume);
    Ok((request, first))
}

/// The request of a file, where it goes on, and what it drew.
fn of_file(
    recording: &Recording,
    flags: &ReplayFlags,
    worker: String,
) -> Result<ReplayRequest, Error> {
    let (request, first) = known(recording)?;
    let last = recording.tokens.iter().map(|token| token.index).max();
    let mut rows = recording.tokens.iter().flat_map(|token| &token.nodes);
    let has_values = rows.any(|row| !row.data.is_empty());
    Ok(ReplayRequest {
        worker,
        at: flags.at.unwrap_or(first),
        options: Some(CaptureOptions {
            // Also what is between those that were looked at.
            tokens: flags
                .tokens
                .unwrap_or(last.map_or(0, |last| last.saturating_sub(first) + 1)),
            // To say how far apart rows are, the same values are needed.
            values: match (flags.look.values, has_values) {
                (0, true) => u32::MAX,
                (values, _) => values,
            },
            ..flags.look.options(0)
        }),
        which: Some(Which::Request(request)),
        hurry: flags.hurry,
        ..ReplayRequest::default()
    })
}

pub(super) async fn replay(
    ui: &mut Ui,
    session: &Session,
    flags: &ReplayFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let before = match is_file(&flags.what) {
        true => Some(Recording::read(Path::new(&flags.what))?),
        false => None,
    };
    let named = flags.worker.as_deref();
    let worker = match &flags.backend {
        Some(backend) => worker_of(&session.client, backend, named).await?,
        None => named.unwrap_or_default().to_owned(),
    };
    let request = match &before {
        Some(recording) => of_file(recording, flags, worker)?,
        None => ReplayRequest {
            worker,
            at: flags.at.unwrap_or(0),
            options: Some(flags.look.options(flags.tokens.unwrap_or(0))),
            which: Some(Which::RequestId(
                request_id(&session.client, &flags.what).await?,
            )),
            hurry: flags.hurry,
            ..ReplayRequest::default()
        },
    };
    // Without another one to compare with, memory need not hold the values. Where they cannot be written, nothing is run.
    let beside = flags.output.as_deref().filter(|_| before.is_none());
    let mut spool = beside.map(Spool::beside).transpose()?;
    let starting = session.client.replay(request);
    tokio::pin!(starting);
    let mut waits = !flags.hurry;
    let messages = loop {
        tokio::select! {
            messages = &mut starting => break messages?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
            () = tokio::time::sleep(PATIENCE), if waits => {
                ui.note(DIM, STARVES);
                waits = false;
            }
        }
    };
    let mut unknown = flags.until.clone();
    let kept = spool.as_mut().map_or(Keeping::Nothing, Keeping::Values);
    let followed = follow_all(messages, interrupt, kept, |head, token| {
        if ui.manner.json {
            return ui.print_json(&token_view(token));
        }
        let shown = flags.show || flags.until.is_some();
        if shown {
            let text = rows(head, token, flags.until.as_deref(), &mut unknown);
            ui.print_text(&text)?;
        }
        Ok(())
    });
    let recording = followed.await?.recording;
    if let Some(node) = unknown.filter(|_| !ui.manner.json) {
        let what = format!("no node is named {node}; --show tells their names");
        return Err(Error::new(Reason::InvalidArgument, what).into());
    }
    match (&flags.output, spool) {
        (Some(path), Some(spool)) => recording.write_with(path, spool)?,
        (Some(path), None) => recording.write(path)?,
        (None, _) => 0,
    };
    let compared = before.as_ref().map(|before| compare(&recording, before));
    let whole = flags.tokens.is_none() && flags.at.is_none();
    let due = before.as_ref().filter(|_| whole);
    let due = due.map_or(0, |before| before.tokens.len());
    verdict(ui, due, &recording, before.as_ref(), compared.as_ref())
}

/// A token's rows in lines, up to this node. `unknown` is emptied once it was seen.
fn rows(
    head: &CaptureHead,
    token: &Recorded,
    until: Option<&str>,
    unknown: &mut Option<String>,
) -> String {
    let id = token
        .token
        .map_or_else(String::new, |id| format!(" ({id})"));
    let mut text = format!(
        "token {}{id}, from position {}\n",
        token.index, token.position
    );
    for (node, row) in head.nodes.iter().zip(&token.nodes) {
        text.push_str(&node_line(node, row));
        if until == Some(node.name.as_str()) {
            *unknown = None;
            break;
        }
    }
    text
}

/// Says whether it came again. That it did not, or not all of the tokens that are `due`, is a failure.
fn verdict(
    ui: &mut Ui,
    due: usize,
    recording: &Recording,
    before: Option<&Recording>,
    compared: Option<&Compared>,
) -> Result<(), Failure> {
    let end = recording.end.clone().unwrap_or_default();
    let class = |of: &Recording| of.head.numerics.clone().unwrap_or_default();
    let ours = class(recording);
    let theirs = before.map(class);
    let another = theirs.as_ref().filter(|theirs| theirs.id != ours.id);
    let caution = match (another, ours.reproducible) {
        (Some(theirs), _) => format!(
            "; it was computed in {}, where numbers may differ",
            one_line(&theirs.id)
        ),
        (None, false) => "; its numerics class is not reproducible".to_owned(),
        (None, true) => String::new(),
    };
    let first = compared.and_then(|compared| compared.first.as_ref());
    let differs = |what: String| {
        let error = Error::new(Reason::ChecksumMismatch, format!("{what}{caution}"));
        let error = match first {
            Some(first) => error
                .with("node", &first.node.name)
                .with("token", first.token),
            None => error,
        };
        Failure::Differs(error)
    };
    let mut view = json!({
        "worker": recording.head.worker,
        "numerics_class": ours.id,
        "reproducible": ours.reproducible,
        "tokens": recording.tokens.len(),
        "as_expected": end.as_expected,
        "differs_at": end.differs_at,
        "failed": end.failed,
        "left_out": end.left_out,
        "left_out_bytes": end.left_out_bytes,
    });
    if let Some(compared) = compared {
        view["compared"] = compared_view(compared);
    }
    if ui.manner.json {
        ui.print_json(&view)?;
    }
    if let Some(first) = first {
        return Err(differs(difference(first)));
    }
    if let Some(token) = end.differs_at {
        return Err(differs(format!(
            "token {token} is another one than it drew"
        )));
    }
    if let Some(compared) = compared
        && compared.tokens < due
    {
        let failed = match end.failed.as_str() {
            "" => String::new(),
            why => format!(", because it failed: {}", one_line(why)),
        };
        let done = compared.tokens;
        return Err(differs(format!(
            "only {done} of {due} tokens came again{failed}"
        )));
    }
    if ui.manner.json {
        return Ok(());
    }
    let tokens = recording.tokens.len();
    let text = match compared {
        Some(compared) if compared.rows > 0 => format!(
            "same bits: {} rows of {} tokens, in {}",
            compared.rows, compared.tokens, ours.id
        ),
        Some(_) => "nothing to compare: no node and token that both have".to_owned(),
        None if end.as_expected == 0 => format!("{tokens} tokens, in {}", ours.id),
        None => format!(
            "same tokens: {} of {tokens} that it drew, in {}",
            end.as_expected, ours.id
        ),
    };
    let failed = match end.failed.as_str() {
        "" => String::new(),
        why => format!("; then it failed: {}", one_line(why)),
    };
    let left_out = left_out(&end);
    ui.print(&format!("{}{caution}{failed}{left_out}\n", one_line(&text)))
}
