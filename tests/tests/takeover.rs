//! Another program takes a scheduler's place: streams, workers and sockets go on, and nothing changes if it cannot.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStringExt, fs::PermissionsExt, process::CommandExt},
    },
    path::Path,
    process::Output,
    time::{Duration, Instant},
};

use hotcell_client::{Client, Completion, Event, GenerateOptions, Generation, Reason, v1};
use hotcell_ipc::{
    handoff,
    memory::sealed_memory,
    spawn::{self, Spawner},
    takeover,
};
use hotcell_scheduler::{exit::Exit, takeover::STATE_VERSION};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, binaries, children, counted, kjv, lives, signal_pid},
    options::{drawn, greedy},
};
use prost::Message;
use rustix::process::Signal;

const PROMPT: &str = "In the beginning";

async fn cluster(arguments: &[&str]) -> Cluster {
    let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

async fn ask(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = cluster.takeover(arguments).unwrap();
    let ran = tokio::task::spawn_blocking(move || command.output());
    ran.await.unwrap().unwrap()
}

/// Has the scheduler replaced, and returns what was said about it.
async fn take_over(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = ask(cluster, arguments).await;
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let log = cluster.scheduler.log();
    assert!(output.status.success(), "{out}{err}\n{log}");
    out
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn refused(output: &Output, why: &str) {
    let err = text(&output.stderr);
    let code = output.status.code();
    assert_eq!(code, Some(Exit::TakeoverRefused as i32), "{err}");
    assert!(err.contains(why), "{err}");
}

/// A worker's name, its process's number and id.
type Who = (String, u64, u32);

async fn who(cluster: &Cluster) -> Vec<Who> {
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    workers
        .into_iter()
        .map(|w| (w.id, w.epoch, w.pid))
        .collect()
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < SOON, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One of each kind.
async fn kinds(client: &Client, tokens: u32) -> Vec<(&'static str, GenerateOptions)> {
    let all = complete(client, &greedy(tokens)).await;
    let start = all.text.char_indices().rev().nth(12).unwrap().0;
    let stop: String = all.text[start..].chars().take(7).collect();
    let logprobs = |options| GenerateOptions {
        logprobs: true,
        top_logprobs: 3,
        ..options
    };
    let branch = |branch| GenerateOptions {
        branch,
        ..drawn(tokens, 5)
    };
    let penalties = GenerateOptions {
        sampling: v1::Sampling {
            repetition_penalty: Some(1.2),
            presence_penalty: Some(0.3),
            frequency_penalty: Some(0.4),
            ..drawn(tokens, 0).sampling
        },
        ..drawn(tokens, 3)
    };
    vec![
        ("greedy", greedy(tokens)),
        ("sampled", drawn(tokens, 1)),
        ("sampled otherwise", drawn(tokens, 2)),
        ("penalties", penalties),
        (
            "stop",
            GenerateOptions {
                stop: vec![stop, "never in the text".into()],
                ..logprobs(greedy(tokens))
            },
        ),
        ("logprobs", logprobs(drawn(tokens, 4))),
        ("branch 1", branch(1)),
        ("branch 2", branch(2)),
    ]
}

async fn complete(client: &Client, options: &GenerateOptions) -> Completion {
    let stream = client.generate(PROMPT, options.clone()).await.unwrap();
    stream.complete().await.unwrap()
}

async fn read(stream: &mut Generation, got: &mut Vec<Event>, tokens: usize) {
    let mut count = 0;
    while count < tokens {
        let Some(event) = stream.next().await else {
            return;
        };
        got.push(event.unwrap());
        if let Some(Event::Delta(delta)) = got.last() {
            count += delta.token_ids.len();
        }
    }
}

/// Everything that came is what came in calm, and nobody died for it.
fn assert_same(got: &[Event], calm: &Completion, what: &str) {
    let (mut ids, mut words, mut logprobs, mut greeted) = (vec![], String::new(), vec![], 0);
    let mut end = None;
    for event in got {
        match event {
            Event::Accepted(accepted) => {
                greeted += 1;
                assert_eq!(accepted.prompt_ids, calm.accepted.prompt_ids, "{what}");
            }
            Event::Delta(delta) => {
                words.push_str(&delta.text);
                ids.extend_from_slice(&delta.token_ids);
                logprobs.extend_from_slice(&delta.logprobs);
            }
            Event::Finished(finished) => end = Some(finished),
        }
    }
    assert_eq!(greeted, 1, "{what}");
    assert_eq!(ids, calm.token_ids, "{what}");
    assert_eq!(words, calm.text, "{what}");
    assert_eq!(logprobs, calm.logprobs, "{what}");
    let end = end.unwrap_or_else(|| panic!("{what}: no end"));
    let calm = &calm.finished;
    assert_eq!(
        (end.reason, counted(end)),
        (calm.reason, counted(calm)),
        "{what}"
    );
    assert_eq!(end.matched_stop, calm.matched_stop, "{what}");
    assert_eq!(end.deaths_survived, 0, "{what}");
    // With the hash of the whole text.
    assert_eq!(end.receipt, calm.receipt, "{what}");
}

#[tokio::test]
async fn streams_and_workers_live_through_takeovers() {
    const TOKENS: u32 = 120;
    let cluster = cluster(&["--devices", "cpu:2"]).await;
    let client = cluster.client().await.unwrap();
    let kinds = kinds(&client, TOKENS).await;
    let mut calm = Vec::new();
    for (_, options) in &kinds {
        calm.push(complete(&client, options).await);
    }
    assert_eq!(calm[4].finished.reason(), v1::FinishReason::StopString);
    let before = who(&cluster).await;
    let pid = cluster.scheduler.pid();
    // Replaced under its path as an upgrade does: what runs is what asked, whatever is there by then.
    let (enough, mut reached) = tokio::sync::mpsc::channel(kinds.len());
    let streams: Vec<_> = kinds
        .iter()
        .map(|(_, options)| {
            let (client, options, enough) = (client.clone(), options.clone(), enough.clone());
            tokio::spawn(async move {
                let mut stream = client.generate(PROMPT, options).await.unwrap();
                let mut events = Vec::new();
                for _ in 0..2 {
                    read(&mut stream, &mut events, 8).await;
                    enough.send(()).await.unwrap();
                }
                read(&mut stream, &mut events, usize::MAX).await;
                (events, stream.returns())
            })
        })
        .collect();
    for round in 0..2 {
        for _ in &kinds {
            reached.recv().await.unwrap();
        }
        let workers = cluster.workers(|_| true).await.unwrap();
        let running: u32 = workers.iter().map(|w| w.running_requests).sum();
        assert!(round > 0 || running > 0, "all have ended already");
        let said = take_over(&cluster, &["--devices", "cpu:2"]).await;
        assert!(said.contains("2 workers live on, 0 start anew"), "{said}");
        assert_eq!(who(&cluster).await, before);
    }
    let mut returns = 0;
    for ((stream, calm), (kind, _)) in streams.into_iter().zip(&calm).zip(&kinds) {
        let (events, returned) = stream.await.unwrap();
        assert_same(&events, calm, kind);
        returns += returned;
    }
    assert!(returns > 0, "no stream had to come back");
    drop(client);

    // As many descriptors after the third time as after the first, and no child but the workers.
    let counted = async || {
        take_over(&cluster, &["--devices", "cpu:2"]).await;
        until("connections are left", || {
            let open = fs::read_to_string("/proc/net/unix").unwrap();
            let name = cluster.socket.to_str().unwrap();
            open.lines().filter(|l| l.ends_with(name)).count() == 1
        })
        .await;
        descriptors(pid)
    };
    let first = counted().await;
    counted().await;
    assert_eq!(counted().await, first);
    let mut pids: Vec<u32> = before.iter().map(|(.., pid)| *pid).collect();
    pids.sort_unstable();
    assert_eq!(children(pid).unwrap(), pids);
    let log = cluster.scheduler.log();
    assert!(!log.contains("worker died"), "{log}");

    // One that is drained stays so.
    let drained = |all: &[v1::WorkerInfo]| all[1].state() == v1::WorkerState::Drained;
    let client = cluster.client().await.unwrap();
    client.drain("w1", SOON).await.unwrap();
    take_over(&cluster, &["--devices", "cpu:2"]).await;
    cluster.workers(drained).await.unwrap();
    client.release("w1").await.unwrap();
    assert!(!drained(&cluster.workers(|_| true).await.unwrap()));
    drop(client);

    // They end with it, as ever.
    cluster.scheduler.signal(Signal::KILL).unwrap();
    until("workers outlive their scheduler", || {
        pids.iter().all(|pid| !lives(*pid))
    })
    .await;
}

#[tokio::test]
async fn sleep_names_and_a_replacement_under_way_live_through_a_takeover() {
    let cluster = cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let done = async |request: v1::LoadModelRequest| {
        let mut steps = client.load_request(request).await.unwrap();
        while let Some(step) = steps.next().await {
            step.unwrap();
        }
    };
    let other = hotcell_tests::cluster::golden("gguf/llama3-q8_0.gguf");
    let load = |name: &str| v1::LoadModelRequest {
        name: name.into(),
        path: other.to_str().unwrap().into(),
        ..v1::LoadModelRequest::default()
    };
    let serving = |keep_alive_ms, aliases: &[&str]| v1::Serving {
        keep_alive_ms,
        max_running: 3,
        aliases: aliases.iter().map(|a| (*a).to_owned()).collect(),
        ..v1::Serving::default()
    };
    done(v1::LoadModelRequest {
        on_request: true,
        serving: Some(serving(Some(600_000), &["nap"])),
        ..load("later")
    })
    .await;
    let of = |model: &str, tokens| GenerateOptions {
        model: model.into(),
        ..greedy(tokens)
    };
    let calm = complete(&client, &of("kjv", 1000)).await;
    let mut stream = client.generate(PROMPT, of("kjv", 1000)).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 5).await;
    done(v1::LoadModelRequest {
        replace: true,
        serving: Some(serving(None, &[])),
        ..load("kjv")
    })
    .await;
    let states = async || {
        let models = client.models().await.unwrap();
        let states = models.iter().map(|m| (m.name.clone(), m.state()));
        states.collect::<Vec<_>>()
    };
    let all = |old: &[(&str, v1::ModelState)]| {
        let own = [
            ("kjv.v2", v1::ModelState::Loaded),
            ("later", v1::ModelState::Asleep),
        ];
        let all = old.iter().chain(&own);
        all.map(|(name, state)| ((*name).to_owned(), *state))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        states().await,
        all(&[("kjv", v1::ModelState::Retiring)]),
        "the stream has ended already"
    );
    take_over(&cluster, &[]).await;
    read(&mut stream, &mut events, usize::MAX).await;
    assert_same(&events, &calm, "a stream of a model that retires");
    let start = std::time::Instant::now();
    while states().await != all(&[]) {
        assert!(start.elapsed() < SOON, "{:?}", states().await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let models = client.models().await.unwrap();
    assert_eq!(models[0].serving, Some(serving(None, &["kjv"])));
    assert_eq!(models[1].serving, Some(serving(Some(600_000), &["nap"])));
    // And once more, now that the old one is gone.
    let said = take_over(&cluster, &["--models", &format!("kjv={}", kjv().display())]).await;
    assert!(said.contains("1 workers live on"), "{said}");
    assert_eq!(states().await, all(&[]));
    let new = complete(&client, &of("kjv", 9)).await.token_ids;
    assert_ne!(new, calm.token_ids[..9]);
    assert_eq!(complete(&client, &of("nap", 9)).await.token_ids, new);
}

#[tokio::test]
async fn a_finished_stream_waits_for_its_client_in_the_next_program() {
    let cluster = cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let calm = complete(&client, &drawn(24, 9)).await;
    let own = GenerateOptions {
        request_id: "mine".into(),
        ..drawn(24, 9)
    };
    let mut stream = client.generate(PROMPT, own.clone()).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 5).await;
    drop((stream, client));
    let idle = |w: &[v1::WorkerInfo]| w.iter().all(|w| w.running_requests == 0);
    cluster.workers(idle).await.unwrap();
    take_over(&cluster, &[]).await;
    let client = cluster.client().await.unwrap();
    let mut stream = client.attach("mine", 5, None).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Event::Accepted(_)))));
    read(&mut stream, &mut events, usize::MAX).await;
    assert_same(&events, &calm, "the rest");
    // It is still not run twice, and its id not another's.
    let again = complete(&client, &own).await;
    assert_eq!(again.finished.timings, stream_end(&events).timings);
    let differs = GenerateOptions {
        max_tokens: 3,
        ..own
    };
    let error = client.generate(PROMPT, differs).await.unwrap_err();
    assert_eq!(error.reason(), Reason::RequestExists);
}

