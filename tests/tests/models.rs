//! Many models on one host: those that sleep and are woken, make room for each other, have replicas, further names and limits
//! of their own, and take each other's place, while requests for them go on.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use hotcell_client::{Client, Completion, GenerateOptions, Reason, v1};
use hotcell_tests::cluster::{Cluster, SOON, all_have, copy_kjv, golden, signal_pid};
use rustix::process::Signal;
use tempfile::TempDir;
use v1::ModelState::{self, Asleep, Failed, Loaded};

/// Bytes that the book takes on one device with the memory for models below, rounded up: 9.1 MiB of weights, and some.
const BOOK: u64 = 14_000_000;
const MEMORY: [&str; 2] = ["--model-memory", "4000000"];

/// Copies of the book under several names, and a config file.
struct Shelf {
    folder: TempDir,
}

impl Shelf {
    fn new(names: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        for name in names {
            copy_kjv(&folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A scheduler with this table of models; `SHELF` stands for the folder.
    async fn open(&self, config: &str, more: &[&str]) -> Cluster {
        let file = self.folder.path().join("scheduler.toml");
        let shelf = self.folder.path().to_str().unwrap();
        fs::write(&file, config.replace("SHELF", shelf)).unwrap();
        let own = ["--config", file.to_str().unwrap()];
        let cluster = Cluster::start(&[&own, &MEMORY[..], more].concat()).await;
        cluster.unwrap()
    }
}

async fn complete(client: &Client, model: &str, tokens: u32) -> Result<Completion, Reason> {
    let options = GenerateOptions {
        model: model.to_owned(),
        max_tokens: tokens,
        ignore_eos: true,
        seed: Some(7),
        ..GenerateOptions::default()
    };
    let stream = client.generate("In the beginning", options).await;
    let stream = stream.map_err(|e| e.reason())?;
    stream.complete().await.map_err(|e| e.reason())
}

async fn text(client: &Client, model: &str, tokens: u32) -> Vec<u32> {
    complete(client, model, tokens).await.unwrap().token_ids
}

async fn model(client: &Client, name: &str) -> v1::ModelInfo {
    let models = client.models().await.unwrap();
    let found = models.iter().find(|m| m.name == name);
    found
        .unwrap_or_else(|| panic!("no {name} in {models:#?}"))
        .clone()
}

async fn state(client: &Client, name: &str) -> ModelState {
    model(client, name).await.state()
}

/// Waits until a model is as wanted.
async fn becomes(client: &Client, name: &str, wanted: impl Fn(&v1::ModelInfo) -> bool) {
    let start = Instant::now();
    loop {
        let model = model(client, name).await;
        if wanted(&model) {
            return;
        }
        assert!(start.elapsed() < SOON, "{model:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn load(name: &str, path: &std::path::Path) -> v1::LoadModelRequest {
    v1::LoadModelRequest {
        name: name.to_owned(),
        path: path.to_str().unwrap().to_owned(),
        ..v1::LoadModelRequest::default()
    }
}

async fn run(
    client: &Client,
    request: v1::LoadModelRequest,
) -> Result<v1::ModelInfo, hotcell_client::Error> {
    let mut steps = client.load_request(request).await?;
    let mut last = None;
    while let Some(step) = steps.next().await {
        last = step?.model;
    }
    Ok(last.unwrap())
}

#[tokio::test]
async fn a_request_wakes_a_model_and_nobody_asking_puts_it_to_sleep() {
    let shelf = Shelf::new(&["a"]);
    let config = "[models]\na = { path = \"SHELF/a\", on_request = true, keep_alive = \"300ms\", aliases = [\"book\"] }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    assert_eq!(state(&client, "a").await, Asleep);
    // Many at once wake it once.
    let all = (0..8).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { text(&client, "book", 12).await })
    });
    let mut texts = Vec::new();
    for one in all.collect::<Vec<_>>() {
        texts.push(one.await.unwrap());
    }
    assert!(texts.iter().all(|ids| *ids == texts[0] && ids.len() == 12));
    for _ in 0..2 {
        becomes(&client, "a", |m| {
            m.state() == Asleep && m.workers.is_empty()
        })
        .await;
        let workers = client.workers().await.unwrap();
        assert!(workers.iter().all(|w| w.models.is_empty()), "{workers:#?}");
        assert_eq!(text(&client, "a", 12).await, texts[0]);
    }
    // While somebody asks it, it stays.
    let long = tokio::spawn({
        let client = client.clone();
        async move { text(&client, "a", 300).await }
    });
    becomes(&client, "a", |m| m.running_requests == 1).await;
    while !long.is_finished() {
        assert_eq!(state(&client, "a").await, Loaded);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(long.await.unwrap().len(), 300);
}

#[tokio::test]
async fn a_model_that_was_not_there_is_looked_for_again() {
    let shelf = Shelf::new(&["here"]);
    let config = "[models]\na = { path = \"SHELF/a\", on_request = true }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    for _ in 0..2 {
        let error = complete(&client, "a", 3).await.unwrap_err();
        assert_eq!(error, Reason::FileNotFound);
        assert_eq!(state(&client, "a").await, Failed);
    }
    fs::rename(shelf.path("here"), shelf.path("a")).unwrap();
    assert_eq!(text(&client, "a", 3).await.len(), 3);
}

#[tokio::test]
async fn the_model_that_was_asked_least_recently_makes_room() {
    let shelf = Shelf::new(&["a", "b", "c", "d"]);
    let config = "[models]\na = { path = \"SHELF/a\", on_request = true }\nb = { path = \"SHELF/b\", on_request = true }\nc = { path = \"SHELF/c\", on_request = true }\nd = { path = \"SHELF/d\", pinned = true }\n";
    let memory = (3 * BOOK).to_string();
    let cluster = shelf.open(config, &["--device-memory", &memory]).await;
    let client = cluster.client().await.unwrap();
    becomes(&client, "d", |m| m.state() == Loaded).await;
    let expected = text(&client, "d", 12).await;
    for name in ["a", "b", "a", "c", "b", "a", "c", "d"] {
        assert_eq!(text(&client, name, 12).await, expected);
    }
    // Two beside the pinned one, which are those that were asked last.
    assert_eq!(state(&client, "b").await, Asleep);
    for name in ["a", "c", "d"] {
        let found = model(&client, name).await;
        assert_eq!(found.state(), Loaded, "{name}");
        assert!(
            (10_000_000..=BOOK).contains(&found.memory_bytes),
            "{found:#?}"
        );
    }
    // All three at once, again and again: they wait for each other, and nobody fails.
    let all = (0..12).map(|n| {
        let client = client.clone();
        tokio::spawn(async move { text(&client, ["a", "b", "c"][n % 3], 12).await })
    });
    for one in all.collect::<Vec<_>>() {
        assert_eq!(one.await.unwrap(), expected);
    }
    assert_eq!(state(&client, "d").await, Loaded);
}

#[tokio::test]
async fn what_does_not_fit_is_refused_in_words_and_nothing_goes_for_it() {
    let shelf = Shelf::new(&["a", "b"]);
    let config = "[models]\na = { path = \"SHELF/a\" }\n";
    let memory = BOOK.to_string();
    let flags = ["--device-memory", &memory, "--queue-timeout", "300ms"];
    let cluster = shelf.open(config, &flags).await;
    let client = cluster.client().await.unwrap();
    becomes(&client, "a", |m| m.state() == Loaded).await;
    // A model in use stays, and who waited for its room is told so. Its cache holds one of these at a time.
    let long: Vec<_> = (0..24)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { text(&client, "a", 300).await })
        })
        .collect();
    becomes(&client, "a", |m| m.running_requests == 24).await;
    let error = run(&client, load("b", &shelf.path("b"))).await.unwrap_err();
    assert_eq!(error.reason(), Reason::Overloaded, "{error}");
    assert!(error.message().contains("no room for model b"), "{error}");
    for one in long {
        assert_eq!(one.await.unwrap().len(), 300);
    }
    // Later there is room.
    let loaded = run(&client, load("b", &shelf.path("b"))).await.unwrap();
    assert_eq!(
        (loaded.state(), state(&client, "a").await),
        (Loaded, Asleep)
    );
    drop(cluster);

    let memory = (BOOK / 2).to_string();
    let cluster = shelf.open("", &["--device-memory", &memory]).await;
    let client = cluster.client().await.unwrap();
    let error = run(&client, load("b", &shelf.path("b"))).await.unwrap_err();
    assert_eq!(error.reason(), Reason::OutOfMemory, "{error}");
    assert!(error.message().contains("does not fit"), "{error}");
    assert_eq!(state(&client, "b").await, Failed);
}

