//! Watching: what a worker does is seen from outside, costs the watched nothing but a flag, and waits for nobody.

use std::{fs, process::Command, time::Duration};

use hotcell_client::{
    Address, Client, GenerateOptions, Identity, Reason,
    tensor::{Session, SessionOptions},
    v1,
};
use hotcell_tests::{
    cluster::{Process, SOON, binaries, free_address, kjv, private_folder, signal_pid},
    fault::LIBRARY,
};
use rustix::process::Signal;

use super::{guards::at, hotcell, kjv_cluster, long};

/// Tokens that are watched.
const TOKENS: u32 = 1000;

#[tokio::test]
async fn a_watcher_sees_steps_requests_memory_and_where_plans_are() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("", every).await.unwrap();
    // As many as there can be: a fast machine draws some hundreds between two samples.
    let all = GenerateOptions {
        max_tokens: TOKENS,
        ..long("seen")
    };
    let stream = client.generate("In the beginning", all).await;
    let whole = tokio::spawn(stream.unwrap().complete());
    let (mut drawn, mut steps, mut seen, mut looks) = (0, 0, None, 0);
    let mut places: Vec<v1::NodeShare> = Vec::new();
    while drawn < u64::from(TOKENS) {
        let sample = samples.next().await.unwrap().unwrap();
        assert_eq!(sample.worker, "w0");
        assert!(sample.span_ms >= 45.0, "{}", sample.span_ms);
        let took = sample.steps.unwrap();
        // The first of them may have begun before.
        let most = sample.span_ms + took.max_ms + 5.0;
        assert!(took.computing_ms <= took.busy_ms && took.busy_ms <= most);
        assert!(took.p50_ms <= took.p99_ms && took.p99_ms <= took.max_ms);
        assert_eq!(took.missed, 0);
        (drawn, steps) = (drawn + took.drawn, steps + took.count);
        looks += sample.looks;
        let found: u32 = sample.nodes.iter().map(|node| node.seen).sum();
        assert_eq!(found, sample.looks, "{:?}", sample.nodes);
        let told: f64 = sample.nodes.iter().map(|node| node.ms).sum();
        let all = if found > 0 { took.computing_ms } else { 0.0 };
        assert!((told - all).abs() < 1e-6, "{told} of {all}");
        places.extend(sample.nodes.iter().cloned());
        if let Some(request) = sample.requests.iter().find(|r| r.request_id == "seen") {
            assert!(request.computed <= request.tokens && request.prompt_tokens > 0);
            seen = Some((request.clone(), sample.clone()));
        }
    }
    assert_eq!(drawn, u64::from(TOKENS));
    assert!((1..=drawn + 1).contains(&steps), "{steps}");
    let tokens = whole.await.unwrap().unwrap();
    assert_eq!(tokens.token_ids.len(), TOKENS as usize);
    if let Some((request, sample)) = seen {
        assert_eq!(request.model, "kjv");
        let kinds: Vec<&str> = sample.memory.iter().map(|m| m.kind.as_str()).collect();
        for kind in ["weights", "cache", "plans", "tensors", "tensors_kept"] {
            assert!(kinds.contains(&kind), "{kinds:?}");
        }
        // The processor's memory is all our own.
        assert!(!kinds.contains(&"library"), "{kinds:?}");
        assert!(
            sample
                .memory
                .iter()
                .filter(|m| !m.model.is_empty())
                .all(|m| m.bytes > 0)
        );
        assert!(looks > 0 && places.iter().any(|node| !node.op.is_empty()));
        // A layer's product, or the one that makes logits, by its name in its plan.
        let named = |node: &v1::NodeShare| {
            let part = match node.part.as_str() {
                "body" => "layers.",
                "logits" => "",
                _ => return false,
            };
            node.name.starts_with(part) && !node.name.is_empty() && node.op != node.name
        };
        assert!(places.iter().any(named), "{places:?}");
        assert!(sample.caches[0].used_blocks > 0);
    } else {
        panic!("{TOKENS} tokens were drawn between two samples");
    }
}

