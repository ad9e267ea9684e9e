//! A confined worker can do its work and nothing else. Each test tries one thing in a process of its own, the
//! `confined` binary.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use hotcell_ipc::transport::{Windows, channel_over};
use hotcell_proto::v1::TokenizeRequest;
use hotcell_proto::v1::tokens_client::TokensClient;
use hotcell_worker::confine::{self, Answer};
use hotcell_worker::exit::Exit;
use tonic::Code;

const REFUSED: i32 = 9;
const ECHO: &[u8] = b"In the beginning";

fn confined(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_confined"));
    command
        .args(args)
        .env_clear()
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> Output {
    confined(args).output().expect("the binary was built")
}

fn start(args: &[&str], input: impl Into<OwnedFd>) -> Child {
    confined(args)
        .stdin(input.into())
        .spawn()
        .expect("the binary was built")
}

/// What it wrote, for messages.
fn words(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[track_caller]
fn assert_done(args: &[&str]) -> Output {
    let output = run(args);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {words}");
    assert!(words.contains("done\n"), "{args:?}: {words}");
    output
}

#[track_caller]
fn assert_refused(args: &[&str], errno: i32) {
    let output = run(args);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(REFUSED), "{args:?}: {words}");
    assert!(
        words.contains(&format!("(os error {errno})")),
        "{args:?}, {errno}: {words}"
    );
}

#[track_caller]
fn assert_trapped(args: &[&str], name: &str) {
    let output = run(args);
    let words = words(&output);
    assert_eq!(
        output.status.code(),
        Some(Exit::ForbiddenSystemCall.code()),
        "{args:?}: {words}"
    );
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(&format!("forbidden system call {name}(")),
        "{args:?}: {words}"
    );
}

const EACCES: i32 = 13;
const EPERM: i32 = 1;
const EINVAL: i32 = 22;
const ENOTTY: i32 = 25;
const ENOSYS: i32 = 38;

#[test]
fn what_the_kernel_knows_of_a_confined_process() {
    for user in [None, Some("--nobody")] {
        if user.is_some() && !rustix::process::geteuid().is_root() {
            continue;
        }
        let (held, given) = UnixStream::pair().unwrap();
        let args: Vec<&str> = user.into_iter().chain(["inherited", "wait"]).collect();
        let mut child = start(&args, given);
        let mut report = String::new();
        // The report is out when the process is confined.
        let mut stdout = child.stdout.take().unwrap();
        while !report.ends_with('\n') {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            report.push(byte[0].into());
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {status}"))
                .trim()
                .to_owned()
        };
        println!("{report}");
        assert!(report.starts_with("no-new-privs, "), "{report}");
        assert!(report.contains("capabilities"), "{report}");
        assert!(report.contains("landlock"), "{report}");
        assert!(report.ends_with(", seccomp\n"), "{report}");
        assert_eq!(field("NoNewPrivs:"), "1");
        assert_eq!(field("Seccomp:"), "2");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{set}");
        }
        if report.contains("capabilities (dropped)") {
            assert_eq!(field("CapBnd:"), "0000000000000000");
        }
        drop(held);
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn what_a_worker_lives_on_works() {
    for mode in ["inherited", "listening"] {
        for action in [
            "nothing",
            "threads",
            "allocate",
            "parallelism",
            "use-open-file",
            "use-self",
        ] {
            assert_done(&[mode, action]);
        }
        let output = assert_done(&[mode, "names"]);
        assert!(words(&output).contains("compute-0\n"));
    }
}

#[test]
fn an_ordinary_user_is_confined_like_root() {
    if !rustix::process::geteuid().is_root() {
        // Then all other tests show it.
        return;
    }
    let output = assert_done(&["--nobody", "inherited", "threads"]);
    assert!(words(&output).contains(", capabilities ("));
    assert_trapped(&["--nobody", "inherited", "map-code"], "mmap");
    assert_trapped(&["--nobody", "inherited", "listen"], "socket");
    assert_refused(&["--nobody", "inherited", "open", "/etc/hostname"], EACCES);
}

#[test]
fn tokio_serves_an_inherited_socket() {
    let (mut held, given) = UnixStream::pair().unwrap();
    let child = start(&["inherited", "echo"], given);
    echo(&mut held).unwrap();
    drop(held);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
}

#[test]
fn tokio_accepts_only_in_listening_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let child = start(&["listening", "accept"], listener.try_clone().unwrap());
    let mut held = UnixStream::connect(&path).unwrap();
    echo(&mut held).unwrap();
    drop(held);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));

    let child = start(&["inherited", "accept"], listener);
    let _held = UnixStream::connect(&path).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        words(&output).contains("forbidden system call accept4("),
        "{}",
        words(&output)
    );
}