#[tokio::test]
async fn a_model_is_on_as_many_devices_as_it_is_to_be_and_moves_when_one_is_lost() {
    let shelf = Shelf::new(&["a", "b"]);
    let config = "devices = \"cpu:3\"\nrestart_budget = 2\n[models]\na = { path = \"SHELF/a\", replicas = 2 }\nb = { path = \"SHELF/b\", replicas = \"all\" }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    becomes(&client, "a", |m| m.workers.len() == 2).await;
    becomes(&client, "b", |m| m.workers.len() == 3).await;
    let expected = text(&client, "a", 12).await;
    let home = model(&client, "a").await.workers[0].clone();
    // Killed so often that its device is given up.
    let start = Instant::now();
    loop {
        let workers = client.workers().await.unwrap();
        let at = workers.iter().find(|w| w.id == home).unwrap();
        match at.state() {
            v1::WorkerState::Quarantined => break,
            v1::WorkerState::Ready => {
                // A worker of this name may be gone already.
                let _ = signal_pid(at.pid, Signal::KILL);
            }
            _ => {}
        }
        assert!(start.elapsed() < SOON, "{at:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    becomes(&client, "a", |m| {
        m.workers.len() == 2 && !m.workers.contains(&home)
    })
    .await;
    assert_eq!(text(&client, "a", 12).await, expected);
    // Fewer, and then again more.
    for replicas in [1, 2] {
        let mut again = load("a", &shelf.path("a"));
        again.serving = Some(v1::Serving {
            replicas,
            ..v1::Serving::default()
        });
        let told = run(&client, again).await.unwrap();
        assert_eq!(told.workers.len(), replicas as usize, "{told:#?}");
        assert_eq!(text(&client, "a", 12).await, expected);
    }
}

