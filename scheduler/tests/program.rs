//! The program itself: exit codes, doors, signals.

// A helper that panics fails its test, which is what it is for.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::Read,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hotcell_ipc::{
    socket::stream_pair,
    spawn::{Child, Command, ExitStatus, Signal, Spawner},
};
use tempfile::TempDir;

const PROBED: &str = r#"{"protocol":1,"devices":[{"id":"cpu:0","backend":"cpu","cores":[0,1]}]}"#;

/// A folder with a program that passes for a worker: it can be probed, and then does as `serve` says.
fn house(serve: &str) -> TempDir {
    house_probed(PROBED, serve)
}

fn house_probed(probed: &str, serve: &str) -> TempDir {
    let dir = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .tempdir()
        .unwrap();
    let worker = dir.path().join("worker");
    let script = format!("#!/bin/sh\nif [ $1 = probe ]; then echo '{probed}'; exit; fi\n{serve}\n");
    fs::write(&worker, script).unwrap();
    fs::set_permissions(&worker, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn socket(dir: &TempDir) -> PathBuf {
    dir.path().join("s.sock")
}

fn scheduler(dir: &TempDir, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotcell-scheduler"))
        .arg("--worker-binary")
        .arg(dir.path().join("worker"));
    if !flags.contains(&"--private-fd") {
        command = command.arg("--socket").arg(socket(dir));
    }
    flags
        .iter()
        .fold(command, |command, flag| command.arg(*flag))
}

fn start(command: Command) -> Child {
    Spawner::start().unwrap().spawn_blocking(command).unwrap()
}

/// Its exit code and what it wrote.
fn end(mut child: Child) -> (i32, String) {
    let mut said = String::new();
    let mut stderr = fs::File::from(child.stderr.take().unwrap());
    stderr.read_to_string(&mut said).unwrap();
    match child.wait_blocking(Duration::from_secs(20)).unwrap() {
        Some(ExitStatus::Code(code)) => (code, said),
        other => panic!("{other:?}: {said}"),
    }
}

fn run(dir: &TempDir, flags: &[&str]) -> (i32, String) {
    end(start(scheduler(dir, flags)))
}

fn wait_for(path: &Path) {
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "no {path:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_way_to_fail_has_its_code_and_names_the_thing() {
    let dir = house("exec sleep 100");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let file = dir.path().join("c.toml");
    fs::write(&file, "sokcet = 1").unwrap();
    for (flags, code, word) in [
        (&["--nonsense"][..], 2, "--nonsense"),
        (&["--config", "/no/such.toml"], 2, "/no/such.toml"),
        (&["--config", file.to_str().unwrap()], 2, "sokcet"),
        (&["--private-fd", "99"], 2, "99"),
        (&["--bundled", "m:config.json=99"], 2, "config.json"),
        (&["--log", "a=b=c"], 2, "a=b=c"),
        (&["--listen", &port], 3, &port),
    ] {
        let (exit, said) = run(&dir, flags);
        assert_eq!(exit, code, "{flags:?}: {said}");
        assert!(said.contains(word), "{flags:?}: {said}");
    }
    fs::write(dir.path().join("worker"), "#!/bin/sh\nexit 9\n").unwrap();
    let (exit, said) = run(&dir, &[]);
    assert_eq!(exit, 4);
    assert!(said.contains("exit code 9"), "{said}");
    fs::remove_file(dir.path().join("worker")).unwrap();
    assert_eq!(run(&dir, &[]).0, 5);
}

#[test]
fn it_ends_on_a_signal_and_takes_its_socket_and_workers_along() {
    // Deaf to SIGTERM: has to be killed.
    let dir = house("trap '' TERM; touch \"$0.$$\"; while :; do sleep 0.05; done");
    let child = start(scheduler(&dir, &["--devices", "cpu:2"]));
    let pids = || -> Vec<String> {
        let files = fs::read_dir(dir.path()).unwrap();
        let names = files.map(|f| f.unwrap().file_name().into_string().unwrap());
        names
            .filter_map(|n| Some(n.strip_prefix("worker.")?.to_owned()))
            .collect()
    };
    let began = Instant::now();
    while pids().len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    wait_for(&socket(&dir));
    let (exit, said) = run(&dir, &[]);
    assert_eq!(exit, 3);
    assert!(said.contains("already running"), "{said}");
    child.kill(Signal::TERM).unwrap();
    assert_eq!(end(child).0, 0);
    assert!(!socket(&dir).exists());
    for pid in pids() {
        assert!(!Path::new("/proc").join(pid).exists());
    }
}

#[test]
fn a_private_one_ends_with_its_connection() {
    let dir = house("exec sleep 100");
    let (ours, theirs) = stream_pair().unwrap();
    let child = start(scheduler(&dir, &["--private-fd", "3"]).fd(theirs, 3));
    drop(ours);
    assert_eq!(end(child).0, 0);
}

#[test]
fn a_private_one_whose_owner_hangs_up_and_signals_ends_quietly() {
    let dir = house("trap '' TERM; touch \"$0.up\"; while :; do sleep 0.05; done");
    let (ours, theirs) = stream_pair().unwrap();
    let child = start(scheduler(&dir, &["--private-fd", "3"]).fd(theirs, 3));
    wait_for(&dir.path().join("worker.up"));
    drop(ours);
    // While it waits for a worker that is deaf to SIGTERM.
    std::thread::sleep(Duration::from_millis(300));
    child.kill(Signal::TERM).unwrap();
    let (exit, said) = end(child);
    assert_eq!(exit, 0, "{said}");
    assert!(!said.contains("error:"), "{said}");
}

#[test]
fn a_worker_that_gives_up_is_quoted_and_quarantined() {
    let dir = house("echo 'no such luck' >&2; exit 7");
    let mut child = start(scheduler(&dir, &["--restart-budget", "2"]));
    let mut stderr = fs::File::from(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("quarantined") {
        let mut chunk = [0; 4096];
        let read = stderr.read(&mut chunk).unwrap();
        assert!(read > 0, "{said}");
        said.push_str(&String::from_utf8_lossy(&chunk[..read]));
    }
    assert!(
        said.contains("exit code 7; it said last: no such luck"),
        "{said}"
    );
}

#[test]
fn a_confinement_that_is_required_and_cannot_be_had_is_a_reason_not_to_start() {
    let (code, said) = run(&house("exit 0"), &["--require-confinement"]);
    assert_eq!(code, 8, "{said}");
    assert!(said.contains("does not say"), "{said}");
    let device = PROBED.strip_suffix('}').unwrap();
    let missing = r#"{"layer":"landlock","state":"LAYER_STATE_MISSING","detail":"too old"}"#;
    let probed = format!("{device},\"confinement\":[{missing}]}}");
    let (code, said) = run(&house_probed(&probed, "exit 0"), &["--require-confinement"]);
    assert_eq!(code, 8, "{said}");
    assert!(said.contains("without landlock (too old)"), "{said}");
}

#[test]
fn a_control_group_that_is_none_is_told() {
    let dir = house("exit 0");
    let folder = dir.path().to_str().unwrap().to_owned();
    let (code, said) = run(&dir, &["--control-group", &folder]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("control group"), "{said}");
}
