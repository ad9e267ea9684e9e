//! `hotcell crashes`: what is known about workers that died, with the backtrace's addresses turned into names.

mod replay;

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use addr2line::Loader;
use clap::{Args, Subcommand};
use hotcell_proto::v1::{BlackBox, CrashReport};
use serde_json::json;

use super::{
    GlobalFlags,
    exit::Failure,
    interrupt::Interrupt,
    session::Session,
    table::{Table, bytes, span, time_of_day},
    ui::{Ui, one_line},
};
use crate::local::worker_beside_this_program;

pub use replay::CrashReplayFlags;
pub(super) use replay::ran;

/// `hotcell crashes`.
#[derive(Args, Clone, Debug)]
pub struct CrashesFlags {
    /// What to show.
    #[command(subcommand)]
    pub what: What,
}

/// What `hotcell crashes` shows.
#[derive(Clone, Debug, Subcommand)]
pub enum What {
    /// The workers that died lately, the newest first
    List,
    /// All that is known about one death
    Show {
        /// The report's id, as `hotcell crashes list` shows it, for example w0.3
        id: String,
        /// The worker's program, to name the backtrace's functions [default: hotcell-worker beside this program]
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
    },
    /// Run the requests that it ran again, each in a throw-away worker of its own, and say whether that dies too
    ///
    /// Needs requests whose streams the scheduler knows: running ones, and those of ids that their clients gave.
    Replay(CrashReplayFlags),
}

pub(crate) async fn crashes(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &CrashesFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    match &flags.what {
        What::List => {
            let crashes = session.client.crashes().await?;
            if ui.manner.json {
                return ui.print_json(&json!({ "crashes": crashes }));
            }
            let mut table = Table::new(&["ID", "TIME", "KIND", "MODEL", "NODE", "REASON"]);
            for crash in crashes {
                let seen = crash.blackbox.unwrap_or_default();
                table.row([
                    crash.id,
                    time_of_day(crash.time_ms),
                    crash.kind,
                    seen.model,
                    seen.op,
                    crash.reason,
                ]);
            }
            table.print(ui, "no worker died")
        }
        What::Replay(flags) => replay::replay(ui, &session, flags, interrupt).await,
        What::Show { id, program } => {
            let crash = session.client.crash(id).await?;
            let names = names(&crash, program.clone());
            if ui.manner.json {
                let mut report = json!(crash);
                if let Some(signal) = report.pointer_mut("/blackbox/signal") {
                    signal["functions"] = json!(names);
                }
                return ui.print_json(&report);
            }
            ui.print_text(&told(&crash, &names))
        }
    }
}

/// The backtrace's functions, by the worker's program: that beside this one if none is given.
fn names(crash: &CrashReport, program: Option<PathBuf>) -> Vec<String> {
    let program = program.or_else(worker_beside_this_program);
    frames(crash, program.as_deref())
}

/// A report in words, with the backtrace's names as far as the program beside this one knows them.
pub(super) fn in_words(crash: &CrashReport) -> String {
    told(crash, &names(crash, None))
}

/// The backtrace's functions with file and line, as the program tells them; a bare address where it cannot.
fn frames(crash: &CrashReport, program: Option<&Path>) -> Vec<String> {
    let signal = crash.blackbox.as_ref().and_then(|b| b.signal.as_ref());
    let Some(signal) = signal else {
        return Vec::new();
    };
    let loader = program.and_then(|program| Loader::new(program).ok());
    let name = |address: &u64| {
        let named = loader
            .as_ref()
            .and_then(|loader| function(loader, *address));
        named.unwrap_or_else(|| format!("{address:#x}"))
    };
    signal.frames.iter().map(name).collect()
}

/// Between a frame's functions, the innermost first.
const INLINED: &str = ", inlined into ";

fn function(loader: &Loader, address: u64) -> Option<String> {
    let mut all = Vec::new();
    let mut found = loader.find_frames(address).ok()?;
    while let Ok(Some(frame)) = found.next() {
        let Some(function) = frame.function else {
            continue;
        };
        let name = function.demangle().ok()?.into_owned();
        let place = frame
            .location
            .and_then(|l| Some(format!(" at {}:{}", l.file?, l.line?)));
        all.push(format!("{name}{}", place.unwrap_or_default()));
    }
    match all.is_empty() {
        // Without debug information the symbol table still knows the function.
        true => loader
            .find_symbol(address)
            .map(|s| addr2line::demangle_auto(s.into(), None).into_owned()),
        false => Some(all.join(INLINED)),
    }
}

/// Name and place of a frame, without what was inlined into what, generic arguments, and most of the path.
fn brief(frame: &str) -> String {
    let own = frame.split(INLINED).next().unwrap_or(frame);
    let (name, place) = own.split_once(" at ").unwrap_or((own, ""));
    let (mut short, mut depth, mut before) = (String::new(), 0usize, ' ');
    for c in name.chars() {
        // `<T as Trait>::method` begins with one; arguments follow a name.
        let opens =
            c == '<' && (depth > 0 || short.ends_with(|p: char| p.is_alphanumeric() || p == '}'));
        match c {
            '<' if opens => depth += 1,
            // The one of `->` closes nothing.
            '>' if depth > 0 && before != '-' => depth -= 1,
            _ if depth > 0 => {}
            _ => short.push(c),
        }
        before = c;
    }
    if place.is_empty() {
        return short;
    }
    let parts: Vec<&str> = place.rsplitn(4, '/').take(3).collect();
    let parts: Vec<&str> = parts.into_iter().rev().collect();
    format!("{short} at {}", parts.join("/"))
}