fn stream_end(events: &[Event]) -> &v1::Finished {
    match events.last() {
        Some(Event::Finished(finished)) => finished,
        other => panic!("ends with {other:?}"),
    }
}

#[tokio::test]
async fn a_worker_that_does_not_answer_is_started_anew_and_its_stream_goes_on() {
    let cluster = cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let options = drawn(60, 7);
    let calm = complete(&client, &options).await;
    let (_, epoch, pid) = who(&cluster).await.remove(0);
    let mut stream = client.generate(PROMPT, options).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 3).await;
    signal_pid(pid, Signal::STOP).unwrap();
    let said = take_over(&cluster, &[]).await;
    assert!(said.contains("0 workers live on, 1 start anew"), "{said}");
    read(&mut stream, &mut events, usize::MAX).await;
    assert_same(&events, &calm, "continued");
    let (_, now, _) = who(&cluster).await.remove(0);
    assert_eq!(now, epoch + 1);
    until("it was not reaped", || {
        !Path::new(&format!("/proc/{pid}")).exists()
    })
    .await;
}

/// What the command would ask for with these arguments.
fn request(args: Vec<Vec<u8>>) -> v1::TakeoverRequest {
    v1::TakeoverRequest {
        version: STATE_VERSION,
        args,
        env: Vec::new(),
        drain_ms: 0,
    }
}

