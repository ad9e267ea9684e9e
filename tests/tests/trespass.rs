//! A worker that somebody else has taken over tries to get out: each way fails, is told by name where the filter ends
//! the process, and changes nothing for anybody else.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{collections::BTreeMap, path::Path};

use hotcell_client::{Client, GenerateOptions, v1};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, kjv, report},
    fault::{ENDED, NEW_FILE, Trespass},
};

/// What becomes of an attempt.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// The process ends, and says which system call it was.
    Trapped(&'static str),
    /// The process ends by this signal.
    Struck(&'static str),
    /// It is refused with this error, and the process goes on.
    Refused(i32),
    /// It succeeds, and only the process itself, which ends, is the worse for it.
    Own,
    /// As refused with "try again" where the threads of each worker are counted apart, else done.
    Bounded,
}

use Fate::{Bounded, Own, Refused, Struck, Trapped};

const ATTEMPTS: &[(Trespass, Fate)] = &[
    (Trespass::OpenPasswords, Refused(libc::EACCES)),
    (Trespass::OpenInit, Refused(libc::EACCES)),
    (Trespass::OpenScheduler, Refused(libc::EACCES)),
    (Trespass::OpenNeighbour, Refused(libc::EACCES)),
    (Trespass::ReopenWeights, Refused(libc::EACCES)),
    (Trespass::CreateFile, Refused(libc::EACCES)),
    (Trespass::RemoveWeights, Refused(libc::EACCES)),
    (Trespass::OpenByHandle, Trapped("open_by_handle_at")),
    (Trespass::Socket, Trapped("socket")),
    // No handler can run, and the kernel does not ask for one.
    (Trespass::QuietSocket, Struck("SIGSYS")),
    (Trespass::Connect, Trapped("connect")),
    (Trespass::Execute, Trapped("execve")),
    (Trespass::ForkBomb, Trapped("clone")),
    // Libraries take it for an old kernel, and do it in the way that a filter sees.
    (Trespass::ForkUnseen, Refused(libc::ENOSYS)),
    (Trespass::ThreadBomb, Bounded),
    (Trespass::Trace, Trapped("ptrace")),
    (Trespass::WriteScheduler, Trapped("process_vm_writev")),
    (Trespass::ReadScheduler, Trapped("process_vm_readv")),
    (Trespass::KillScheduler, Trapped("kill")),
    (Trespass::KillThread, Trapped("tgkill")),
    (Trespass::KillByHandle, Trapped("pidfd_open")),
    (Trespass::LimitScheduler, Trapped("prlimit64")),
    (Trespass::Mount, Trapped("mount")),
    (Trespass::Unshare, Trapped("unshare")),
    (Trespass::EnterNamespace, Trapped("setns")),
    (Trespass::BecomeRoot, Trapped("setuid")),
    (Trespass::TakeCapabilities, Trapped("capset")),
    (Trespass::Filter, Refused(libc::EPERM)),
    // Libraries ask for it, and cope.
    (Trespass::IoUring, Refused(libc::ENOSYS)),
    (Trespass::Bpf, Trapped("bpf")),
    (Trespass::Keys, Trapped("keyctl")),
    (Trespass::PerfEvents, Trapped("perf_event_open")),
    (Trespass::UserFaults, Trapped("userfaultfd")),
    (Trespass::ExecutableMemory, Trapped("memfd_create")),
    (Trespass::MapCode, Trapped("mmap")),
    (Trespass::ExecuteWeights, Trapped("mprotect")),
    // What it writes is its own copy of the page.
    (Trespass::ProtectWeights, Own),
    // The kernel's own answers: the files were opened to be read only.
    (Trespass::MapWeights, Refused(libc::EACCES)),
    (Trespass::WriteWeights, Refused(libc::EBADF)),
    (Trespass::RemovePages, Refused(libc::EACCES)),
    (Trespass::ScribbleWeights, Struck("SIGSEGV")),
    (Trespass::Truncate, Refused(libc::EPERM)),
    (Trespass::Punch, Refused(libc::EPERM)),
    (Trespass::Seal, Refused(libc::EINVAL)),
];

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = folder.read_dir().unwrap().map(|e| e.unwrap().path());
    let name = |p: &Path| p.file_name().unwrap().to_string_lossy().into_owned();
    let files = entries.filter(|p| p.is_file());
    files
        .map(|p| (name(&p), std::fs::read(&p).unwrap()))
        .collect()
}

