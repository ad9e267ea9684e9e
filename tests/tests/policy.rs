//! Which models may be loaded, and whom they share a worker with: roots, hashes, sizes, inspections, and what the audit
//! log says of it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use hotcell_client::{
    Address, Client, Completion, GenerateOptions, Reason,
    tensor::{Session, SessionOptions},
    v1,
};
use hotcell_tests::cluster::{
    Cluster, SOON, all_have, binaries, children, copy_kjv, golden, hotcell, kjv, program,
    signal_pid,
};
use rustix::process::Signal;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const PROMPT: &str = "In the beginning";

/// Models in two folders, of which one is trusted.
struct House {
    folder: TempDir,
    trusted: PathBuf,
    other: PathBuf,
}

impl House {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let (trusted, other) = (folder.path().join("trusted"), folder.path().join("other"));
        for place in [&trusted, &other] {
            fs::create_dir(place).unwrap();
            fs::copy(golden("gguf/llama3-q8_0.gguf"), place.join("tiny.gguf")).unwrap();
            copy_kjv(&place.join("kjv")).unwrap();
        }
        Self {
            folder,
            trusted,
            other,
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    /// A scheduler with this policy; `ROOT` stands for the trusted folder.
    async fn open(&self, policy: &str, more: &[&str]) -> Cluster {
        let file = self.folder.path().join("models.toml");
        let root = self.trusted.to_str().unwrap();
        fs::write(&file, policy.replace("ROOT", root)).unwrap();
        let log = self.log();
        let (file, log) = (file.to_str().unwrap(), log.to_str().unwrap());
        let own = ["--models-config", file, "--audit-log", log];
        Cluster::start(&[&own, more].concat()).await.unwrap()
    }

    /// The audit log once its last line is as wanted.
    fn audit(&self, done: impl Fn(&Value) -> bool) -> Vec<Value> {
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(self.log()).unwrap_or_default();
            let lines: Vec<Value> = text
                .lines()
                .map(|l| serde_json::from_str(l).unwrap())
                .collect();
            if lines.last().is_some_and(&done) {
                return lines;
            }
            assert!(start.elapsed() < SOON, "{text}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

async fn load(
    client: &Client,
    name: &str,
    path: &Path,
) -> Result<v1::ModelInfo, hotcell_client::Error> {
    client.load(name, path.to_str().unwrap()).await
}

async fn complete(
    client: &Client,
    model: &str,
    tokens: u32,
) -> Result<Completion, hotcell_client::Error> {
    let options = GenerateOptions {
        model: model.to_owned(),
        max_tokens: tokens,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    client.generate(PROMPT, options).await?.complete().await
}

fn guest<'a>(all: &'a [v1::WorkerInfo], model: &str) -> Option<&'a v1::WorkerInfo> {
    all.iter()
        .find(|w| w.id.contains(".guest") && w.models == [model])
}

fn ready(w: &v1::WorkerInfo) -> bool {
    w.state() == v1::WorkerState::Ready
}

#[tokio::test]
async fn an_untrusted_model_has_a_worker_for_itself_and_goes_on_when_it_dies() {
    let house = House::new();
    let policy = "roots = [\"ROOT\"]\n[untrusted]\nmax_tokens = 200\nthreads = 1\n[models]\nbook = \"ROOT/kjv\"\n";
    let cluster = house.open(policy, &[]).await;
    let client = cluster.client().await.unwrap();
    cluster.workers(all_have("book")).await.unwrap();
    let tiny = load(&client, "tiny", &house.trusted.join("tiny.gguf"))
        .await
        .unwrap();
    assert_eq!(
        (tiny.trust_domain.as_str(), &tiny.workers[..]),
        ("trusted", &["w0".to_owned()][..])
    );
    let strange = load(&client, "strange", &house.other.join("kjv"))
        .await
        .unwrap();
    assert_eq!(strange.trust_domain, "untrusted");
    let more = load(&client, "more", &house.other.join("tiny.gguf"))
        .await
        .unwrap();
    assert_eq!(more.trust_domain, "untrusted");

    // Each its own; the device's own worker has the trusted ones and no other.
    let all = client.workers().await.unwrap();
    let own = all.iter().find(|w| w.id == "w0").unwrap();
    assert_eq!(own.models, ["book", "tiny"]);
    let (one, two) = (
        guest(&all, "strange").unwrap(),
        guest(&all, "more").unwrap(),
    );
    assert_ne!(one.pid, two.pid);
    assert_eq!(one.lease.as_ref().unwrap().trust_domain, "untrusted");
    assert_eq!(all.len(), 3, "{all:#?}");

    // The same model gives the same tokens in both domains, and nobody can change it any more.
    let calm = complete(&client, "book", 100).await.unwrap();
    let tokens = complete(&client, "strange", 100).await.unwrap();
    assert_eq!(calm.token_ids, tokens.token_ids);
    let weights = house.other.join("kjv/model.safetensors");
    fs::OpenOptions::new()
        .write(true)
        .open(&weights)
        .unwrap()
        .set_len(8)
        .unwrap();
    assert_eq!(
        complete(&client, "strange", 100).await.unwrap().token_ids,
        tokens.token_ids
    );

    // Its limits hold for it alone.
    let long = complete(&client, "strange", 0).await.unwrap();
    let usage = long.finished.usage.unwrap();
    assert_eq!(usage.prompt_tokens + usage.generated_tokens, 200);
    assert_eq!(strange.summary.unwrap().context_length, 200);

    // A tensor session is on a device's own worker, also if it asks for another.
    let (pid, id) = (one.pid, one.id.clone());
    let asked = SessionOptions {
        worker: Some(id.clone()),
        ..SessionOptions::default()
    };
    let refused = Session::over(&client, asked).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::NoWorker, "{refused}");

    // Killed in the middle of a stream, it is back with the same limits, and the stream has the same tokens.
    let options = GenerateOptions {
        model: "strange".to_owned(),
        max_tokens: 100,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let stream = client.generate(PROMPT, options).await.unwrap();
    signal_pid(pid, Signal::KILL).unwrap();
    assert_eq!(stream.complete().await.unwrap().token_ids, tokens.token_ids);
    let back = cluster
        .workers(|all| guest(all, "strange").is_some_and(|w| w.pid != pid && ready(w)))
        .await
        .unwrap();
    assert_eq!(back.iter().find(|w| w.id == "w0").unwrap().deaths, 0);

    // Unloaded, its worker is gone; loaded again it gets another one.
    client.unload("strange").await.unwrap();
    cluster
        .workers(|all| all.iter().all(|w| w.id != id))
        .await
        .unwrap();
    let error = complete(&client, "strange", 1).await.unwrap_err();
    assert_eq!(error.reason(), Reason::ModelNotFound);
    fs::copy(kjv().join("model.safetensors"), &weights).unwrap();
    load(&client, "strange", &house.other.join("kjv"))
        .await
        .unwrap();
    let all = client.workers().await.unwrap();
    assert!(guest(&all, "strange").unwrap().id != id);
    assert_eq!(
        complete(&client, "strange", 100).await.unwrap().token_ids,
        tokens.token_ids
    );

    let shown = cluster.hotcell(&["models"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("untrusted"), "{shown}");
}

#[tokio::test]
async fn what_an_untrusted_model_packs_is_its_own_and_a_takeover_keeps_it_apart() {
    let house = House::new();
    let cluster = house.open("roots = [\"ROOT\"]\n", &[]).await;
    let client = cluster.client().await.unwrap();
    // The very same file by another name: beside the root, and not beneath it. Another name changes a file's times.
    let link = house.other.join("kjv/model.safetensors");
    fs::remove_file(&link).unwrap();
    fs::hard_link(house.trusted.join("kjv/model.safetensors"), &link).unwrap();
    load(&client, "book", &house.trusted.join("kjv"))
        .await
        .unwrap();
    load(&client, "strange", &house.other.join("kjv"))
        .await
        .unwrap();
    let calm = complete(&client, "book", 50).await.unwrap();
    let packed = |models: &[v1::ModelInfo]| {
        let done = |m: &v1::ModelInfo| {
            let wanted = m
                .packed
                .iter()
                .filter(|p| p.state() == v1::PackedState::Ready);
            wanted.map(|p| (p.packings, p.workers.clone())).next()
        };
        models.iter().map(done).collect::<Option<Vec<_>>>()
    };
    let start = Instant::now();
    let copies = loop {
        let models = client.models().await.unwrap();
        // A device that likes weights as they are packs none.
        if models.iter().all(|m| m.packed.is_empty()) && start.elapsed().as_secs() > 5 {
            break Vec::new();
        }
        match packed(&models) {
            Some(copies) if copies.iter().all(|(_, workers)| !workers.is_empty()) => break copies,
            _ => assert!(start.elapsed() < SOON, "{models:#?}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    for (packings, workers) in &copies {
        assert_eq!((*packings, workers.len()), (1, 1), "{copies:?}");
    }
    let before = client.workers().await.unwrap();
    let (own, strange) = (before[0].pid, guest(&before, "strange").unwrap().pid);

    let file = house.folder.path().join("models.toml");
    let mut command = Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .arg("--takeover")
        .arg("--socket")
        .arg(&cluster.socket);
    command.arg("--models-config").arg(&file).env_clear();
    command.env("XDG_CONFIG_HOME", cluster.folder.path());
    if let Ok(path) = std::env::var("HOTCELL_CPU_PATH") {
        command.env("HOTCELL_CPU_PATH", path);
    }
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let client = cluster.client().await.unwrap();
    let after = cluster
        .workers(|all| all.len() == 2 && all.iter().all(ready))
        .await
        .unwrap();
    assert_eq!(
        (after[0].pid, guest(&after, "strange").unwrap().pid),
        (own, strange)
    );
    assert_eq!(after[0].models, ["book"]);
    for model in ["book", "strange"] {
        assert_eq!(
            complete(&client, model, 50).await.unwrap().token_ids,
            calm.token_ids
        );
    }
    let models = client.models().await.unwrap();
    let domains: Vec<_> = models.iter().map(|m| m.trust_domain.as_str()).collect();
    assert_eq!(domains, ["trusted", "untrusted"]);
}

#[tokio::test]
async fn gates_refuse_and_the_audit_log_says_who_asked() {
    let house = House::new();
    let tiny = fs::read(golden("gguf/llama3-q8_0.gguf")).unwrap();
    let sha: String = Sha256::digest(&tiny)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    let odd = house.trusted.join("odd.gguf");
    fs::write(&odd, [&tiny[..], &[1; 9000]].concat()).unwrap();
    let odd_sha: String = {
        let bytes = fs::read(&odd).unwrap();
        Sha256::digest(&bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    };
    let policy = format!(
        "roots = [\"ROOT\"]\nhashes = [\"{sha}\", \"{odd_sha}\"]\nrequire_inspection = true\nmax_file_bytes = 1_000_000\n\
         [untrusted]\nallow = false\n[models]\ntiny = \"ROOT/tiny.gguf\"\n"
    );
    let cluster = house.open(&policy, &[]).await;
    let client = cluster.client().await.unwrap();
    cluster.workers(all_have("tiny")).await.unwrap();
    assert_eq!(
        complete(&client, "tiny", 5).await.unwrap().token_ids.len(),
        5
    );
    let changed = house.trusted.join("changed.gguf");
    fs::write(&changed, [&tiny[..tiny.len() - 1], &[9]].concat()).unwrap();
    let out = house.trusted.join("out.gguf");
    std::os::unix::fs::symlink(house.other.join("tiny.gguf"), &out).unwrap();
    for (path, word) in [
        (&changed, "SHA-256"),
        (&odd, "suspicious"),
        (&house.trusted.join("kjv"), "1000000"),
        (&house.other.join("tiny.gguf"), "trusted roots"),
        (&out, "trusted roots"),
    ] {
        let error = load(&client, "candidate", path).await.unwrap_err();
        assert_eq!(
            error.reason(),
            Reason::ModelNotAllowed,
            "{}: {error}",
            path.display()
        );
        assert!(error.message().contains(word), "{word} is not in: {error}");
    }
    // A verdict is remembered by the bytes.
    let count = |lines: &[Value]| lines.iter().filter(|l| l["event"] == "inspect").count();
    let refused = |l: &Value| l["event"] == "load" && l["outcome"] == "refused";
    let lines = house.audit(|l| {
        refused(l)
            && l["source"]
                .as_str()
                .is_some_and(|s| s.ends_with("out.gguf"))
    });
    let looks = count(&lines);
    let again = load(&client, "again", &odd).await.unwrap_err();
    assert_eq!(again.reason(), Reason::ModelNotAllowed);
    client.unload("tiny").await.unwrap();
    let lines = house.audit(|l| l["event"] == "unload");
    assert_eq!(count(&lines), looks, "{lines:#?}");
    let first = lines.iter().find(|l| l["event"] == "load").unwrap();
    assert_eq!(
        (&first["model"], &first["outcome"]),
        (&"tiny".into(), &"loaded".into())
    );
    assert_eq!(first["who"]["configuration"], true);
    let last = lines.last().unwrap();
    let uid = rustix::process::getuid().as_raw();
    assert_eq!(last["who"]["uid"], uid);
    assert_eq!(last["who"]["name"], format!("uid {uid}"));
    assert_eq!(last["who"]["pid"], std::process::id());

    let pid = client.workers().await.unwrap()[0].pid;
    signal_pid(pid, Signal::KILL).unwrap();
    let lines = house.audit(|l| l["event"] == "death");
    let death = lines.last().unwrap();
    assert_eq!(
        (&death["worker"], &death["outcome"]),
        (&"w0".into(), &"signal".into())
    );
}

#[tokio::test]
async fn while_one_model_is_looked_into_others_are_loaded_and_unloaded() {
    let house = House::new();
    let cluster = house
        .open("roots = [\"ROOT\"]\nrequire_inspection = true\n", &[])
        .await;
    let client = cluster.client().await.unwrap();
    cluster
        .workers(|all| all.iter().all(ready) && !all.is_empty())
        .await
        .unwrap();
    let children = || children(cluster.scheduler.pid()).unwrap();
    let before = children();
    let slow = tokio::spawn({
        let (client, path) = (client.clone(), house.trusted.join("kjv"));
        async move { load(&client, "slow", &path).await }
    });
    let start = Instant::now();
    // Not before it runs the worker's program: until then the scheduler waits for it to start at all.
    let looks = loop {
        let started = |pid: &u32| {
            !before.contains(pid)
                && program(*pid).is_ok_and(|runs| runs.ends_with("hotcell-worker"))
        };
        if let Some(pid) = children().into_iter().find(started) {
            break pid;
        }
        assert!(start.elapsed() < SOON && !slow.is_finished());
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    };
    signal_pid(looks, Signal::STOP).unwrap();
    // It is looked into as well, and the second time not.
    for _ in 0..2 {
        let loaded = load(&client, "other", &house.trusted.join("tiny.gguf")).await;
        assert_eq!(loaded.unwrap().name, "other");
        client.unload("other").await.unwrap();
    }
    assert!(!slow.is_finished());
    assert!(children().contains(&looks));
    signal_pid(looks, Signal::CONT).unwrap();
    let loaded = slow.await.unwrap().unwrap();
    assert_eq!(loaded.workers, ["w0"]);
}

#[tokio::test]
async fn a_remote_client_names_configured_models_only() {
    let house = House::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let port = free.to_string();
    let policy = "roots = [\"ROOT\"]\n[models]\ntiny = \"ROOT/tiny.gguf\"\n";
    let cluster = house.open(policy, &["--listen", &port]).await;
    let local = cluster.client().await.unwrap();
    cluster.workers(all_have("tiny")).await.unwrap();
    load(&local, "mine", &house.trusted.join("kjv"))
        .await
        .unwrap();
    let address: Address = port.parse().unwrap();
    let remote = Client::connect(&address).await.unwrap();
    assert_eq!(
        complete(&remote, "tiny", 3).await.unwrap().token_ids.len(),
        3
    );
    assert_eq!(
        complete(&local, "mine", 3).await.unwrap().token_ids.len(),
        3
    );
    let again = v1::LoadModelRequest {
        name: "mine".to_owned(),
        serving: Some(v1::Serving {
            aliases: vec!["ours".to_owned()],
            ..v1::Serving::default()
        }),
        ..v1::LoadModelRequest::default()
    };
    let mut steps = local.load_request(again).await.unwrap();
    while let Some(step) = steps.next().await {
        step.unwrap();
    }
    assert_eq!(
        complete(&local, "ours", 3).await.unwrap().token_ids.len(),
        3
    );
    for error in [
        complete(&remote, "mine", 3).await.unwrap_err(),
        complete(&remote, "ours", 3).await.unwrap_err(),
        remote.load("ours", "").await.unwrap_err(),
        remote.unload("ours").await.unwrap_err(),
        remote.load("mine", "").await.unwrap_err(),
        remote.unload("mine").await.unwrap_err(),
        remote.inspect("mine", "").await.unwrap_err(),
        remote.tokenize("mine", PROMPT, false).await.unwrap_err(),
    ] {
        assert_eq!(error.reason(), Reason::ModelNotAllowed, "{error}");
    }
    for error in [
        load(&remote, "x", &house.trusted.join("kjv"))
            .await
            .unwrap_err(),
        remote.inspect("", "/etc/passwd").await.unwrap_err(),
    ] {
        assert_eq!(error.reason(), Reason::InvalidArgument, "{error}");
    }
}

#[test]
fn a_policy_that_cannot_be_read_starts_nothing() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("models.toml");
    for (text, word) in [
        ("rots = []", "rots"),
        ("roots = [\"/nowhere\"]", "/nowhere"),
    ] {
        fs::write(&file, text).unwrap();
        let mut command = hotcell(folder.path()).unwrap();
        let output = command
            .args(["serve", "--", "--models-config"])
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(word) && said.contains("models.toml"),
            "{said}"
        );
    }
}