#[tokio::test]
async fn a_model_takes_the_place_of_another_under_its_streams() {
    let shelf = Shelf::new(&["a"]);
    let config = "[models]\na = { path = \"SHELF/a\", aliases = [\"best\"] }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    cluster.workers(all_have("a")).await.unwrap();
    let expected = text(&client, "a", 300).await;
    let streams: Vec<_> = ["a", "best", "a"]
        .into_iter()
        .map(|name| {
            let client = client.clone();
            tokio::spawn(async move { text(&client, name, 300).await })
        })
        .collect();
    becomes(&client, "a", |m| m.running_requests == 3).await;
    // What cannot take its place does not.
    let mut bad = load("a", &shelf.path("nothing"));
    bad.replace = true;
    let error = run(&client, bad).await.unwrap_err();
    assert_eq!(error.reason(), Reason::FileNotFound, "{error}");
    assert_eq!(client.models().await.unwrap().len(), 1);

    let mut next = load("a", &golden("gguf/llama3-q8_0.gguf"));
    next.replace = true;
    let told = run(&client, next).await.unwrap();
    let serving = told.serving.clone().unwrap();
    assert_eq!(
        (told.name.as_str(), serving.aliases),
        ("a.v2", vec!["a".to_owned(), "best".to_owned()])
    );
    assert!(told.source.ends_with("llama3-q8_0.gguf"));
    // New requests have the new one, those from before the old one, whatever happens to its worker.
    let worker = &client.workers().await.unwrap()[0];
    assert!(worker.models.contains(&"a".to_owned()), "{worker:#?}");
    signal_pid(worker.pid, Signal::KILL).unwrap();
    let new = text(&client, "best", 12).await;
    assert_ne!(new, expected[..12]);
    for stream in streams {
        assert_eq!(stream.await.unwrap(), expected);
    }
    let start = Instant::now();
    while client.models().await.unwrap().len() > 1 {
        assert!(start.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(text(&client, "a", 12).await, new);
    assert_eq!(text(&client, "", 12).await, new);
    // And back again, by its other name; what is said of it later takes no name from it that it was asked by.
    let mut back = load("best", &shelf.path("a"));
    back.replace = true;
    assert_eq!(run(&client, back).await.unwrap().name, "a.v3");
    for name in ["a", "best", "a.v3", ""] {
        assert_eq!(text(&client, name, 12).await, expected[..12], "{name}");
    }
    let mut again = load("a", &shelf.path("a"));
    again.serving = Some(v1::Serving {
        max_running: 8,
        ..v1::Serving::default()
    });
    assert_eq!(run(&client, again).await.unwrap().name, "a.v3");
    assert_eq!(text(&client, "a", 12).await, expected[..12]);
    let error = complete(&client, "best", 12).await.unwrap_err();
    assert_eq!(error, Reason::ModelNotFound);
}

#[tokio::test]
async fn a_model_that_sleeps_is_replaced_while_it_is_asked() {
    let shelf = Shelf::new(&["a", "b"]);
    let config = "[models]\na = { path = \"SHELF/a\", on_request = true, keep_alive = \"20ms\" }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    let expected = text(&client, "a", 5).await;
    // Again and again, so that it is caught asleep, on its way, and awake; without a name as well.
    let asking = tokio::spawn({
        let client = client.clone();
        async move {
            for n in 0..150 {
                let name = ["a", ""][n % 2];
                assert_eq!(text(&client, name, 5).await, expected);
                tokio::time::sleep(Duration::from_millis((n % 7 * 10) as u64)).await;
            }
        }
    });
    let mut rounds = 0;
    while !asking.is_finished() {
        let mut next = load("a", &shelf.path(["b", "a"][rounds % 2]));
        next.replace = true;
        run(&client, next).await.unwrap();
        rounds += 1;
        tokio::time::sleep(Duration::from_millis(rounds as u64 % 5 * 13)).await;
    }
    asking.await.unwrap();
    assert!(rounds > 2);
    let start = Instant::now();
    while client.models().await.unwrap().len() > 1 {
        assert!(start.elapsed() < SOON, "{:#?}", client.models().await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn streams_move_with_their_model_and_are_not_held_up_by_its_limit() {
    let shelf = Shelf::new(&["a", "b"]);
    let config = "devices = \"cpu:2\"\n[models]\na = { path = \"SHELF/a\", max_running = 2 }\nb = { path = \"SHELF/b\", replicas = 1 }\n";
    let cluster = shelf.open(config, &["--queue-timeout", "60s"]).await;
    let client = cluster.client().await.unwrap();
    becomes(&client, "a", |m| m.workers.len() == 2).await;
    let expected = text(&client, "a", 300).await;
    let streams: Vec<_> = (0..6)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { text(&client, "a", 300).await })
        })
        .collect();
    let both = |all: &[v1::WorkerInfo]| all.iter().all(|w| w.running_requests > 0);
    let workers = cluster.workers(both).await.unwrap();
    // A stream that lost its worker goes on before those that wait.
    signal_pid(workers[0].pid, Signal::KILL).unwrap();
    cluster.workers(both).await.unwrap();
    // From one of its devices it is taken while a stream runs there.
    let mut fewer = load("a", &shelf.path("a"));
    fewer.serving = Some(v1::Serving {
        replicas: 1,
        max_running: 2,
        ..v1::Serving::default()
    });
    assert_eq!(run(&client, fewer).await.unwrap().workers.len(), 1);
    for stream in streams {
        assert_eq!(stream.await.unwrap(), expected);
    }
    // Each of two that are on one device has one for itself.
    let (a, b) = (model(&client, "a").await, model(&client, "b").await);
    assert_eq!((a.workers.len(), b.workers.len()), (1, 1));
}

#[tokio::test]
async fn limits_and_names_are_a_models_own() {
    let shelf = Shelf::new(&["a", "b"]);
    let config = "[models]\na = { path = \"SHELF/a\", max_running = 1, max_context = 40 }\nb = { path = \"SHELF/b\", aliases = [\"bee\"] }\n";
    let cluster = shelf.open(config, &[]).await;
    let client = cluster.client().await.unwrap();
    becomes(&client, "a", |m| m.state() == Loaded).await;
    becomes(&client, "b", |m| m.state() == Loaded).await;
    // The prompt has some tokens of the forty.
    let short = complete(&client, "a", 30).await.unwrap();
    let cut = complete(&client, "a", 100).await.unwrap();
    assert!((31..40).contains(&cut.token_ids.len()), "{cut:#?}");
    let long = "word ".repeat(60);
    let error = client.generate(
        &*long,
        GenerateOptions {
            model: "a".to_owned(),
            ..GenerateOptions::default()
        },
    );
    let error = error.await.unwrap().complete().await.unwrap_err();
    assert_eq!(error.reason(), Reason::LimitExceeded, "{error}");
    assert_eq!(text(&client, "bee", 100).await.len(), 100);
    let all: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { text(&client, "a", 30).await })
        })
        .collect();
    becomes(&client, "a", |m| m.running_requests > 1).await;
    while !all.iter().all(tokio::task::JoinHandle::is_finished) {
        let workers = client.workers().await.unwrap();
        assert!(
            workers.iter().all(|w| w.running_requests <= 1),
            "{workers:#?}"
        );
    }
    for one in all {
        assert_eq!(one.await.unwrap(), short.token_ids);
    }
    // What is said later leaves the rest as it is.
    for arguments in [
        &["load", "b", "--max-running", "2"][..],
        &["load", "bee", "--max-context", "60"],
        &["load", "b", "--pin"],
        &["load", "b", "--pin=false", "--max-running", "0"],
    ] {
        let output = cluster.hotcell(arguments).unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    let serving = model(&client, "b").await.serving.unwrap();
    assert_eq!(
        serving,
        v1::Serving {
            aliases: vec!["bee".to_owned()],
            max_context: 60,
            ..v1::Serving::default()
        }
    );
    let error = run(
        &client,
        v1::LoadModelRequest {
            serving: Some(v1::Serving::default()),
            change: Some(v1::ServingChange::default()),
            ..load("b", &shelf.path("b"))
        },
    );
    assert_eq!(error.await.unwrap_err().reason(), Reason::InvalidArgument);
    assert_eq!(text(&client, "bee", 30).await.len(), 30);
    // A name is one model's.
    let mut taken = load("c", &shelf.path("b"));
    taken.serving = Some(v1::Serving {
        aliases: vec!["a".to_owned()],
        ..v1::Serving::default()
    });
    let error = run(&client, taken).await.unwrap_err();
    assert_eq!(error.reason(), Reason::ModelExists, "{error}");
    let mut odd = load("c", &shelf.path("b"));
    odd.serving = Some(v1::Serving {
        aliases: vec!["no name".to_owned()],
        ..v1::Serving::default()
    });
    let error = run(&client, odd).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidArgument, "{error}");
    // A further name unloads its model, and is gone with it.
    client.unload("bee").await.unwrap();
    assert_ne!(state(&client, "b").await, Loaded);
    let error = complete(&client, "bee", 3).await.unwrap_err();
    assert_eq!(error, Reason::ModelNotFound);
}