#[tokio::test]
async fn what_a_devices_library_holds_is_told_and_what_it_keeps_is_given_back_on_request() {
    let program = env!("CARGO_BIN_EXE_hotcell-worker-fault");
    let arguments = ["--worker-binary", program, "--devices", "cpu:1"];
    let cluster = kjv_cluster(&arguments).await;
    let client = cluster.client().await.unwrap();
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("", every).await.unwrap();
    let mut library = async || {
        let sample = samples.next().await.unwrap().unwrap();
        let bytes = |kind: &str| {
            let found = sample.memory.iter().find(|m| m.kind == kind);
            found.map(|m| m.bytes as usize)
        };
        (bytes("library"), bytes("library_kept"))
    };
    let (active, kept) = LIBRARY;
    assert_eq!(library().await, (Some(active), Some(kept)));
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    // Asking what a session holds gives nothing back.
    session.memory().await.unwrap();
    assert_eq!(library().await, (Some(active), Some(kept)));
    session.clear_cache().await.unwrap();
    // A sample may have been on its way.
    library().await;
    assert_eq!(library().await, (Some(active), Some(0)));
}

#[tokio::test]
async fn plans_that_are_made_once_and_called_often_are_counted() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("", every).await.unwrap();
    let mut plans = async || {
        // The first may have been on its way.
        samples.next().await.unwrap().unwrap();
        let tensors = samples.next().await.unwrap().unwrap().tensors.unwrap();
        (tensors.plans, tensors.compiled, tensors.executed)
    };
    assert_eq!(plans().await, (0, 0, 0));
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    let one = session.full(1.0f32, &[4]);
    one.eval().await.unwrap();
    let (_, compiled, executed) = plans().await;
    let double = session.compile(|x| vec![&x[0] + &x[0]]);
    for _ in 0..5 {
        let two = double.call_eval(std::slice::from_ref(&one)).await.unwrap();
        assert_eq!(two[0].to_vec::<f32>().await.unwrap(), [2.0; 4]);
    }
    let (held, again, calls) = plans().await;
    assert!(held > 0);
    assert_eq!((again - compiled, calls - executed), (1, 5));
    let watched = [
        "--json", "debug", "watch", "w0", "--every", "50ms", "-n", "1",
    ];
    let said: serde_json::Value = serde_json::from_str(&hotcell(&cluster, &watched)).unwrap();
    assert_eq!(said["tensors"]["executed"], calls);
    drop((session, one, double));
    let (mut held, mut counted) = (held, (0, 0));
    while held > 0 {
        let (now, compiled, executed) = plans().await;
        (held, counted) = (now, (compiled, executed));
    }
    assert_eq!(counted, (again, calls));
}

#[tokio::test]
async fn the_command_prints_a_line_or_an_object_for_each_sample() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let watch = ["debug", "watch", "w0", "--every", "50ms", "-n", "3"];
    let text = hotcell(&cluster, &watch);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    // At first it may still look over the model that it loaded.
    assert!(
        lines[0].starts_with("TIME") && lines[3].contains("idle"),
        "{text}"
    );
    let text = hotcell(&cluster, &[&["--json"], &watch[..]].concat());
    let all: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(all.len(), 3);
    assert_eq!(all[2]["worker"], "w0");
    assert!(all[0]["memory"][0]["bytes"].as_u64().unwrap() > 0);
    for (arguments, code) in [
        (["debug", "watch", "w9", "--every", "1s"], 7),
        (["debug", "watch", "w0", "--every", "1ms"], 2),
    ] {
        let output = cluster.hotcell(&arguments).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(
            said.contains("w9") || said.contains("50 to 60000 ms"),
            "{said}"
        );
    }
}

#[tokio::test]
async fn a_watcher_is_told_of_its_workers_death() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("w0", every).await.unwrap();
    samples.next().await.unwrap().unwrap();
    let pid = client.workers().await.unwrap()[0].pid;
    signal_pid(pid, Signal::KILL).unwrap();
    let ended = async {
        loop {
            if let Err(error) = samples.next().await.unwrap() {
                return error;
            }
        }
    };
    let error = tokio::time::timeout(SOON, ended).await.unwrap();
    assert_eq!(error.reason(), Reason::WorkerLost);
    assert!(error.message().contains("w0"), "{error}");
}