fn echo(stream: &mut UnixStream) -> std::io::Result<()> {
    // Nobody answers where the process failed, and its listener is still ours.
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut back = vec![0; ECHO.len()];
    for _ in 0..3 {
        stream.write_all(ECHO)?;
        stream.read_exact(&mut back)?;
        assert_eq!(back, ECHO);
    }
    Ok(())
}

#[tokio::test]
async fn grpc_is_served_over_an_inherited_socket() {
    let (held, given) = hotcell_ipc::socket::stream_pair().unwrap();
    let child = start(&["inherited", "grpc"], given);
    let channel = channel_over(held, Windows::default()).await.unwrap();
    // No service is registered, so the right answer is that there is none.
    let mut client = TokensClient::new(channel);
    for _ in 0..3 {
        let status = client.tokenize(TokenizeRequest::default()).await;
        assert_eq!(
            status.map(drop).map_err(|s| s.code()),
            Err(Code::Unimplemented)
        );
    }
    drop(client);
    let output = tokio::task::spawn_blocking(|| child.wait_with_output());
    let output = output.await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
}

#[tokio::test]
async fn grpc_is_served_by_a_listening_tcp_socket() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let mut child = start(&["listening", "grpc-tcp"], listener);
    for _ in 0..2 {
        let mut client = TokensClient::connect(address.clone()).await.unwrap();
        let status = client.tokenize(TokenizeRequest::default()).await;
        assert_eq!(
            status.map(drop).map_err(|s| s.code()),
            Err(Code::Unimplemented)
        );
    }
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_panic_tells_its_story_and_ends_as_panics_do() {
    let output = run(&["inherited", "panic"]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(101), "{words}");
    assert!(words.contains("as asked"), "{words}");
    assert!(words.contains("stack backtrace:"), "{words}");
    assert!(!words.contains("forbidden"), "{words}");
}

#[test]
fn crashes_are_still_told_apart_by_their_signal() {
    for action in ["abort", "overflow"] {
        let output = run(&["inherited", action]);
        assert_eq!(output.status.signal(), Some(6), "{}", words(&output));
    }
    let output = run(&["inherited", "overflow"]);
    assert!(words(&output).contains("overflowed its stack"));
}

#[test]
fn no_file_can_be_opened_found_or_removed_by_path() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for path in [path, "/etc/passwd", "/proc/self/maps", "/proc/1/mem", "."] {
        for action in ["open", "stat", "remove"] {
            assert_refused(&["inherited", action, path], EACCES);
        }
    }
    assert!(file.path().exists());
    assert_refused(&["inherited", "lengthen"], EPERM);
}

#[test]
fn no_socket_program_process_or_code_can_be_made() {
    for (action, name) in [
        ("connect", "socket"),
        ("listen", "socket"),
        ("execute", "execve"),
        ("map-code", "mmap"),
        ("make-code", "mprotect"),
    ] {
        assert_trapped(&["inherited", action], name);
        assert_trapped(&["listening", action], name);
    }
}

#[test]
fn a_call_with_all_signals_blocked_dies_by_the_signal_itself() {
    // As glibc's `posix_spawn` does: no handler can run, and the kernel does not ask for one.
    let output = run(&["inherited", "run"]);
    assert_eq!(output.status.signal(), Some(31), "{}", words(&output));
}