/// Asks for another program than the one that asks, and returns why it was refused.
async fn problem(cluster: &Cluster, request: v1::TakeoverRequest, program: OwnedFd) -> String {
    let path = handoff::path_beside(&cluster.socket);
    let message = request.encode_to_vec();
    let asked = move || takeover::ask(&path, &message, program.as_fd(), SOON);
    let answer = tokio::task::spawn_blocking(asked).await.unwrap().unwrap();
    let answer = v1::TakeoverResponse::decode(&answer[..]).unwrap();
    assert_eq!(answer.pid, 0);
    answer.problem
}

#[tokio::test]
async fn a_program_that_cannot_take_over_changes_nothing() {
    let cluster = cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let options = drawn(200, 3);
    let calm = complete(&client, &options).await;
    let before = who(&cluster).await;
    let mut stream = client.generate(PROMPT, options).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 2).await;

    let open = |path: &Path| OwnedFd::from(File::open(path).unwrap());
    let socket = cluster.socket.clone().into_os_string().into_vec();
    let args = |name: &[u8]| vec![name.to_vec(), b"--socket".to_vec(), socket.clone()];
    let script = cluster.folder.path().join("script");
    fs::write(&script, "#!/bin/sh\nexit 0\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    for (program, why) in [
        (Path::new("/bin/false"), "ends with exit code 1"),
        (Path::new("/bin/true"), "ends with exit code 0"),
        (Path::new("/etc/passwd"), "cannot be tried"),
        (&script, "the new program"),
    ] {
        let said = problem(&cluster, request(args(b"x")), open(program)).await;
        assert!(said.contains(why), "{}: {said}", program.display());
    }
    let own = binaries().unwrap().join("hotcell-scheduler");
    // It says what it should, and then the system refuses it: the longest argument has 128 KiB.
    let long = request(args(&[b'x'; 200_000]));
    let said = problem(&cluster, long, open(&own)).await;
    assert!(said.contains("cannot be executed"), "{said}");
    let other = v1::TakeoverRequest {
        version: STATE_VERSION + 1,
        ..request(args(b"x"))
    };
    let said = problem(&cluster, other, open(&own)).await;
    assert!(said.contains("restart the scheduler"), "{said}");
    // Its settings are wrong: the command says so itself; asked for by another, so does the program.
    let wrong = ask(&cluster, &["--restart-budget", "0"]).await;
    assert_eq!(wrong.status.code(), Some(Exit::Usage as i32));
    let wrong = [args(b"x"), vec![b"--restart-budget=0".to_vec()]].concat();
    let said = problem(&cluster, request(wrong), open(&own)).await;
    assert!(said.contains("ends with exit code 2"), "{said}");
    // Only the same user may; root alone can try as somebody else.
    if rustix::process::geteuid().is_root() {
        let folder = cluster.folder.path();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        let door = handoff::path_beside(&cluster.socket);
        fs::set_permissions(&door, fs::Permissions::from_mode(0o666)).unwrap();
        let mut stranger = cluster.takeover(&[]).unwrap();
        stranger.uid(65_534);
        match stranger.output() {
            Ok(output) => refused(&output, "only the user that runs the scheduler"),
            // Where the build lies, strangers may not go.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
        }
    }

    let mut rest = Vec::new();
    read(&mut stream, &mut rest, 4).await;
    assert_eq!(stream.returns(), 0, "the connection broke");
    events.extend(rest);
    assert_eq!(who(&cluster).await, before);
    take_over(&cluster, &[]).await;
    read(&mut stream, &mut events, usize::MAX).await;
    assert_same(&events, &calm, "in the end");
    assert_eq!(who(&cluster).await, before);
}