/// The weights are those that were opened, whatever has their name now.
#[tokio::test]
async fn a_models_file_may_be_replaced_by_name_renamed_or_removed() {
    let cluster = Cluster::ready().await.unwrap();
    let client = cluster.client().await.unwrap();
    let folder = cluster.folder.path().join("models");
    fs::create_dir(&folder).unwrap();
    let (path, other) = (folder.join("m.gguf"), folder.join("other.gguf"));
    fs::copy(golden("gguf/llama3-q8_0.gguf"), &path).unwrap();
    client.load("m", path.to_str().unwrap()).await.unwrap();
    let said = text(&client, "m", 8).await;
    let acts: [&dyn Fn(); 4] = [
        &|| {
            fs::write(&other, "no model at all").unwrap();
            fs::rename(&other, &path).unwrap();
        },
        &|| {
            fs::copy(golden("gguf/llama3-q8_0.gguf"), &path)
                .map(drop)
                .unwrap()
        },
        &|| fs::rename(&path, &other).unwrap(),
        &|| fs::remove_file(&other).unwrap(),
    ];
    for act in acts {
        act();
        let before = cluster.workers(all_have("m")).await.unwrap()[0].clone();
        signal_pid(before.pid, Signal::KILL).unwrap();
        let again =
            |all: &[v1::WorkerInfo]| all_have("m")(all) && all.iter().all(|w| w.pid != before.pid);
        cluster.workers(again).await.unwrap();
        assert_eq!(text(&client, "m", 8).await, said);
        assert_eq!(state(&client, "m").await, ModelState::Loaded);
    }
}
