//! Looks for graphs that panic, hang or take memory without bound.
//!
//! `fuzz_graphs SECONDS SEED` runs cases in a process of their own, which may die, and prints the seed of each one that it
//! died of. `fuzz_graphs --case SEED` runs one again, here.

use std::{
    fs::File,
    io::Read,
    os::unix::fs::FileExt,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use hotcell_tests::fuzz::{Outcome, Runner, case, case_seed};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};

/// A case that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(20);
/// Address space of the process that runs cases.
const MEMORY: u64 = 4 << 30;
/// Findings after which there is enough to do.
const ENOUGH: usize = 20;

/// What the process that runs cases tells the other one: the case it is at, and how many ended how.
#[derive(Clone, Copy, Default)]
struct Progress([u64; 6]);

impl Progress {
    fn write(&self, file: &File) -> Result<()> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|n| n.to_le_bytes()).collect();
        Ok(file.write_all_at(&bytes, 0)?)
    }

    fn read(file: &File) -> Result<Self> {
        let mut bytes = [0; 48];
        file.read_exact_at(&mut bytes, 0)?;
        let mut numbers = bytes
            .chunks_exact(8)
            .map(|b| b.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)));
        Ok(Self(std::array::from_fn(|_| numbers.next().unwrap_or(0))))
    }

    fn count(&mut self, outcome: Outcome) {
        let at = match outcome {
            Outcome::Unreadable => 1,
            Outcome::Unverified => 2,
            Outcome::Refused => 3,
            Outcome::Failed => 4,
            Outcome::Ran => 5,
        };
        self.0[at] += 1;
    }
}

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--case", seed] => {
            println!("{:?}", case(&Runner::new()?, seed.parse()?));
            Ok(ExitCode::SUCCESS)
        }
        ["--cases", file, first, run] => cases(file, first.parse()?, run.parse()?),
        [seconds, run] => watch(Duration::from_secs(seconds.parse()?), run.parse()?),
        _ => bail!("usage: fuzz_graphs SECONDS SEED, or fuzz_graphs --case SEED"),
    }
}

/// Runs cases until somebody ends it.
fn cases(file: &str, first: u64, run: u64) -> Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let limit = Rlimit {
        current: Some(MEMORY),
        maximum: Some(MEMORY),
    };
    setrlimit(Resource::As, limit)?;
    // A crash is an answer, not something to keep.
    setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )?;
    let file = File::options().read(true).write(true).open(file)?;
    let runner = Runner::new()?;
    let mut progress = Progress::read(&file)?;
    for index in first.. {
        progress.0[0] = index;
        progress.write(&file)?;
        progress.count(case(&runner, case_seed(run, index)));
    }
    Ok(ExitCode::SUCCESS)
}

fn watch(time: Duration, run: u64) -> Result<ExitCode> {
    let file = tempfile::NamedTempFile::new()?;
    Progress::default().write(file.as_file())?;
    let (start, mut first, mut found) = (Instant::now(), 0u64, 0usize);
    while start.elapsed() < time && found < ENOUGH {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--cases")
            .arg(file.path())
            .args([first.to_string(), run.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let (mut at, mut since) = (u64::MAX, Instant::now());
        let died = loop {
            if let Some(status) = child.try_wait()? {
                break Some(format!("{status}"));
            }
            let now = Progress::read(file.as_file())?.0[0];
            if now != at {
                (at, since) = (now, Instant::now());
            }
            if since.elapsed() > LONGEST {
                child.kill()?;
                break Some(format!("it took more than {} s", LONGEST.as_secs()));
            }
            if start.elapsed() > time {
                child.kill()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        child.wait()?;
        if let Some(how) = died {
            let mut said = String::new();
            child
                .stderr
                .take()
                .context("no standard error")?
                .read_to_string(&mut said)?;
            let at = Progress::read(file.as_file())?.0[0];
            println!(
                "FOUND --case {}: {how}; it said: {}",
                case_seed(run, at),
                said.trim()
            );
            found += 1;
            first = at + 1;
        }
    }
    let [_, unreadable, unverified, refused, failed, ran] = Progress::read(file.as_file())?.0;
    println!(
        "unreadable {unreadable}, unverified {unverified}, refused {refused}, failed {failed}, ran {ran}, found {found}"
    );
    Ok(ExitCode::from(u8::from(found > 0)))
}
