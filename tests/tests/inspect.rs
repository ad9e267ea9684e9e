//! Looking into models: each gets a verdict from a worker of its own, whatever is in it, and nothing else notices.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Instant,
};

use hotcell_client::{Client, Reason, v1};
use hotcell_tests::cluster::{Cluster, SOON, all_have, golden, hotcell, is_own, kjv, signal_pid};
use rustix::process::Signal;
use tempfile::TempDir;
use v1::Verdict;

/// A copy of a golden folder in which one thing is changed.
fn spoilt(folder: &Path, name: &str, spoil: impl FnOnce(&Path)) -> PathBuf {
    let target = folder.join(name);
    fs::create_dir(&target).unwrap();
    for file in fs::read_dir(golden("llama3")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), target.join(file.file_name())).unwrap();
    }
    spoil(&target);
    target
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} is not in {}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// A golden GGUF file, changed.
fn gguf(folder: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = fs::read(golden("gguf/llama3-q8_0.gguf")).unwrap();
    change(&mut bytes);
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn fifo(path: &Path) {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

async fn look(client: &Client, path: &Path) -> v1::Inspection {
    client.inspect("", path.to_str().unwrap()).await.unwrap()
}

fn has(found: &v1::Inspection, kind: &str) -> bool {
    found.findings.iter().any(|finding| finding.kind == kind)
}

/// Files that are no model, and why.
fn refused(folder: &Path) -> Vec<(PathBuf, Reason, &'static str)> {
    let secret = folder.join("secret");
    fs::write(&secret, "a secret").unwrap();
    let pipe = folder.join("pipe.gguf");
    fifo(&pipe);
    vec![
        (
            gguf(folder, "cut.gguf", |b| b.truncate(b.len() / 2)),
            Reason::ModelCorrupt,
            "cut.gguf",
        ),
        (
            gguf(folder, "many.gguf", |b| b[8..16].fill(0xff)),
            Reason::LimitExceeded,
            "tensors",
        ),
        (
            gguf(folder, "keys.gguf", |b| b[16..24].fill(0x7f)),
            Reason::LimitExceeded,
            "metadata entries",
        ),
        (
            gguf(folder, "garbage.gguf", |b| b.fill(7)),
            Reason::NotAModel,
            "garbage.gguf",
        ),
        (pipe, Reason::NotAModel, "neither a folder nor a .gguf file"),
        (
            PathBuf::from("/dev/zero"),
            Reason::NotAModel,
            "neither a folder nor a .gguf file",
        ),
        (
            spoilt(folder, "link-out", |p| {
                fs::remove_file(p.join("tokenizer.json")).unwrap();
                symlink(&secret, p.join("tokenizer.json")).unwrap();
            }),
            Reason::InvalidArgument,
            "outside the model's folder",
        ),
        (
            spoilt(folder, "pipe-inside", |p| {
                fs::remove_file(p.join("tokenizer.json")).unwrap();
                fifo(&p.join("tokenizer.json"));
            }),
            Reason::NotAModel,
            "tokenizer.json",
        ),
        (
            spoilt(folder, "deep", |p| {
                fs::write(p.join("config.json"), "[".repeat(100_000)).unwrap();
            }),
            Reason::ModelCorrupt,
            "config.json",
        ),
        (
            spoilt(folder, "mixed", |p| {
                edit(
                    &p.join("config.json"),
                    "\"hidden_size\": ",
                    "\"hidden_size\": 1",
                );
            }),
            Reason::ModelCorrupt,
            "shape",
        ),
    ]
}

/// Models that can be used, and what is odd about them.
fn suspicious(folder: &Path) -> Vec<(PathBuf, &'static str)> {
    let template = |name: &str, text: &str| {
        spoilt(folder, name, |p| {
            fs::write(p.join("chat_template.jinja"), text).unwrap();
        })
    };
    vec![
        (
            gguf(folder, "trailing.gguf", |b| b.extend([1; 9000])),
            "trailing_bytes",
        ),
        (
            template(
                "endless",
                "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
            ),
            "template_fails",
        ),
        (template("unreadable", "{% for %}"), "template_unreadable"),
        (
            // There is no such statement here.
            template("opener", "{% include '/etc/passwd' %}"),
            "template_unreadable",
        ),
        (
            spoilt(folder, "python", |p| {
                edit(&p.join("config.json"), "{", "{\"auto_map\": {},");
            }),
            "python_code",
        ),
        (
            spoilt(folder, "spare", |p| {
                let first = p.join("model-00001-of-00003.safetensors");
                fs::copy(first, p.join("other.safetensors")).unwrap();
            }),
            "unread_file",
        ),
    ]
}

#[tokio::test]
async fn every_file_gets_a_verdict_and_nothing_else_notices() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let pid = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let folder = TempDir::new().unwrap();
    for path in [kjv(), golden("llama3"), golden("gguf/llama3-q8_0.gguf")] {
        let found = look(&client, &path).await;
        assert_eq!(found.verdict(), Verdict::Fine, "{found:#?}");
        let contents = found.contents.unwrap();
        assert!(
            contents.tensor_count > 0 && contents.work_bytes > 0,
            "{contents:#?}"
        );
        assert_eq!(contents.architecture, "llama");
        assert_eq!(found.summary.unwrap().parameters, contents.parameters);
        assert!(
            found.confinement.contains("seccomp"),
            "{}",
            found.confinement
        );
        assert!(found.files.iter().all(|file| file.sha256.len() == 64));
    }
    for (path, reason, word) in refused(folder.path()) {
        let found = look(&client, &path).await;
        let why = format!("{}: {found:#?}", path.display());
        assert_eq!(found.verdict(), Verdict::Refused, "{why}");
        assert_eq!(found.reason, reason.name(), "{why}");
        assert!(found.problem.contains(word), "{word} is not in {why}");
    }
    for (path, kind) in suspicious(folder.path()) {
        let found = look(&client, &path).await;
        let why = format!("{}: {found:#?}", path.display());
        assert_eq!(found.verdict(), Verdict::Suspicious, "{why}");
        assert!(has(&found, kind), "{kind} is not in {why}");
    }
    let missing = client.inspect("", "/nowhere/m.gguf").await.unwrap_err();
    assert_eq!(missing.reason(), Reason::FileNotFound);
    let unknown = client.inspect("nobody", "").await.unwrap_err();
    assert_eq!(unknown.reason(), Reason::ModelNotFound);

    // Its worker is gone, nobody else died, and nothing was loaded.
    let after = cluster.workers(|all| all.iter().all(is_own)).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (pid, 0));
    let models = client.models().await.unwrap();
    assert_eq!(models.len(), 1, "{models:#?}");
    assert!(client.crashes().await.unwrap().is_empty());
}