#[tokio::test]
async fn over_tcp_only_a_token_with_the_role_looks_into_workers_and_the_audit_log_says_who() {
    let folder = private_folder().unwrap();
    let token = |name: &str, role: &str| {
        let mut command = Command::new(binaries().unwrap().join("hotcell"));
        let output = command.args(["--json", "token", "new", name, "--role", role]);
        let output = output.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let made: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let part = |name: &str| made[name].as_str().unwrap().to_owned();
        (part("token"), part("lines"))
    };
    let (may, first) = token("may", "debug");
    let (may_not, second) = token("maynot", "use");
    let tokens = folder.path().join("tokens.toml");
    fs::write(&tokens, format!("{first}\n{second}\n")).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&tokens, private).unwrap();
    let (open, closed) = (free_address().unwrap(), free_address().unwrap());
    let audit = folder.path().join("audit.log");
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let guarded = kjv_cluster(&[
        "--devices",
        "cpu:1",
        "--listen",
        &closed.to_string(),
        "--tokens",
        &text(&tokens),
        "--audit-log",
        &text(&audit),
    ])
    .await;
    let unguarded = kjv_cluster(&["--devices", "cpu:1", "--listen", &open.to_string()]).await;
    let watch = async |address: String, token: Option<&str>| {
        let address: Address = address.parse().unwrap();
        let identity = Identity {
            token: token.map(str::to_owned),
            ..Identity::default()
        };
        let client = Client::connect_as(&address, &identity).await.unwrap();
        let mut samples = client.watch_worker("", Duration::from_millis(50)).await?;
        samples.next().await.unwrap()
    };
    let refused = |answer: Result<v1::WatchSample, _>| {
        let error: hotcell_client::Error = answer.unwrap_err();
        (error.reason(), error.message().to_owned())
    };
    watch(closed.to_string(), Some(&may)).await.unwrap();
    let (reason, _) = refused(watch(closed.to_string(), Some(&may_not)).await);
    assert_eq!(reason, Reason::PermissionDenied);
    let (reason, what) = refused(watch(open.to_string(), None).await);
    assert_eq!(reason, Reason::PermissionDenied);
    assert!(what.contains("--tokens"), "{what}");
    drop((guarded, unguarded));
    let looks = looks(&audit);
    let [watched, refused] = looks.as_slice() else {
        panic!("not two calls: {looks:?}");
    };
    assert_eq!(watched["outcome"], "watch");
    assert_eq!(watched["worker"], "w0");
    assert_eq!(watched["who"]["name"], "token may");
    assert_eq!(refused["outcome"], "refused");
    assert_eq!(refused["reason"], "PERMISSION_DENIED");
    assert_eq!(refused["who"]["name"], "token maynot");
    for line in &looks {
        assert!(line["who"]["address"].is_string(), "{line}");
    }
    assert!(
        refused["detail"].as_str().unwrap().starts_with("Watch: "),
        "{refused}"
    );
}

/// What an audit log has of those who looked into workers.
fn looks(audit: &std::path::Path) -> Vec<serde_json::Value> {
    let log = fs::read_to_string(audit).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
    lines
        .filter(|line: &serde_json::Value| line["event"] == "debug")
        .collect()
}

