//! Children get exactly what they are given, and never outlive their owner.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotcell_ipc::group::Groups;
use hotcell_ipc::log::{BoundedLog, LogLimits};
use hotcell_ipc::memory::sealed_memory;
use hotcell_ipc::spawn::{
    Child, Command, ExitStatus, Output, Signal, Spawner, die_with_parent, signal_name,
};
use hotcell_ipc::terminal::has_terminal;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

const SOON: Duration = Duration::from_secs(10);

fn start(command: Command) -> io::Result<Child> {
    Spawner::start().unwrap().spawn_blocking(command)
}

fn shell(script: &str) -> Command {
    Command::new("/bin/sh").arg("-c").arg(script)
}

fn sleeper() -> Command {
    Command::new("/bin/sleep").arg("1000")
}

/// The output and end of a command that ends by itself.
fn output(mut command: Command) -> (String, ExitStatus) {
    command.stdout = Output::Pipe;
    let mut child = start(command).unwrap();
    let mut text = String::new();
    File::from(child.stdout.take().unwrap())
        .read_to_string(&mut text)
        .unwrap();
    let status = child.wait_blocking(SOON).unwrap().unwrap();
    (text, status)
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Also true of zombies.
fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn one_in_the_background_has_the_least_right_to_the_processor_from_its_beginning() {
    let of = |background| {
        let mut command = Command::new("/bin/cat").arg("/proc/self/stat");
        command.background = background;
        let (text, _) = output(command);
        if background {
            // Its weight is that of its session, which is nobody else's.
            let [number, group, session] = places(&text);
            assert_eq!([group, session], [number, number]);
        }
        // After the name, which may have spaces, the third field comes first.
        let (_, fields) = text.rsplit_once(')').unwrap();
        let fields: Vec<i64> = fields
            .split_whitespace()
            .skip(1)
            .map(|field| field.parse().unwrap_or(-1))
            .collect();
        // The policy.
        fields[41 - 4]
    };
    let idle = i64::from(libc::SCHED_IDLE);
    assert_eq!(of(true), idle);
    assert_ne!(of(false), idle);
    // Its group as well, where there are groups. Nobody without rights may say that ten times a second.
    std::thread::sleep(Duration::from_millis(200));
    let mut command = shell("cat /proc/self/autogroup || echo nice 19");
    command.background = true;
    let (text, _) = output(command);
    assert!(text.trim_end().ends_with("nice 19"), "{text}");
}

#[test]
fn what_a_child_had_resident_is_known_once_it_is_reaped() {
    let spawner = Spawner::start().unwrap();
    let mut child = spawner
        .spawn_blocking(Command::new("/bin/cat").arg("/dev/null"))
        .unwrap();
    assert_eq!(child.peak_resident(), 0);
    let status = child.wait_blocking(Duration::from_secs(20)).unwrap();
    assert_eq!(status, Some(ExitStatus::Code(0)));
    let peak = child.peak_resident();
    assert!((100 << 10..1 << 30).contains(&peak), "{peak} bytes");
}

#[test]
fn the_environment_is_exactly_the_given() {
    let command = Command::new("/usr/bin/env")
        .env("A", "0")
        .env("B", "two words")
        .env("A", "1")
        .inherit_env(["CARGO_MANIFEST_DIR", "SURELY_NOT_SET_ANYWHERE"]);
    let (text, status) = output(command);
    assert!(status.success());
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let manifest = format!("CARGO_MANIFEST_DIR={}", env!("CARGO_MANIFEST_DIR"));
    let inherited = std::env::var_os("CARGO_MANIFEST_DIR").is_some();
    let expected: Vec<&str> = ["A=1", "B=two words"]
        .into_iter()
        .chain(inherited.then_some(manifest.as_str()))
        .collect();
    assert_eq!(lines, expected);
    let (text, _) = output(Command::new("/usr/bin/env"));
    assert_eq!(text, "");
}

#[test]
fn descriptors_arrive_at_their_numbers_though_they_overlap() {
    let [a, b, c] =
        ["alpha ", "beta ", "gamma "].map(|text| sealed_memory("m", text.as_bytes()).unwrap());
    // Not close-on-exec: a stray one, as a library might leave it.
    let stray = rustix::io::dup(&a).unwrap();
    let (at_a, at_b) = (a.as_raw_fd(), b.as_raw_fd());
    let script = format!(
        "/bin/cat /proc/self/fd/{at_a} /proc/self/fd/{at_b} /proc/self/fd/60; echo; ls /proc/self/fd"
    );
    // Swapped, and one that stays where it is would be `dup2`ed onto itself.
    let (text, status) = output(shell(&script).fd(a, at_b).fd(b, at_a).fd(c, 60));
    assert!(status.success());
    let (read, listed) = text.split_once('\n').unwrap();
    assert_eq!(read, "beta alpha gamma ");
    let mut listed: BTreeSet<i32> = listed.lines().map(|line| line.parse().unwrap()).collect();
    for expected in [0, 1, 2, at_a, at_b, 60] {
        assert!(listed.remove(&expected), "{expected} is missing");
    }
    // `ls` has the directory open, at the lowest free number.
    assert!(listed.len() <= 1, "inherited: {listed:?}");
    if !listed.is_empty() {
        let lowest = (3..).find(|n| *n != at_a && *n != at_b).unwrap();
        assert!(listed.contains(&lowest), "inherited: {listed:?}");
    }
    drop(stray);
}

#[test]
fn a_descriptor_that_is_in_place_already_stays_open() {
    let fd = sealed_memory("m", b"kept").unwrap();
    let number = fd.as_raw_fd();
    let (text, _) = output(
        Command::new("/bin/cat")
            .arg(format!("/proc/self/fd/{number}"))
            .fd(fd, number),
    );
    assert_eq!(text, "kept");
}

#[test]
fn whatever_the_number_a_failing_exec_is_told() {
    for target in 3..64 {
        let fd = sealed_memory("m", b"x").unwrap();
        let error = start(Command::new("/no/such/program").fd(fd, target)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "at {target}");
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
    let error = start(Command::new("/etc/passwd")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn other_failures_in_the_child_say_what_failed() {
    let mut command = sleeper();
    command.nofile = Some(u64::MAX - 1);
    let error = start(command).unwrap_err();
    assert!(error.to_string().contains("resource limits"), "{error}");
}

#[test]
fn impossible_commands_are_refused() {
    let fd = || sealed_memory("m", b"x").unwrap();
    let mut twice = sleeper();
    twice.env = vec![("A".into(), "1".into()), ("A".into(), "2".into())];
    for command in [
        sleeper().fd(fd(), 2),
        sleeper().fd(fd(), -1),
        sleeper().fd(fd(), i32::MAX),
        sleeper().fd(fd(), 5).fd(fd(), 5),
        sleeper().arg("nul\0"),
        sleeper().env("", "x"),
        sleeper().env("A=B", "x"),
        twice,
    ] {
        let described = format!("{command:?}");
        let error = start(command).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{described}");
    }
}

#[test]
fn limits_mask_and_input_are_set() {
    let mut command = shell("ulimit -c; ulimit -n; ulimit -d; umask; cat");
    command.nofile = Some(123);
    command.data = Some(1 << 30);
    command.stdout = Output::Pipe;
    let mut child = start(command).unwrap();
    let mut text = String::new();
    File::from(child.stdout.take().unwrap())
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, format!("0\n123\n{}\n0077\n", 1 << 20));
    assert!(child.wait_blocking(SOON).unwrap().unwrap().success());
}

#[test]
fn a_child_joins_its_control_group_before_its_program_begins() {
    // A folder that looks like one of version 1, since tests may make none.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("memory.limit_in_bytes"), "").unwrap();
    let groups = Groups::within(folder.path()).unwrap();
    let made = folder
        .path()
        .join(format!("hotcell-worker-{}-0", std::process::id()));
    std::fs::create_dir(&made).unwrap();
    std::fs::write(made.join("cgroup.procs"), "").unwrap();
    let group = groups.make(1 << 30).unwrap();
    let limit = std::fs::read_to_string(made.join("memory.limit_in_bytes")).unwrap();
    assert_eq!(limit, (1u64 << 30).to_string());
    std::fs::write(made.join("memory.oom_control"), "oom_kill 3\n").unwrap();
    assert_eq!(group.counts().group, Some(3));
    let mut command = shell("exit 0");
    command.group = Some(group.door().unwrap());
    assert!(output(command).1.success());
    assert_eq!(
        std::fs::read_to_string(made.join("cgroup.procs")).unwrap(),
        "0"
    );

    let mut command = shell("exit 0");
    let null = File::open("/dev/null").unwrap();
    command.group = Some(null.into());
    let error = start(command).unwrap_err();
    assert!(error.to_string().contains("control group"), "{error}");
    assert!(Groups::within(made.as_path()).is_ok());
    let nowhere = Groups::within(Path::new("/nowhere")).unwrap_err();
    assert_eq!(nowhere.kind(), io::ErrorKind::NotFound);
}

/// A process's number, its group's and its session's, of what is in its `stat`.
fn places(stat: &str) -> [&str; 3] {
    let (number, rest) = stat.split_once(' ').unwrap();
    let (_, fields) = rest.rsplit_once(')').unwrap();
    let fields: Vec<_> = fields.split_whitespace().skip(2).collect();
    [number, fields[0], fields[1]]
}

#[test]
fn what_is_apart_leads_its_group_and_a_session_where_ours_has_a_terminal() {
    let (text, _) = output(Command::new("/bin/cat").arg("/proc/self/stat"));
    let [number, group, session] = places(&text);
    assert_eq!(group, number);
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let ours = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    match has_terminal() {
        true => assert_eq!(session, number),
        false => assert_eq!(session, ours),
    }
}

#[test]
fn what_is_not_apart_stays_in_our_session() {
    let mut command = Command::new("/bin/cut")
        .arg("-d ")
        .arg("-f6")
        .arg("/proc/self/stat");
    if !Path::new("/bin/cut").exists() {
        command.program = "/usr/bin/cut".into();
    }
    command.apart = false;
    let (text, _) = output(command);
    // Asked of the kernel the same way: in a container, our session may belong to a process outside, and its number here
    // is then 0.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let ours = stat.split(' ').nth(5).unwrap();
    assert_eq!(text.trim(), ours);
}

#[test]
fn ends_are_told_apart() {
    let end = |script: &str| output(shell(script)).1;
    assert_eq!(end("exit 0").to_string(), "exit code 0");
    assert_eq!(end("exit 3"), ExitStatus::Code(3));
    assert_eq!(end("exit 3").to_string(), "exit code 3");
    let segv = end("kill -SEGV $$");
    assert!(matches!(segv, ExitStatus::Signal { signal, .. } if signal == libc::SIGSEGV));
    assert!(segv.to_string().starts_with("killed by SIGSEGV"));
    // Ignored in this process, and everything is blocked in the thread that forks.
    assert_eq!(end("kill -PIPE $$").to_string(), "killed by SIGPIPE");
    assert_eq!(end("kill -TERM $$").to_string(), "killed by SIGTERM");
    let dumped = ExitStatus::Signal {
        signal: libc::SIGABRT,
        core: true,
    };
    assert_eq!(dumped.to_string(), "killed by SIGABRT (core dumped)");
    assert_eq!(signal_name(40), None);
}

#[test]
fn what_a_child_leaves_of_its_group_ends_with_it() {
    // One that is stopped hears of nothing, and this one not even of what the system tells a group that is left alone.
    let mut command = shell("trap '' HUP; sleep 1000 & kill -STOP $!; echo $!");
    command.stdout = Output::Pipe;
    let mut child = start(command).unwrap();
    assert!(child.wait_blocking(SOON).unwrap().unwrap().success());
    let mut said = String::new();
    let mut stdout = File::from(child.stdout.take().unwrap());
    stdout.read_to_string(&mut said).unwrap();
    let left: u32 = said.trim().parse().unwrap();
    until("what it left is gone", || {
        let state = std::fs::read_to_string(format!("/proc/{left}/stat"));
        // One that nobody reaped is dead all the same.
        state.is_err() || state.is_ok_and(|state| state.contains(") Z "))
    });
}

#[test]
fn a_dropped_child_is_killed_and_leaves_no_zombie() {
    for _ in 0..20 {
        let child = start(sleeper()).unwrap();
        let pid = child.pid();
        assert!(exists(pid));
        let dropping = Instant::now();
        drop(child);
        assert!(dropping.elapsed() < Duration::from_secs(1));
        until("the child is gone", || !exists(pid));
    }
}

#[tokio::test]
async fn a_spawn_that_nobody_awaits_any_more_is_undone() {
    let (mut read, write) = io::pipe().unwrap();
    let spawner = Spawner::start().unwrap();
    let spawning = spawner.spawn(sleeper().fd(OwnedFd::from(write), 3));
    // Polls once: the request is sent.
    let _ = tokio::time::timeout(Duration::ZERO, spawning).await;
    let ended = tokio::task::spawn_blocking(move || read.read(&mut [0]));
    assert_eq!(
        tokio::time::timeout(SOON, ended)
            .await
            .unwrap()
            .unwrap()
            .unwrap(),
        0
    );
}

#[tokio::test]
async fn waiting_can_be_given_up_and_taken_up_again() {
    let spawner = Spawner::start().unwrap();
    let mut child = spawner.spawn(sleeper()).await.unwrap();
    let pid = child.pid();
    assert_eq!(child.try_wait().unwrap(), None);
    assert_eq!(
        child.wait_blocking(Duration::from_millis(20)).unwrap(),
        None
    );
    let while_it_runs = tokio::time::timeout(Duration::from_millis(50), child.wait()).await;
    assert!(while_it_runs.is_err());

    let killer = child.killer();
    let (status, ()) = tokio::join!(child.wait(), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        killer.kill(Signal::TERM).unwrap();
    });
    let expected = ExitStatus::Signal {
        signal: libc::SIGTERM,
        core: false,
    };
    assert_eq!(status.unwrap(), expected);
    assert!(!exists(pid), "reaped");
    assert_eq!(child.wait().await.unwrap(), expected);
    assert_eq!(child.try_wait().unwrap(), Some(expected));
    killer.kill(Signal::KILL).unwrap();
}

#[test]
fn a_child_outlives_the_thread_that_asked_for_it() {
    let mut child = std::thread::spawn(|| start(sleeper()).unwrap())
        .join()
        .unwrap();
    // The death signal would come at once if that thread had forked.
    assert_eq!(
        child.wait_blocking(Duration::from_millis(200)).unwrap(),
        None
    );
}

const HELPER: &str = "HOTCELL_IPC_TEST_HELPER";

/// Not a test: this program again, as the parent that gets killed.
#[test]
fn helper_parent() {
    if std::env::var_os(HELPER).is_none() {
        return;
    }
    let child = start(sleeper()).unwrap();
    println!("child={};", child.pid());
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_child_dies_when_its_parent_is_killed() {
    let mut parent = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_parent", "--nocapture"])
        .env(HELPER, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid: i32 = BufReader::new(parent.stdout.take().unwrap())
        .lines()
        .find_map(|line| {
            let line = line.unwrap();
            let (_, rest) = line.split_once("child=")?;
            Some(rest.split_once(';')?.0.parse().unwrap())
        })
        .unwrap();
    let pidfd =
        rustix::process::pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let ended = |ms: i64| {
        let timeout = Timespec {
            tv_sec: ms / 1000,
            tv_nsec: ms % 1000 * 1_000_000,
        };
        let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&timeout)).unwrap() == 1
    };
    assert!(!ended(100));
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(ended(10_000));
}

#[test]
fn the_wrong_parent_is_noticed() {
    // On a thread of its own: what is set here counts for the process.
    let error = die_with_parent(Signal::TERM, Some(std::process::id())).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    let parent = std::os::unix::process::parent_id();
    die_with_parent(Signal::TERM, Some(parent)).unwrap();
    die_with_parent(Signal::TERM, None).unwrap();
}

#[tokio::test]
async fn a_flood_is_drained_in_bounded_memory() {
    let script = "yes 0123456789 | head -c 11000000 >&2; printf '\\033[31mlast\\n' >&2";
    let mut child = Spawner::start()
        .unwrap()
        .spawn(shell(script))
        .await
        .unwrap();
    let seen = Arc::new(Mutex::new(0_u64));
    let counted = Arc::clone(&seen);
    let limits = LogLimits {
        lines: 3,
        ..LogLimits::default()
    };
    let output = child.stderr.take().unwrap();
    let (log, task) = BoundedLog::start(output, limits, move |line| {
        assert!(line.len() <= 1024);
        *counted.lock().unwrap() += 1;
    })
    .unwrap();
    let status = tokio::time::timeout(Duration::from_secs(60), child.wait())
        .await
        .unwrap();
    assert!(status.unwrap().success());
    task.await.unwrap().unwrap();
    assert_eq!(log.lines(), ["0123456789", "0123456789", "last"]);
    assert_eq!(log.total(), 1_000_001);
    let seen = *seen.lock().unwrap();
    assert_eq!(seen + log.withheld(), log.total());
    assert!((100..100_000).contains(&seen), "{seen}");
}

#[tokio::test]
async fn lines_are_handed_on_as_they_come() {
    let mut child = Spawner::start()
        .unwrap()
        .spawn(shell("echo one >&2; read x; echo two >&2"))
        .await
        .unwrap();
    let output = child.stderr.take().unwrap();
    let (lines, mut received) = tokio::sync::mpsc::unbounded_channel();
    let (_log, _task) = BoundedLog::start(output, LogLimits::default(), move |line| {
        lines.send(line.to_owned()).unwrap();
    })
    .unwrap();
    assert_eq!(received.recv().await.as_deref(), Some("one"));
    assert_eq!(received.recv().await.as_deref(), Some("two"));
    assert_eq!(received.recv().await, None);
    assert!(child.wait().await.unwrap().success());
    assert!(child.as_fd().as_raw_fd() >= 0);
}