/// The TCP ports that it said it serves on, one for each program.
fn ports(cluster: &Cluster) -> Vec<String> {
    let log = cluster.scheduler.log();
    let serving = log.lines().filter(|l| l.contains("serving on "));
    let port = |l: &str| l.rsplit(':').next().map(str::to_owned);
    serving.filter_map(port).collect()
}

#[tokio::test]
async fn streams_may_end_first_and_a_port_stays_the_same() {
    let arguments = ["--listen", "127.0.0.1:0"];
    let cluster = cluster(&arguments).await;
    let client = cluster.client().await.unwrap();
    let mut stream = client.generate(PROMPT, greedy(60)).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 2).await;
    let drain = ["--listen", "127.0.0.1:0", "--takeover-drain", "30s"];
    let (said, ()) = tokio::join!(take_over(&cluster, &drain), async {
        read(&mut stream, &mut events, usize::MAX).await;
    });
    assert!(said.contains("1 workers live on"), "{said}");
    assert_eq!(stream_end(&events).reason(), v1::FinishReason::MaxTokens);
    assert_eq!(stream.returns(), 0, "it was cut short");
    let ports = ports(&cluster);
    assert_eq!(ports.len(), 2, "{ports:?}");
    assert_eq!(ports[0], ports[1]);
    let address = format!("http://127.0.0.1:{}", ports[1]).parse().unwrap();
    Client::connect(&address).await.unwrap();
}