#[tokio::test]
async fn each_way_to_look_into_a_worker_is_in_the_audit_log() {
    let folder = private_folder().unwrap();
    let audit = folder.path().join("audit.log");
    let arguments = ["--devices", "cpu:1", "--audit-log", audit.to_str().unwrap()];
    let cluster = kjv_cluster(&arguments).await;
    let client = cluster.client().await.unwrap();
    let stream = client.generate("In the beginning", long("known")).await;
    stream.unwrap().complete().await.unwrap();
    let every = Duration::from_millis(100);
    client.watch_worker("w0", every).await.unwrap();
    client.trace_worker("w0", every, false).await.unwrap();
    client.memory("w0", 0).await.unwrap();
    let guard = at(&[], &[v1::condition::Kind::Nan(true)]);
    client.guard(guard).await.unwrap();
    let capture = v1::CaptureRequest {
        which: Some(v1::capture_request::Which::Next(true)),
        options: Some(v1::CaptureOptions {
            reveal: true,
            ..v1::CaptureOptions::default()
        }),
        ..v1::CaptureRequest::default()
    };
    client.capture(capture).await.unwrap();
    let replay = v1::ReplayRequest {
        which: Some(v1::replay_request::Which::RequestId("known".into())),
        ..v1::ReplayRequest::default()
    };
    client.replay(replay).await.unwrap();
    let unknown = v1::ReplayRequest {
        which: Some(v1::replay_request::Which::RequestId("unknown".into())),
        ..v1::ReplayRequest::default()
    };
    let said = client.replay(unknown).await.err().unwrap();
    assert!(client.crash("unknown").await.is_err());
    drop((client, cluster));
    let lines = looks(&audit);
    let log = format!("{lines:?}");
    for (call, detail) in [
        ("watch", ""),
        ("trace", "100 ms"),
        ("memory", ""),
        ("guard", "Nan"),
        ("capture", "reveal: true"),
        ("replay", "request \"known\" of kjv, reveal: false"),
    ] {
        let mut its = lines.iter().filter(|line| line["outcome"] == call);
        let line = its.next().unwrap_or_else(|| panic!("no {call}: {log}"));
        assert!(its.next().is_none(), "{call} once: {log}");
        assert!(line["who"]["uid"].is_number(), "{line}");
        assert!(
            line.to_string().replace("\\\"", "\"").contains(detail),
            "{detail}: {line}"
        );
    }
    // And what was refused, with the reason.
    let refused = lines.iter().filter(|line| line["outcome"] == "refused");
    let refused: Vec<_> = refused.collect();
    let [replay, crash] = refused.as_slice() else {
        panic!("not two: {log}");
    };
    assert_eq!(replay["reason"], said.reason().name());
    for (line, call) in [(replay, "Replay: "), (crash, "GetCrash: ")] {
        assert!(line["detail"].as_str().unwrap().starts_with(call), "{line}");
        assert!(line["who"]["uid"].is_number(), "{line}");
    }
}

#[tokio::test]
async fn a_worker_alone_is_watched_on_its_unix_socket_and_not_over_tcp() {
    let folder = private_folder().unwrap();
    let socket = folder.path().join("worker.sock");
    let tcp = free_address().unwrap();
    let unix = format!("unix:{}", socket.display());
    for (listen, may) in [(unix, true), (tcp.to_string(), false)] {
        let mut command = Command::new(binaries().unwrap().join("hotcell-worker"));
        command.args(["--listen", &listen, "--model"]).arg(kjv());
        command.args(["--log", "error"]);
        let process = Process::start(&mut command).unwrap();
        let address: Address = listen.parse().unwrap();
        let start = std::time::Instant::now();
        let client = loop {
            match Client::connect(&address).await {
                Ok(client) => break client,
                Err(error) => assert!(start.elapsed() < SOON, "{error} {}", process.log()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let watched = client.watch_worker("", Duration::from_millis(50)).await;
        match may {
            true => {
                let sample = watched.unwrap().next().await.unwrap().unwrap();
                assert_eq!(sample.worker, "w0");
                // Nobody else writes down who it was.
                let log = process.log();
                let said = log.lines().find(|line| line.contains("audit: debug"));
                let said = said.expect(&log);
                let pid = format!("pid={}", std::process::id());
                assert!(
                    said.contains("call=\"Watch\"") && said.contains(&pid),
                    "{said}"
                );
            }
            false => {
                let error = watched.unwrap_err();
                assert!(error.message().contains("Unix socket"), "{error}");
            }
        }
    }
}