fn worker<'a>(all: &'a [v1::WorkerInfo], id: &str) -> &'a v1::WorkerInfo {
    all.iter().find(|w| w.id == id).unwrap()
}

/// Tokens that are the same whoever computes them.
async fn tokens(client: &Client) -> Vec<u32> {
    let options = GenerateOptions {
        max_tokens: 24,
        ignore_eos: true,
        seed: Some(7),
        sampling: v1::Sampling {
            temperature: Some(0.9),
            ..v1::Sampling::default()
        },
        deadline: Some(SOON),
        ..GenerateOptions::default()
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap().token_ids
}

async fn ready(cluster: &Cluster) -> Vec<v1::WorkerInfo> {
    let ready = |all: &[v1::WorkerInfo]| all.len() == 2 && all_have("kjv")(all);
    cluster.workers(ready).await.unwrap()
}

#[tokio::test]
async fn every_way_out_is_closed_and_costs_nobody_else_anything() {
    assert!(
        Trespass::ALL
            .iter()
            .all(|t| ATTEMPTS.iter().any(|a| a.0 == *t))
    );
    let cluster = Cluster::with_model(
        "kjv",
        &kjv(),
        &[
            "--worker-binary",
            env!("CARGO_BIN_EXE_hotcell-worker-fault"),
            "--devices",
            "cpu:2",
            "--restart-budget",
            "1000",
            "--restart-backoff",
            "10ms",
            "--restart-backoff-max",
            "10ms",
        ],
    )
    .await
    .unwrap();
    let client = cluster.client().await.unwrap();
    let before = ready(&cluster).await;
    let (bystander, model) = (worker(&before, "w1").pid, files(&kjv()));
    let _ = std::fs::remove_file(NEW_FILE);
    let calm = tokens(&client).await;
    for &(trespass, fate) in ATTEMPTS {
        let all = ready(&cluster).await;
        let w0 = worker(&all, "w0");
        trespass.order(w0.pid).unwrap();
        // Whoever asks meanwhile gets what they would have had.
        assert_eq!(tokens(&client).await, calm, "{trespass:?}");
        let crash = format!("w0.{}", w0.epoch);
        match fate {
            Trapped(name) => {
                let report = report(&client, &crash).await.unwrap();
                let words = format!("forbidden system call {name}(");
                assert!(
                    report.reason.contains(&words),
                    "{trespass:?}: {}",
                    report.reason
                );
                let seen = report.blackbox.unwrap();
                assert!(seen.error.contains(&words), "{trespass:?}: {}", seen.error);
            }
            Struck(signal) => {
                let report = report(&client, &crash).await.unwrap();
                let words = format!("killed by {signal}");
                assert!(
                    report.reason.contains(&words),
                    "{trespass:?}: {}",
                    report.reason
                );
            }
            Own => {
                let report = report(&client, &crash).await.unwrap();
                let words = format!("exit code {ENDED}");
                assert!(
                    report.reason.contains(&words),
                    "{trespass:?}: {}",
                    report.reason
                );
            }
            Refused(errno) => {
                let (told, _) = trespass.told(&cluster).await.unwrap();
                assert_eq!(told, format!("refused with {errno}"), "{trespass:?}");
            }
            Bounded => {
                let limits = w0.layers.iter().find(|l| l.layer == "limits").unwrap();
                let expected = match limits.detail.contains("threads") {
                    true => format!("refused with {}", libc::EAGAIN),
                    false => "done".to_owned(),
                };
                let (told, _) = trespass.told(&cluster).await.unwrap();
                assert_eq!(told, expected, "{trespass:?}");
            }
        }
        let after = ready(&cluster).await;
        let lives = matches!(fate, Refused(_) | Bounded);
        assert_eq!(worker(&after, "w0").pid == w0.pid, lives, "{trespass:?}");
        let w1 = worker(&after, "w1");
        assert_eq!((w1.pid, w1.deaths), (bystander, 0), "{trespass:?}");
        assert!(files(&kjv()) == model, "{trespass:?} changed the model");
        assert!(!Path::new(NEW_FILE).exists(), "{trespass:?} made a file");
    }
    assert_eq!(tokens(&client).await, calm);
}
