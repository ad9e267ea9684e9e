//! What looking into a worker promises: what it computed comes again to the bit, whoever looks changes nothing for anybody
//! else, and leaves nothing behind.

use std::{
    collections::BTreeSet,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Client, Event, GenerateOptions, Prompt, Reason,
    control::Messages,
    debug::{Recorded, Recorder, Recording, compare},
    v1::{self, capture_request, condition::Kind, replay_request},
};
use hotcell_tests::{
    chance::Chance,
    cluster::{Cluster, Process, SOON, all_have, binaries, private_folder, signal_pid},
    synthetic::{self, Measures},
};
use rustix::process::Signal;
use tokio::time::timeout;

use super::{guards::at, hotcell, kjv_cluster, long};

/// A model small enough to start a worker with it a hundred times.
const TINY: Measures = Measures {
    hidden: 64,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    inner: 128,
    vocab: 4096,
    context: 256,
    tied: true,
};

const REQUESTS: usize = 100;
/// Requests at once.
const WAVE: usize = 10;
/// Waves under which the worker dies.
const DEATHS: [usize; 3] = [2, 5, 8];

fn logits() -> Option<v1::CaptureOptions> {
    Some(v1::CaptureOptions {
        only_logits: true,
        reveal: true,
        ..v1::CaptureOptions::default()
    })
}

