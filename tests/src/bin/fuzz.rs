//! Looks for what panics, hangs or takes memory without bound, in every way in that a stranger has.
//!
//! `fuzz TARGET SECONDS SEED` runs cases in a process of their own, which may die, and prints the seed of each one that it
//! died of. `fuzz TARGET --case SEED` runs one again, here, and `fuzz TARGET --file PATH` bytes of a file; with `--save
//! SEED PATH` a case's bytes are written. Targets are `graphs`, which are grown, planned and run, and those of
//! [`hotcell_tests::fuzz::targets`], whose seeds `fuzz --corpus FOLDER` writes.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use hotcell_tests::fuzz::{
    Outcome, Runner, case, case_seed, changed,
    targets::{TARGETS, Target, named},
};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};

/// A case that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(20);
/// Address space of the process that runs cases.
const MEMORY: u64 = 4 << 30;
/// Findings after which there is enough to do.
const ENOUGH: usize = 20;
/// Graphs that are grown.
const GRAPHS: &str = "graphs";

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

/// What is tried.
enum Subject {
    Graphs(Runner),
    Bytes(&'static Target, Vec<Vec<u8>>),
}

impl Subject {
    fn of(name: &str) -> Result<Self> {
        if name == GRAPHS {
            return Ok(Self::Graphs(Runner::new()?));
        }
        let target = found(name)?;
        Ok(Self::Bytes(target, (target.seeds)()))
    }

    fn run(&self, seed: u64) -> Outcome {
        match self {
            Self::Graphs(runner) => case(runner, seed),
            Self::Bytes(target, seeds) => match (target.run)(&changed(target, seeds, seed)) {
                true => Outcome::Ran,
                false => Outcome::Refused,
            },
        }
    }
}

fn found(name: &str) -> Result<&'static Target> {
    named(name).with_context(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        format!(
            "there is no target {name}; there are {GRAPHS}, {}",
            names.join(", ")
        )
    })
}

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--corpus", folder] => corpus(Path::new(folder))?,
        [target, "--case", seed] => println!("{:?}", Subject::of(target)?.run(seed.parse()?)),
        [target, "--file", path] => println!("{:?}", (found(target)?.run)(&fs::read(path)?)),
        [target, "--save", seed, path] => {
            let target = found(target)?;
            fs::write(path, changed(target, &(target.seeds)(), seed.parse()?))?;
        }
        [target, "--cases", file, first, run] => {
            cases(target, file, first.parse()?, run.parse()?)?;
        }
        [target, seconds, run] => {
            return watch(target, Duration::from_secs(seconds.parse()?), run.parse()?);
        }
        _ => bail!("usage: fuzz TARGET SECONDS SEED, or fuzz TARGET --case SEED"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the seeds of all targets, each a file in a folder of the target's.
fn corpus(folder: &Path) -> Result<()> {
    for target in TARGETS {
        let folder = folder.join(target.name);
        fs::create_dir_all(&folder)?;
        for (n, seed) in (target.seeds)().iter().enumerate() {
            fs::write(folder.join(format!("seed-{n:02}")), seed)?;
        }
    }
    Ok(())
}

/// Runs cases until somebody ends it.
fn cases(target: &str, file: &str, first: u64, run: u64) -> Result<()> {
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
    let subject = Subject::of(target)?;
    let mut progress = Progress::read(&file)?;
    for index in first.. {
        progress.0[0] = index;
        progress.write(&file)?;
        progress.count(subject.run(case_seed(run, index)));
    }
    Ok(())
}

fn watch(target: &str, time: Duration, run: u64) -> Result<ExitCode> {
    if target != GRAPHS {
        found(target)?;
    }
    let file = tempfile::NamedTempFile::new()?;
    Progress::default().write(file.as_file())?;
    let (start, mut first, mut found) = (Instant::now(), 0u64, 0usize);
    while start.elapsed() < time && found < ENOUGH {
        let mut child = Command::new(std::env::current_exe()?)
            .args([target, "--cases"])
            .arg(file.path())
            .args([first.to_string(), run.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        // What a dependency's panic says is read as it comes: a full pipe would stop the child.
        let stderr = child.stderr.take().context("no standard error")?;
        let said = std::thread::spawn(move || last_words(stderr));
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
        let said = said.join().unwrap_or_default();
        if let Some(how) = died {
            let at = Progress::read(file.as_file())?.0[0];
            let seed = case_seed(run, at);
            println!("FOUND {target} --case {seed}: {how}; it said: {said}");
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

/// The end of what a process says.
fn last_words(mut from: impl Read) -> String {
    const KEPT: usize = 2000;
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..count]);
        let over = kept.len().saturating_sub(KEPT);
        kept.drain(..over);
    }
    String::from_utf8_lossy(&kept).trim().to_owned()
}