#[tokio::test]
async fn nobody_answers_where_no_scheduler_is() {
    let cluster = cluster(&[]).await;
    let socket = cluster.folder.path().join("none.sock");
    let mut command = cluster.takeover(&[]).unwrap();
    command.arg("--socket").arg(&socket);
    // The last of two is taken, or both are refused: either way nothing happens.
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let mut command = std::process::Command::new(binaries().unwrap().join("hotcell-scheduler"));
    let output = command
        .arg("--takeover")
        .arg("--socket")
        .arg(&socket)
        .output();
    refused(&output.unwrap(), "no scheduler answers");
    who(&cluster).await;
}

/// States that no scheduler wrote, or that name what is not there.
fn garbage() -> Vec<(&'static str, OwnedFd)> {
    let sealed = |bytes: &[u8]| sealed_memory("garbage", bytes).unwrap();
    let state = v1::TakeoverState {
        version: STATE_VERSION,
        protocol_version: hotcell_proto::PROTOCOL_VERSION,
        asker: 77,
        doors: vec![v1::HeldDoor {
            kind: v1::DoorKind::Unix.into(),
            address: b"/elsewhere".to_vec(),
            listener: 78,
            lock: 1,
        }],
        models: vec![v1::HeldModel {
            name: "ghost".into(),
            files: vec![v1::HeldFile {
                name: "config.json".into(),
                descriptor: 79,
                ..v1::HeldFile::default()
            }],
            ..v1::HeldModel::default()
        }],
        workers: vec![v1::HeldWorker {
            id: "w0".into(),
            epoch: 3,
            deaths: 2,
            link: Some(v1::HeldLink {
                // Nobody's child but the system's.
                pid: 1,
                control: 0,
                tokens: -1,
                ..v1::HeldLink::default()
            }),
            ..v1::HeldWorker::default()
        }],
        streams: vec![v1::HeldStream {
            request: Some(v1::GenerateRequest {
                request_id: "../../x".into(),
                ..v1::GenerateRequest::default()
            }),
            first_tokens: u64::MAX,
            deltas: vec![v1::Delta {
                token_ids: vec![1],
                ..v1::Delta::default()
            }],
            ..v1::HeldStream::default()
        }],
        ..v1::TakeoverState::default()
    };
    let later = v1::TakeoverState {
        version: STATE_VERSION + 7,
        ..state.clone()
    };
    let crowded = v1::TakeoverState {
        devices: vec![v1::Device::default(); 65],
        ..state.clone()
    };
    let file = tempfile::tempfile().unwrap();
    vec![
        ("an open file", file.into()),
        ("noise", sealed(&[0xff; 100])),
        ("a later version", sealed(&later.encode_to_vec())),
        ("too many devices", sealed(&crowded.encode_to_vec())),
        ("what is not there", sealed(&state.encode_to_vec())),
    ]
}