#[test]
fn no_other_process_can_be_signalled_or_limited() {
    for (action, name) in [
        ("kill-parent", "kill"),
        ("kill-group", "kill"),
        ("limit-parent", "prlimit64"),
    ] {
        assert_trapped(&["inherited", action], name);
    }
}

/// Arguments for which each conditional rule holds: prot 5 has PROT_EXEC, there is no address family of 5 here, 5 is
/// neither this process nor a thread's flags, and so on.
const FIVES: [&str; 6] = ["5"; 6];

#[test]
fn every_rule_gives_its_answer() {
    for (name, _, answer) in confine::answers() {
        let args: Vec<&str> = ["inherited", "call", name]
            .into_iter()
            .chain(FIVES)
            .collect();
        match answer {
            Answer::Allow => {}
            Answer::Errno(errno) => assert_refused(&args, errno),
            // Below, since no value suits all of their rules.
            Answer::Trap if ["fcntl", "ioctl", "sendmsg"].contains(&name) => {}
            Answer::Trap => assert_trapped(&args, name),
        }
    }
}

#[test]
fn arguments_decide_where_they_can() {
    let call = |args: &[&'static str]| -> Vec<&'static str> {
        ["inherited", "call"].iter().chain(args).copied().collect()
    };
    let [dgram, seqpacket, inet] = [["1", "2"], ["1", "5"], ["2", "1"]];
    for [family, kind] in [dgram, seqpacket, inet] {
        assert_trapped(&call(&["socketpair", family, kind]), "socketpair");
    }
    // MSG_FASTOPEN.
    assert_trapped(&call(&["sendmsg", "0", "0", "536870912"]), "sendmsg");
    // F_SETOWN, F_SETSIG, F_SETOWN_EX; F_SETPIPE_SZ.
    for command in ["8", "10", "15"] {
        assert_trapped(&call(&["fcntl", "0", command]), "fcntl");
    }
    assert_refused(&call(&["fcntl", "0", "1031"]), EINVAL);
    // FIOSETOWN, SIOCSPGRP; TCGETS and one that belongs to a device.
    for command in ["35073", "35074"] {
        assert_trapped(&call(&["ioctl", "0", command]), "ioctl");
    }
    for command in ["21505", "3221488129"] {
        assert_refused(&call(&["ioctl", "0", command]), ENOTTY);
    }
    // PR_SET_PDEATHSIG to nothing: it must not outlive the scheduler. PR_SET_DUMPABLE.
    for option in ["1", "4"] {
        assert_refused(&call(&["prctl", option]), EPERM);
    }
    // Another process's urgency, and a group's; 0 is the thread itself.
    assert_refused(&call(&["setpriority", "0", "1", "19"]), EPERM);
    assert_refused(&call(&["setpriority", "1", "0", "19"]), EPERM);
    assert_done(&call(&["setpriority", "0", "0", "19"]));
    // Another's turns.
    assert_refused(&call(&["sched_setattr", "1", "0", "0"]), EPERM);
    assert_refused(&call(&["setpriority", "0", "0", "-1"]), EACCES);
    // A thread in a user namespace of its own.
    assert_trapped(&call(&["clone", "268501248"]), "clone");
    // All processes, and the own group.
    for pid in ["-1", "0"] {
        assert_trapped(&call(&["kill", pid, "9"]), "kill");
    }
    // The upper half of an `int` argument is not read by the kernel, nor may it hide anything from the filter.
    assert_trapped(
        &call(&["mmap", "0", "4096", "4294967300", "34", "-1"]),
        "mmap",
    );
}

#[test]
fn calls_without_a_rule_are_unknown() {
    // clone3, io_uring_setup, seccomp's successor of tomorrow.
    for number in ["435", "425", "1000"] {
        assert_refused(&["inherited", "call", number], ENOSYS);
    }
}
