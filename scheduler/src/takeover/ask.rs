//! `hotcell-scheduler --takeover`: asks the scheduler that runs to become this program.

use std::{
    os::unix::ffi::{OsStrExt, OsStringExt},
    time::Duration,
};

use clap::Parser;
use hotcell_ipc::{handoff, image, takeover};
use hotcell_proto::v1::{TakeoverRequest, TakeoverResponse};
use prost::Message;

use super::{STATE_VERSION, creed, is_heir};
use crate::{
    access::Access,
    config::{Cli, Config, Surroundings},
    exit::{Exit, Failure},
};

/// How long the new program may take to serve, besides the drain: workers that do not answer are started again behind
/// it, but models may have to be opened.
const PATIENCE: Duration = Duration::from_secs(60);

/// As much of the program's name as the kernel keeps.
const NAME: &str = "hotcell-schedul";

/// What the program was asked for instead of being a scheduler, and how that went; none if it is to be one.
/// To be called on the program's first thread.
pub fn asked() -> Option<Result<(), Failure>> {
    if is_heir() {
        // Executed by its open file, it would go by the file's number in `ps`.
        let _ = image::set_name(NAME);
        return None;
    }
    let cli = Cli::parse();
    if cli.takeover_check {
        return Some(check(cli));
    }
    cli.takeover.then(|| ask(cli))
}

/// Says what this program understands, if its settings are right.
fn check(cli: Cli) -> Result<(), Failure> {
    let config = Config::load(cli, &Surroundings::here())?;
    // What it could not open its doors without.
    Access::load(&config.access)?;
    println!("{}", creed());
    Ok(())
}

fn refused(why: impl Into<String>) -> Failure {
    Failure::new(Exit::TakeoverRefused, why)
}

fn ask(cli: Cli) -> Result<(), Failure> {
    let drain = cli.takeover_drain.map_or(Duration::ZERO, |span| span.0);
    let config = Config::load(cli, &Surroundings::here())?;
    let Some(socket) = &config.socket else {
        return Err(Failure::new(Exit::Usage, "there is no socket to ask at"));
    };
    let pairs = std::env::vars_os().map(|(mut pair, value)| {
        pair.push("=");
        pair.push(value);
        pair.into_vec()
    });
    let request = TakeoverRequest {
        version: STATE_VERSION,
        args: std::env::args_os().map(OsStringExt::into_vec).collect(),
        env: pairs.collect(),
        drain_ms: u64::try_from(drain.as_millis()).unwrap_or(u64::MAX),
    };
    let path = handoff::path_beside(socket);
    let program = takeover::own_program()
        .map_err(|e| refused(format!("this program's own file cannot be opened: {e}")))?;
    let message = request.encode_to_vec();
    let answer = takeover::ask(&path, &message, program, PATIENCE + drain);
    let answer = answer.map_err(|e| {
        let shown = path.as_os_str().as_bytes().escape_ascii();
        match e.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => Failure::new(
                Exit::TakeoverFailed,
                "the scheduler did not become this program in time; look at its log",
            ),
            std::io::ErrorKind::ConnectionReset => gone(),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => refused(
                format!("no scheduler answers at {shown}: {e}; start one without --takeover"),
            ),
            _ => refused(format!("the scheduler at {shown} cannot be asked: {e}")),
        }
    })?;
    let answer = match TakeoverResponse::decode(&answer[..]) {
        Ok(answer) if !answer.problem.is_empty() => return Err(refused(answer.problem)),
        Ok(answer) if answer.pid != 0 => answer,
        _ => return Err(gone()),
    };
    println!(
        "hotcell-scheduler {} took over in process {}: {} workers live on, {} start anew; {} streams; {} ms without service",
        answer.release,
        answer.pid,
        answer.workers_kept,
        answer.workers_new,
        answer.streams,
        answer.pause_ms,
    );
    Ok(())
}

fn gone() -> Failure {
    Failure::new(
        Exit::TakeoverFailed,
        "the scheduler ended without an answer; look at its log, and whether one runs",
    )
}