#[tokio::test]
async fn what_is_no_state_is_not_believed() {
    let spawner = Spawner::start().unwrap();
    let program = binaries().unwrap().join("hotcell-scheduler");
    for (what, memory) in garbage() {
        let folder = hotcell_tests::cluster::private_folder().unwrap();
        let socket = folder.path().join("s.sock");
        let mut command = spawn::Command::new(&program)
            .arg("--socket")
            .arg(&socket)
            .env("XDG_CONFIG_HOME", folder.path())
            .env(takeover::STATE_VARIABLE, "30")
            .fd(memory, 30)
            // Of no use to anybody, so that it is closed.
            .fd(File::open("/dev/null").unwrap().into(), 31);
        command.stderr = spawn::Output::Null;
        let mut child = spawner.spawn_blocking(command).unwrap();
        let address = format!("unix:{}", socket.display()).parse().unwrap();
        let start = Instant::now();
        let workers = loop {
            assert!(child.try_wait().unwrap().is_none(), "{what}: it ended");
            assert!(start.elapsed() < SOON, "{what}");
            if let Ok(client) = Client::connect(&address).await {
                let workers = client.workers().await.unwrap();
                if workers.iter().any(|w| w.state() == v1::WorkerState::Ready) {
                    break workers;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert_eq!(workers.len(), 1, "{what}");
        // Its number may be another file's by now.
        let there = std::fs::read_link(format!("/proc/{}/fd/31", child.pid()));
        assert!(
            there.is_err() || there.unwrap() != Path::new("/dev/null"),
            "{what}"
        );
        child.kill(Signal::TERM).unwrap();
        let ended = child.wait().await.unwrap();
        assert!(ended.success(), "{what}: {ended}");
    }
}

#[tokio::test]
async fn a_changed_configuration_changes_how_models_that_live_on_are_served() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let file = folder.path().join("scheduler.toml");
    let path = kjv();
    let write = |first: &str, second: &str| {
        let path = path.to_str().unwrap();
        let text = format!(
            "[models]\nkjv = {{ path = {path:?}, {first} }}\nsecond = {{ path = {path:?}, {second} }}\n"
        );
        fs::write(&file, text).unwrap();
    };
    write("max_running = 2, pinned = true", "max_running = 3");
    let config = ["--config", file.to_str().unwrap(), "--devices", "cpu:1"];
    let cluster = Cluster::start(&config).await.unwrap();
    let both = |all: &[v1::WorkerInfo]| all_have("kjv")(all) && all_have("second")(all);
    let before = cluster.workers(both).await.unwrap();
    // Said since then, and not by the configuration.
    let said = cluster
        .hotcell(&["load", "second", "--max-context", "50"])
        .unwrap();
    assert!(said.status.success(), "{said:?}");
    let first = "max_running = 5, max_context = 40, aliases = [\"book\"]";
    write(first, "max_running = 3");
    take_over(&cluster, &config).await;
    let client = cluster.client().await.unwrap();
    let models = client.models().await.unwrap();
    let serving = |name: &str| {
        let model = models.iter().find(|model| model.name == name);
        model.unwrap().serving.clone().unwrap()
    };
    let told = v1::Serving {
        max_running: 5,
        max_context: 40,
        aliases: vec!["book".into()],
        ..v1::Serving::default()
    };
    assert_eq!(serving("kjv"), told);
    let told = v1::Serving {
        max_running: 3,
        max_context: 50,
        ..v1::Serving::default()
    };
    assert_eq!(serving("second"), told);
    let after = cluster.workers(both).await.unwrap();
    assert_eq!(after[0].pid, before[0].pid);
    let of = GenerateOptions {
        model: "book".into(),
        ..greedy(100)
    };
    let tokens = complete(&client, &of).await.token_ids.len();
    assert!((31..40).contains(&tokens), "{tokens}");
}