/// A worker without a scheduler, which runs requests again by itself.
struct Alone {
    client: Client,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl Alone {
    async fn start(model: &Path) -> Self {
        let folder = private_folder().unwrap();
        let address = format!("unix:{}", folder.path().join("worker.sock").display());
        let mut command = Command::new(binaries().unwrap().join("hotcell-worker"));
        command.args(["--listen", &address, "--model"]).arg(model);
        let process = Process::start(&mut command).unwrap();
        let address: Address = address.parse().unwrap();
        let begun = Instant::now();
        let client = loop {
            match Client::connect(&address).await {
                Ok(client) => break client,
                Err(error) => assert!(begun.elapsed() < SOON, "{error} {}", process.log()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        Self {
            client,
            _process: process,
            _folder: folder,
        }
    }
}

/// What was told of a request so far.
#[derive(Default)]
struct Told {
    recorder: Recorder,
    tokens: Vec<Recorded>,
}

impl Told {
    /// Takes in all messages until their end, or until the worker is gone.
    async fn hear(&mut self, messages: &mut Messages<v1::Captured>) {
        while let Some(Ok(message)) = messages.next().await {
            self.tokens.extend(self.recorder.push(message).unwrap());
        }
    }

    fn recording(self) -> Option<Recording> {
        Some(Recording {
            head: self.recorder.head()?.clone(),
            end: self.recorder.end().cloned(),
            tokens: self.tokens,
            ..Recording::default()
        })
    }
}

/// A request as nobody would write it: its prompt, how it is sampled, its length.
fn random(chance: &mut Chance, number: usize) -> (Prompt, GenerateOptions) {
    // Some begin alike, so that they share what was read.
    let mut ids: Vec<u32> = (0..20 * chance.below(2) as u32).map(|n| 300 + n).collect();
    ids.extend((0..=chance.below(30)).map(|_| 3 + chance.below(4090) as u32));
    let options = GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some([0.0, 0.7, 1.3][chance.below(3)]),
            top_p: Some([1.0, 0.9][chance.below(2)]),
            repetition_penalty: Some([1.0, 1.2][chance.below(2)]),
            ..v1::Sampling::default()
        },
        seed: Some(chance.number()),
        max_tokens: 20 + chance.below(80) as u32,
        ignore_eos: true,
        request_id: format!("random-{number}"),
        deadline: Some(SOON * 3),
        ..GenerateOptions::default()
    };
    (Prompt::Ids(ids), options)
}

/// A request that was served, and what was seen of it.
#[derive(Clone)]
struct Served {
    tokens: Vec<u32>,
    deaths: u32,
    parts: Vec<Recording>,
}

/// Serves a request and looks at its logits, on each worker that it has. Counts its tokens in `drawn`.
async fn serve(
    client: Client,
    (prompt, options): (Prompt, GenerateOptions),
    drawn: Arc<AtomicUsize>,
) -> Served {
    let id = options.request_id.clone();
    let look = v1::CaptureRequest {
        which: Some(capture_request::Which::RequestId(id)),
        options: logits(),
        ..v1::CaptureRequest::default()
    };
    let mut told = client.capture(look.clone()).await.unwrap();
    let mut stream = client.generate(prompt, options).await.unwrap();
    let mut stream = tokio::spawn(async move {
        let mut tokens = Vec::new();
        loop {
            match stream.next().await.unwrap().unwrap() {
                Event::Accepted(_) => {}
                Event::Delta(delta) => {
                    drawn.fetch_add(delta.token_ids.len(), Ordering::Relaxed);
                    tokens.extend(delta.token_ids);
                }
                Event::Finished(finished) => return (tokens, finished.deaths_survived),
            }
        }
    });
    let mut parts = Vec::new();
    let (tokens, deaths) = loop {
        let mut part = Told::default();
        let over = tokio::select! {
            () = part.hear(&mut told) => None,
            over = &mut stream => Some(over.unwrap()),
        };
        if over.is_some() {
            // What was computed is on its way; of a look that began after the end nothing is.
            let _ = timeout(SOON / 60, part.hear(&mut told)).await;
        }
        let whole = part.recorder.end().is_some();
        parts.extend(part.recording());
        if let Some(over) = over {
            break over;
        }
        if whole {
            break stream.await.unwrap();
        }
        // The worker died: whoever takes its place is looked at as soon as it is there.
        told = loop {
            match client.capture(look.clone()).await {
                Ok(told) => break told,
                Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        };
    };
    Served {
        tokens,
        deaths,
        parts,
    }
}

/// Runs a request again, and compares every row that was seen of it.
async fn comes_again(client: Client, served: Served) -> usize {
    let Served { tokens, parts, .. } = &served;
    let mut request = parts[0].head.request.clone().unwrap();
    // The only one.
    request.model.clear();
    let request = v1::ReplayRequest {
        which: Some(replay_request::Which::Request(request)),
        options: logits(),
        expected: tokens.clone(),
        ..v1::ReplayRequest::default()
    };
    let mut again = Told::default();
    again.hear(&mut client.replay(request).await.unwrap()).await;
    let again = again.recording().unwrap();
    let end = again.end.clone().unwrap();
    assert_eq!(
        (end.as_expected, end.differs_at),
        (tokens.len() as u64, None)
    );
    let mut rows = 0;
    for part in parts {
        for token in &part.tokens {
            assert_eq!(token.token, Some(tokens[token.index as usize]));
        }
        let compared = compare(&again, part);
        assert_eq!(compared.first, None);
        assert_eq!(compared.same, part.tokens.len());
        rows += compared.rows;
    }
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_random_requests_give_the_very_logits_again() {
    let folder = tempfile::tempdir().unwrap();
    synthetic::write(folder.path(), &TINY).unwrap();
    let arguments = ["--devices", "cpu:1"];
    let cluster = Cluster::with_model("tiny", folder.path(), &arguments).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("tiny")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let mut chance = Chance::new(17);
    let mut all = Vec::new();
    for wave in 0..REQUESTS / WAVE {
        let dies = DEATHS.contains(&wave);
        let drawn = Arc::new(AtomicUsize::new(0));
        let mut running = Vec::new();
        for number in 0..WAVE {
            let (prompt, mut options) = random(&mut chance, wave * WAVE + number);
            // Long enough to be seen on both workers.
            options.max_tokens += u32::from(dies) * 100;
            let one = serve(client.clone(), (prompt, options), Arc::clone(&drawn));
            running.push(tokio::spawn(one));
        }
        if dies {
            let worker = &cluster.workers(|_| true).await.unwrap()[0];
            while drawn.load(Ordering::Relaxed) < 20 * WAVE {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            signal_pid(worker.pid, Signal::KILL).unwrap();
        }
        for one in running {
            all.push(one.await.unwrap());
        }
    }
    assert_eq!(all.len(), REQUESTS);
    let survived = all.iter().filter(|one| one.deaths > 0).count();
    assert!(survived > 10, "{survived} of the requests were continued");
    let epochs = all.iter().flat_map(|one| &one.parts);
    let epochs: BTreeSet<u64> = epochs.map(|part| part.head.epoch).collect();
    assert_eq!(epochs.len(), DEATHS.len() + 1, "{epochs:?}");
    let both = all.iter().filter(|one| one.parts.len() > 1).count();
    assert!(both > 5, "{both} were seen on both of their workers");
    let tokens: usize = all.iter().map(|one| one.tokens.len()).sum();
    // A few of those that were continued in throw-away workers; the others side by side in one that is alone, which takes no process for each.
    let worker = Alone::start(folder.path()).await;
    all.sort_by_key(|one| std::cmp::Reverse(one.deaths));
    let (thrown_away, others) = all.split_at(4);
    let mut rows = 0;
    for (client, some) in std::iter::once((&client, thrown_away))
        .chain(others.chunks(8).map(|some| (&worker.client, some)))
    {
        let again = |one: &Served| tokio::spawn(comes_again(client.clone(), one.clone()));
        for one in some.iter().map(again).collect::<Vec<_>>() {
            rows += one.await.unwrap();
        }
    }
    // What was computed between a death and the next look was not seen.
    assert!(rows * 2 > tokens, "{rows} rows of {tokens} tokens");
}

/// Ways to look, and how much was told in each.
#[derive(Default)]
struct Looks([AtomicUsize; 5]);

impl Looks {
    fn count(&self, way: usize) {
        self.0[way].fetch_add(1, Ordering::Relaxed);
    }
}

/// Somebody who looks at a worker in every way at once.
struct Looker {
    client: Client,
    watch: Messages<v1::WatchSample>,
    trace: Messages<v1::TracePiece>,
    capture: Messages<v1::Captured>,
    guard: Messages<v1::GuardEvent>,
}

fn everything() -> v1::CaptureOptions {
    v1::CaptureOptions {
        reveal: true,
        values: u32::MAX,
        ..v1::CaptureOptions::default()
    }
}

impl Looker {
    /// Begins to look, also at a request with this ID, which is best asked after that: it may be over in a moment.
    async fn begin(client: Client, id: &str) -> Self {
        let watch = client.watch_worker("w0", Duration::from_millis(50)).await;
        let trace = client.trace_worker("w0", Duration::from_secs(60), true);
        let trace = trace.await;
        let capture = v1::CaptureRequest {
            which: Some(capture_request::Which::RequestId(id.to_owned())),
            options: Some(everything()),
            ..v1::CaptureRequest::default()
        };
        let capture = client.capture(capture).await;
        let guard = client.guard(at(&[], &[Kind::Above(0.0)])).await;
        Self {
            client,
            watch: watch.unwrap(),
            trace: trace.unwrap(),
            capture: capture.unwrap(),
            guard: guard.unwrap(),
        }
    }

    /// Counts what is told, and has the request run again and again, until it is aborted.
    async fn look(mut self, id: String, looks: Arc<Looks>) {
        let replays = async {
            loop {
                let replay = v1::ReplayRequest {
                    which: Some(replay_request::Which::RequestId(id.clone())),
                    options: Some(everything()),
                    // However busy the machine is that this test runs on.
                    hurry: true,
                    ..v1::ReplayRequest::default()
                };
                let mut again = Told::default();
                again
                    .hear(&mut self.client.replay(replay).await.unwrap())
                    .await;
                let again = again.recording().unwrap();
                assert!(!again.tokens.is_empty());
                assert_eq!(again.end.unwrap().differs_at, None);
                looks.count(4);
            }
        };
        let mut replays = std::pin::pin!(replays);
        loop {
            tokio::select! {
                sample = self.watch.next() => { sample.unwrap().unwrap(); looks.count(0); }
                Some(piece) = self.trace.next() => { piece.unwrap(); looks.count(1); }
                Some(told) = self.capture.next() => { told.unwrap(); looks.count(2); }
                hit = self.guard.next() => { hit.unwrap().unwrap(); looks.count(3); }
                () = &mut replays => {}
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_looks_in_every_way_at_once_changes_nobodys_tokens() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let ask = async |number: u32, id: String| {
        let options = GenerateOptions {
            sampling: v1::Sampling {
                temperature: Some(0.8),
                ..v1::Sampling::default()
            },
            seed: Some(number.into()),
            max_tokens: 100,
            deadline: Some(SOON * 2),
            ..long(&id)
        };
        let prompt = Prompt::Ids(vec![0, 312, 300 + 17 * number, 17]);
        client.generate(prompt, options).await.unwrap()
    };
    let mut expected = Vec::new();
    for number in 0..4 {
        let calm = ask(number, String::new()).await;
        expected.push(calm.complete().await.unwrap().token_ids);
    }
    let looker = Looker::begin(client.clone(), "mine").await;
    let of_the_debugger = ask(9, "mine".into()).await;
    let looks = Arc::new(Looks::default());
    let looking = tokio::spawn(looker.look("mine".into(), Arc::clone(&looks)));
    let replaying = |all: &[v1::WorkerInfo]| all.iter().any(|w| w.id.contains(".replay"));
    cluster.workers(replaying).await.unwrap();
    let mut others = Vec::new();
    for number in 0..4 {
        others.push(tokio::spawn(ask(number, String::new()).await.complete()));
    }
    for (other, expected) in others.into_iter().zip(&expected) {
        assert_eq!(&other.await.unwrap().unwrap().token_ids, expected);
    }
    of_the_debugger.complete().await.unwrap();
    let begun = Instant::now();
    while looks.0.iter().any(|way| way.load(Ordering::Relaxed) == 0) {
        assert!(begun.elapsed() < SOON, "{:?}", looks.0);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!looking.is_finished(), "{:?}", looking.await);
    looking.abort();
    // Nobody looks any more, and nothing is left of it.
    let alone = cluster.workers(|all| all.len() == 1).await.unwrap();
    assert_eq!((alone[0].epoch, alone[0].deaths), (1, 0));
}

/// Starts the command on a request, with these further flags.
fn capturing(cluster: &Cluster, id: &str, file: &Path, flags: &[&str]) -> Process {
    let mut command = hotcell_tests::cluster::hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "debug", "capture", id, "-o"]);
    Process::start(command.arg(file).args(flags)).unwrap()
}

async fn until_waiting(capture: &Process) {
    let begun = Instant::now();
    while !capture.log().contains("waiting") {
        assert!(begun.elapsed() < SOON, "{}", capture.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_debugger_that_is_killed_leaves_no_file_and_holds_up_nobody() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let asked = |id: &str| GenerateOptions {
        max_tokens: 120,
        ..long(id)
    };
    let calm = client.generate("And God said", asked("calm")).await;
    let expected = calm.unwrap().complete().await.unwrap().token_ids;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("half.hotcell");
    for (round, id) in ["first", "second", "third"].into_iter().enumerate() {
        let mut capture = capturing(&cluster, id, &file, &["--values", "all", "--reveal"]);
        until_waiting(&capture).await;
        let stream = client.generate("And God said", asked(id)).await;
        let mut stream = stream.unwrap();
        // In the middle of it: before, after, and while the first tokens come.
        for _ in 0..round * 3 {
            stream.next().await.unwrap().unwrap();
        }
        signal_pid(capture.pid(), Signal::KILL).unwrap();
        capture.wait().unwrap();
        let whole = stream.complete().await.unwrap().token_ids;
        assert_eq!(whole, expected[expected.len() - whole.len()..]);
        assert!(whole.len() >= 60, "{}", whole.len());
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 0, "{id}");
    }
    // The worker has forgotten them: others may look.
    let said = {
        let mut capture = capturing(&cluster, "last", &file, &["-n", "2"]);
        until_waiting(&capture).await;
        let stream = client.generate("And God said", long("last")).await.unwrap();
        assert!(capture.wait().unwrap().success(), "{}", capture.log());
        stream.cancel().await;
        std::fs::metadata(&file).unwrap().len()
    };
    assert!(said > 0);
    // Killed while it writes: a file that has no name yet goes with its process.
    let mut again = 0;
    let begun = Instant::now();
    while again < 3 && begun.elapsed() < SOON {
        let path = folder.path().join(format!("killed-{again}.hotcell"));
        let id = format!("killed-{again}");
        let mut capture = capturing(&cluster, &id, &path, &["-n", "40", "--values", "all"]);
        until_waiting(&capture).await;
        let stream = client.generate("And God said", long(&id)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150 + 100 * again)).await;
        let _ = signal_pid(capture.pid(), Signal::KILL);
        capture.wait().unwrap();
        stream.cancel().await;
        let files: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|f| f.unwrap().path())
            .collect();
        // Whole, or not there.
        for file in files {
            assert!(file.extension().is_some_and(|e| e == "hotcell"), "{file:?}");
            Recording::read(&file).unwrap();
        }
        again += 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_stays_within_its_budget_says_so_and_tells_no_prompt() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let file = cluster.folder.path().join("small.hotcell");
    let flags = ["--values", "all", "--max-bytes", "30000", "-n", "3"];
    let mut command = hotcell_tests::cluster::hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "debug", "capture", "asked", "-o"]);
    command.arg(&file).args(flags);
    let capture = tokio::task::spawn_blocking(move || command.output().unwrap());
    // Also one that came before somebody looks is looked at.
    let stream = client.generate("In the beginning", long("asked")).await;
    let stream = stream.unwrap();
    let output = capture.await.unwrap();
    stream.cancel().await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.contains("rows were left out") && said.contains("beyond the budget"),
        "{said}"
    );
    let kept = Recording::read(&file).unwrap();
    let rows = || kept.tokens.iter().flat_map(|token| &token.nodes);
    let bytes: usize = rows().map(|row| row.data.len()).sum();
    assert!((1..=30_000).contains(&bytes), "{bytes}");
    let end = kept.end.clone().unwrap();
    assert!(end.left_out > 0 && end.left_out_bytes > 100_000, "{end:?}");
    // Rows that follow from the token alone would tell it: of these there is no more than what is wrong with them.
    let named = kept.head.nodes.iter().zip(&kept.tokens[0].nodes);
    let (hidden, told): (Vec<_>, Vec<_>) = named.partition(|(_, row)| row.hash.is_empty());
    let names: Vec<&str> = hidden.iter().map(|(node, _)| node.name.as_str()).collect();
    assert!(
        names.iter().any(|name| name.contains("get_rows")),
        "{names:?}"
    );
    for (node, row) in hidden {
        assert!(!node.name.starts_with("layers.1."), "{}", node.name);
        assert!(row.data.is_empty() && row.rms == 0.0 && row.zero == 0);
    }
    assert!(told.len() > 40, "{}", told.len());
    // The same again, and none of these rows is taken for equal or different.
    let same = hotcell(
        &cluster,
        &[
            "debug",
            "compare",
            file.to_str().unwrap(),
            file.to_str().unwrap(),
        ],
    );
    let due = told.len() * 3;
    assert!(same.contains(&format!("same bits: {due} rows")), "{same}");
    let dumped = hotcell(
        &cluster,
        &[
            "debug",
            "dump",
            file.to_str().unwrap(),
            "--items",
            "4",
            "--edge-items",
            "2",
            "--precision",
            "2",
        ],
    );
    assert!(dumped.contains(", layers.0."), "{dumped}");
    assert!(dumped.contains(", ..., "), "{dumped}");
    let none = cluster
        .hotcell(&["debug", "dump", file.to_str().unwrap(), "--node", "logits"])
        .unwrap();
    let said = String::from_utf8(none.stderr).unwrap();
    assert!(said.contains("no values of such nodes"), "{said}");
    let odd = client.memory("w0", 999).await.unwrap_err();
    assert_eq!(odd.reason(), Reason::LimitExceeded);
}