/// A report in words.
fn told(crash: &CrashReport, names: &[String]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |what: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(text, "{what:<10} {}", one_line(&value));
        }
    };
    line("crash", crash.id.clone());
    line("time", format!("{} UTC", time_of_day(crash.time_ms)));
    line("reason", crash.reason.clone());
    line(
        "worker",
        format!(
            "{}, process {}, on {}, lived {}",
            crash.worker,
            crash.pid,
            crash.device,
            span(crash.uptime_ms)
        ),
    );
    line("models", crash.models.join(", "));
    for fault in &crash.device_faults {
        let what = match fault.what.as_str() {
            "" => format!("fault {}", fault.code),
            what => what.to_owned(),
        };
        let at = time_of_day(fault.time_ms);
        line("device", format!("{what}, told at {at} UTC"));
    }
    match &crash.blackbox {
        Some(seen) => blackbox(seen, &mut line),
        None => line(
            "black box",
            format!("unreadable: {}", crash.blackbox_problem),
        ),
    }
    for request in &crash.requests {
        let outcome = match request.outcome.as_str() {
            "" => "waits",
            outcome => outcome,
        };
        line(
            "request",
            format!(
                "{} of {}, after {} tokens: {outcome}",
                request.request_id, request.model, request.generated
            ),
        );
        line("trace", request.trace_id.clone());
    }
    for (number, name) in names.iter().enumerate() {
        line("backtrace", format!("{number:>2} {}", brief(name)));
    }
    for said in &crash.log {
        line("log", said.clone());
    }
    text
}

fn blackbox(seen: &BlackBox, line: &mut impl FnMut(&str, String)) {
    let mut doing = seen.doing.clone();
    if !seen.model.is_empty() {
        let _ = write!(doing, ", model {}, after {} steps", seen.model, seen.steps);
    }
    line("doing", doing);
    if !seen.op.is_empty() {
        let group = if seen.group {
            " (last of a fused group)"
        } else {
            ""
        };
        line("node", format!("{} {}{group}", seen.node, seen.op));
    }
    if seen.packed_bytes > 0 {
        let packed = bytes(seen.packed_bytes);
        line("packing", format!("{packed} of weights were packed"));
    }
    if seen.peak_bytes > 0 {
        let (now, peak) = (bytes(seen.allocated_bytes), bytes(seen.peak_bytes));
        line("memory", format!("{now}, at most {peak}"));
    }
    for request in &seen.running {
        let (id, tokens) = (&request.request_id, request.tokens);
        line("in batch", format!("{id}, {tokens} tokens"));
    }
    line("error", seen.error.clone());
    if let Some(signal) = &seen.signal {
        let what = format!(
            "{} (code {}) at address {:#x}, thread {}",
            signal.name, signal.code, signal.address, signal.thread
        );
        line("signal", what);
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{AffectedRequest, RunningRequest, SignalSite};

    use super::*;

    #[inline(never)]
    fn a_function_to_be_found() -> u64 {
        std::hint::black_box(7)
    }

    /// Where this program was loaded, by `/proc`: its first mapping.
    fn base() -> u64 {
        let program = std::env::current_exe().unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let own = |l: &&str| l.ends_with(program.to_str().unwrap());
        let first = maps.lines().find(own).unwrap();
        u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap()
    }

    #[test]
    fn a_frame_is_told_in_brief() {
        for (full, short) in [
            (
                "poll<a::B<c::D>, E> at /home/x/.cargo/tokio-1/src/runtime/task.rs:9, inlined into f at /y/g.rs:1",
                "poll at src/runtime/task.rs:9",
            ),
            ("<&a::B as c::D<e::F>>::write", "<&a::B as c::D>::write"),
            (
                "main at worker/src/main.rs:9",
                "main at worker/src/main.rs:9",
            ),
            ("{closure#0}<a::B>", "{closure#0}"),
            ("call_once<fn() -> a::B, ()>", "call_once"),
            ("0x29fe", "0x29fe"),
        ] {
            assert_eq!(brief(full), short);
        }
    }

    #[test]
    fn a_report_is_told_with_names_for_addresses() {
        assert_eq!(a_function_to_be_found(), 7);
        let address = a_function_to_be_found as fn() -> u64 as usize as u64 - base();
        let crash = CrashReport {
            id: "w0.3".into(),
            worker: "w0".into(),
            reason: "killed by SIGSEGV".into(),
            blackbox: Some(BlackBox {
                doing: "stepping".into(),
                model: "tiny".into(),
                op: "matmul".into(),
                node: 4,
                running: vec![RunningRequest {
                    request_id: "r1".into(),
                    tokens: 9,
                }],
                signal: Some(SignalSite {
                    name: "SIGSEGV".into(),
                    frames: vec![address, 1 << 60],
                    ..SignalSite::default()
                }),
                ..BlackBox::default()
            }),
            requests: vec![AffectedRequest {
                request_id: "r1".into(),
                model: "tiny".into(),
                generated: 3,
                outcome: "continued on w1 (epoch 1)".into(),
                trace_id: "4bf92f3577b34da6a3ce929d0e0e4736".into(),
            }],
            log: vec!["last \u{1b}[0mwords".into()],
            ..CrashReport::default()
        };
        let program = std::env::current_exe().unwrap();
        let names = frames(&crash, Some(&program));
        assert!(names[0].contains("a_function_to_be_found"), "{names:?}");
        assert_eq!(names[1], "0x1000000000000000");
        let text = told(&crash, &names);
        for part in [
            "reason     killed by SIGSEGV",
            "node       4 matmul",
            "in batch   r1, 9 tokens",
            "r1 of tiny, after 3 tokens: continued on w1 (epoch 1)",
            "trace      4bf92f3577b34da6a3ce929d0e0e4736",
            "a_function_to_be_found",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
        assert_eq!(frames(&crash, None)[0], format!("{address:#x}"));
    }
}