/// Has the worker that looks into a model come to harm, until one of them did while it looked.
async fn harmed(cluster: &Cluster, path: &Path, harm: impl Fn(u32)) -> v1::Inspection {
    let start = Instant::now();
    loop {
        let (client, path) = (cluster.client().await.unwrap(), path.to_owned());
        let looking = tokio::spawn(async move { look(&client, &path).await });
        let client = cluster.client().await.unwrap();
        while !looking.is_finished() {
            let all = client.workers().await.unwrap();
            let there = all
                .iter()
                .find(|w| w.id.contains(".inspect") && !w.confinement.is_empty());
            if let Some(worker) = there {
                harm(worker.pid);
                break;
            }
        }
        let found = looking.await.unwrap();
        if found.verdict() != Verdict::Fine {
            return found;
        }
        assert!(start.elapsed() < SOON, "it was always too late");
    }
}

#[tokio::test]
async fn a_model_that_kills_its_worker_is_told_how_it_died() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let pid = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let found = harmed(&cluster, &kjv(), |pid| {
        // It may be done already.
        let _ = signal_pid(pid, Signal::SEGV);
    })
    .await;
    assert_eq!(found.verdict(), Verdict::Died, "{found:#?}");
    let death = found.death.unwrap();
    assert_eq!(death.kind, "signal", "{death:#?}");
    assert!(death.reason.contains("SIGSEGV"), "{death:#?}");
    assert!(death.worker.contains(".inspect"), "{death:#?}");
    let after = cluster.workers(|all| all.iter().all(is_own)).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (pid, 0));
}

#[tokio::test]
async fn a_file_that_shrinks_meanwhile_is_said_to_have_changed() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let folder = TempDir::new().unwrap();
    let path = spoilt(folder.path(), "shrinks", |_| ());
    let file = path.join("model-00001-of-00003.safetensors");
    let whole = fs::read(&file).unwrap();
    let found = harmed(&cluster, &path, |_| {
        let file = OpenOptions::new().write(true).open(&file).unwrap();
        file.set_len(4096).unwrap();
    })
    .await;
    fs::write(&file, whole).unwrap();
    match found.verdict() {
        Verdict::Refused => assert_eq!(found.reason, Reason::ModelChanged.name(), "{found:#?}"),
        Verdict::Died => assert_eq!(found.death.unwrap().kind, "model_changed"),
        other => panic!("{other:?}"),
    }
    assert_eq!(
        look(&cluster.client().await.unwrap(), &path)
            .await
            .verdict(),
        Verdict::Fine
    );
}

#[tokio::test]
async fn the_command_needs_no_scheduler_and_ends_with_the_verdict() {
    let folder = TempDir::new().unwrap();
    let run = |path: &Path, more: &[&str]| {
        let mut command = hotcell(folder.path()).unwrap();
        let output = command
            .arg("inspect")
            .arg(path)
            .args(more)
            .output()
            .unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.code(),
            said(&output.stdout),
            said(&output.stderr),
        )
    };
    let (code, out, err) = run(&golden("gguf/llama3-q8_0.gguf"), &[]);
    assert_eq!(code, Some(0), "{out}{err}");
    for part in [
        "verdict    fine",
        "format     gguf 3",
        "sha256 ",
        "q8_0",
        "template   ",
    ] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    let odd = gguf(folder.path(), "odd.gguf", |b| b.extend([1; 9000]));
    let (code, out, err) = run(&odd, &["--json"]);
    assert_eq!(code, Some(11), "{out}{err}");
    let mut lines = out.lines();
    let view: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    assert_eq!(view["verdict"], "suspicious");
    assert_eq!(view["findings"][0]["kind"], "trailing_bytes");
    assert_eq!(view["contents"]["tensor_types"][0]["dtype"], "q8_0");
    let last: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    assert_eq!(last["error"]["exit_code"], 11);
    let cut = gguf(folder.path(), "cut.gguf", |b| b.truncate(100));
    let (code, out, err) = run(&cut, &[]);
    assert_eq!(code, Some(6), "{out}{err}");
    assert!(out.contains("refused    MODEL_CORRUPT"), "{out}");
    let (code, out, err) = run(Path::new("/nowhere/m.gguf"), &[]);
    assert_eq!(code, Some(4), "{out}{err}");
}
