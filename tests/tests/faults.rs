//! Every way in which the fault worker breaks: who notices, what is told about it, and what goes on.
//!
//! Two workers, one stream each. One is ordered to break: the other's stream must not notice, the scheduler must answer
//! meanwhile, the report must tell what happened, and the stream that lost its worker goes on with the very same tokens.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::time::{Duration, Instant};

use hotcell_client::{
    Client, Completion, Event, GenerateOptions, Generation, Prompt, Reason,
    tensor::{Session, SessionOptions},
    v1,
};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, counted, golden, kjv},
    fault::{Fault, POISON},
};
use tokio::time::{sleep, timeout};

/// How long the scheduler may take to answer while a worker breaks. Generous: a busy machine is no fault.
const PROMPT: Duration = Duration::from_secs(5);

const PROMPTS: [&str; 2] = ["In the beginning", "And it came to pass"];

async fn house(more: &[&str]) -> Cluster {
    let mut arguments = vec![
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
        "--devices",
        "cpu:2",
        "--hang-timeout",
        "3s",
    ];
    arguments.extend(more);
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster
        .workers(|all| all.len() == 2 && all_have("kjv")(all))
        .await
        .unwrap();
    cluster
}

/// Sampled, so that a stream's ids depend on all that it must remember.
fn options(index: usize, id: &str) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            ..v1::Sampling::default()
        },
        seed: Some(index as u64),
        max_tokens: 600,
        ignore_eos: true,
        request_id: id.to_owned(),
        deadline: Some(SOON),
        ..GenerateOptions::default()
    }
}

/// Both streams at once, one on each worker.
async fn undisturbed(client: &Client) -> Vec<Completion> {
    let one = client.generate(PROMPTS[0], options(0, "")).await.unwrap();
    let two = client.generate(PROMPTS[1], options(1, "")).await.unwrap();
    let (one, two) = tokio::join!(one.complete(), two.complete());
    vec![one.unwrap(), two.unwrap()]
}

/// A stream whose first tokens have come.
struct Begun {
    stream: Generation,
    ids: Vec<u32>,
}

impl Begun {
    async fn new(client: &Client, prompt: &'static str, options: GenerateOptions) -> Self {
        let mut stream = client.generate(prompt, options).await.unwrap();
        let mut ids = Vec::new();
        while ids.len() < 3 {
            if let Event::Delta(delta) = stream.next().await.unwrap().unwrap() {
                ids.extend(delta.token_ids);
            }
        }
        Self { stream, ids }
    }

    async fn finish(mut self) -> (Vec<u32>, v1::Finished) {
        loop {
            match self.stream.next().await.unwrap().unwrap() {
                Event::Delta(delta) => self.ids.extend(delta.token_ids),
                Event::Finished(finished) => return (self.ids, finished),
                Event::Accepted(_) => panic!("accepted twice"),
            }
        }
    }
}

fn worker<'a>(all: &'a [v1::WorkerInfo], id: &str) -> &'a v1::WorkerInfo {
    all.iter().find(|w| w.id == id).unwrap()
}

/// Has w0 break while both workers have a stream, and returns how often the streams lost a worker.
async fn break_amid(cluster: &Cluster, fault: Fault) -> u32 {
    let client = cluster.client().await.unwrap();
    let calm = undisturbed(&client).await;
    let before = client.workers().await.unwrap();
    let mut streams = Vec::new();
    for (index, prompt) in PROMPTS.into_iter().enumerate() {
        let id = format!("{fault:?}-{index}");
        streams.push(Begun::new(&client, prompt, options(index, &id)).await);
    }
    let placed = client.workers().await.unwrap();
    assert!(
        placed.iter().all(|w| w.running_requests == 1),
        "{placed:#?}"
    );
    fault.order(worker(&before, "w0").pid).unwrap();
    let mut survived = 0;
    let answers = async {
        // The scheduler answers all the while.
        loop {
            timeout(PROMPT, client.workers()).await.unwrap().unwrap();
            sleep(Duration::from_millis(20)).await;
        }
    };
    let ends = async {
        for (stream, calm) in streams.into_iter().zip(&calm) {
            let (ids, finished) = stream.finish().await;
            assert_eq!(ids, calm.token_ids);
            assert_eq!(counted(&finished), counted(&calm.finished));
            survived += finished.deaths_survived;
        }
    };
    tokio::select! {
        () = ends => {}
        () = answers => {}
    }
    let after = client.workers().await.unwrap();
    let (calm, now) = (worker(&before, "w1"), worker(&after, "w1"));
    assert_eq!((now.pid, now.epoch, now.deaths), (calm.pid, calm.epoch, 0));
    survived
}

/// The report of w0's first death, once it tells what became of the request that ran there.
async fn report(client: &Client) -> v1::CrashReport {
    let start = Instant::now();
    loop {
        let crashes = client.crashes().await.unwrap();
        if let Some(crash) = crashes.iter().find(|c| c.id == "w0.1")
            && crash.requests.iter().all(|r| !r.outcome.is_empty())
        {
            return client.crash("w0.1").await.unwrap();
        }
        assert!(start.elapsed() < SOON, "{crashes:#?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// w0 breaks, one stream goes on elsewhere, w0 comes back. Returns the report.
async fn dies_of(cluster: &Cluster, fault: Fault, kind: &str) -> v1::CrashReport {
    assert_eq!(break_amid(cluster, fault).await, 1, "deaths survived");
    let client = cluster.client().await.unwrap();
    let report = report(&client).await;
    assert_eq!(report.kind, kind, "{}", report.reason);
    let [request] = &report.requests[..] else {
        panic!("{:#?}", report.requests);
    };
    assert!(request.request_id.starts_with(&format!("{fault:?}-")));
    assert!(request.generated >= 3);
    assert!(
        request.outcome.starts_with("continued on w"),
        "{}",
        request.outcome
    );
    let back = |all: &[v1::WorkerInfo]| all_have("kjv")(all) && worker(all, "w0").epoch == 2;
    let workers = cluster.workers(back).await.unwrap();
    let w0 = worker(&workers, "w0");
    assert_eq!((w0.deaths, w0.last_exit_kind.as_str()), (1, kind));
    report
}

/// What was running is named by the black box.
fn names_the_request(report: &v1::CrashReport) {
    let seen = report.blackbox.as_ref().unwrap();
    assert_eq!(
        (seen.doing.as_str(), seen.model.as_str()),
        ("stepping", "kjv")
    );
    let [running] = &seen.running[..] else {
        panic!("{seen:#?}");
    };
    assert_eq!(running.request_id, report.requests[0].request_id);
}

fn signal(report: &v1::CrashReport) -> (String, usize) {
    let seen = report.blackbox.as_ref().unwrap();
    let signal = seen.signal.as_ref().unwrap();
    (signal.name.clone(), signal.frames.len())
}

#[tokio::test]
async fn a_segmentation_fault_is_named_with_its_place() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Segfault, "signal").await;
    assert!(
        report.reason.starts_with("killed by SIGSEGV"),
        "{}",
        report.reason
    );
    names_the_request(&report);
    let (name, frames) = signal(&report);
    assert!(name == "SIGSEGV" && frames > 0, "{name}, {frames} frames");
    assert_eq!(report.blackbox.unwrap().signal.unwrap().address, 8);
}

#[tokio::test]
async fn an_abort_is_a_signal() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Abort, "signal").await;
    assert!(
        report.reason.starts_with("killed by SIGABRT"),
        "{}",
        report.reason
    );
    names_the_request(&report);
    assert_eq!(signal(&report).0, "SIGABRT");
}

#[tokio::test]
async fn an_exit_that_says_all_is_well_is_not_believed() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::ExitZero, "exit").await;
    assert!(
        report.reason.contains("nobody had asked it to"),
        "{}",
        report.reason
    );
    names_the_request(&report);
}

#[tokio::test]
async fn a_panic_in_the_engine_leaves_its_words() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Panic, "signal").await;
    names_the_request(&report);
    let seen = report.blackbox.unwrap();
    assert!(seen.error.contains("ordered to"), "{}", seen.error);
}

#[tokio::test]
async fn a_kernel_that_hangs_is_killed_and_shown_where() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::HangInKernel, "wedged").await;
    assert!(report.reason.contains("no progress"), "{}", report.reason);
    names_the_request(&report);
    assert!(
        signal(&report).1 > 0,
        "no backtrace of the thread that hung"
    );
}

/// Out of memory, by the allocator's own last words.
fn ran_out_of_memory(report: &v1::CrashReport) {
    assert!(
        report.reason.starts_with("probably out of memory")
            && report.reason.contains("memory allocation of "),
        "{}",
        report.reason
    );
    names_the_request(report);
    let (name, frames) = signal(report);
    assert!(name == "SIGABRT" && frames > 0, "{name}, {frames} frames");
}

#[tokio::test]
async fn a_worker_that_takes_all_memory_is_out_of_memory_and_nobody_else_is() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Exhaust, "out_of_memory").await;
    ran_out_of_memory(&report);
}

#[tokio::test]
async fn a_leak_ends_the_worker_that_leaks() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Leak, "out_of_memory").await;
    ran_out_of_memory(&report);
    let seen = report.blackbox.unwrap();
    assert!(seen.steps > 3, "it died at once: {} steps", seen.steps);
}

#[tokio::test]
async fn a_load_that_hangs_costs_the_worker_and_not_the_streams_nor_the_model() {
    // Only a load's own bound ends it: an engine that loads may stand still for longer than one that steps.
    let cluster = house(&["--start-timeout", "4s"]).await;
    let client = cluster.client().await.unwrap();
    let calm = undisturbed(&client).await;
    let before = client.workers().await.unwrap();
    let mut streams = Vec::new();
    for (index, prompt) in PROMPTS.into_iter().enumerate() {
        let id = format!("load-{index}");
        streams.push(Begun::new(&client, prompt, options(index, &id)).await);
    }
    Fault::HangInLoad.order(worker(&before, "w0").pid).unwrap();
    let model = golden("llama2");
    let load = client.load("second", model.to_str().unwrap());
    let ends = async {
        let mut survived = 0;
        for (stream, calm) in streams.into_iter().zip(&calm) {
            let (ids, finished) = stream.finish().await;
            assert_eq!(ids, calm.token_ids);
            survived += finished.deaths_survived;
        }
        survived
    };
    let (loaded, survived) = tokio::join!(load, ends);
    loaded.unwrap();
    assert!(survived <= 1, "{survived} deaths");
    let report = report(&client).await;
    assert_eq!(report.kind, "deadline", "{}", report.reason);
    assert!(
        report
            .reason
            .contains("while loading second: no progress for 4s"),
        "{}",
        report.reason
    );
    let seen = report.blackbox.as_ref().unwrap();
    assert_eq!(
        (seen.doing.as_str(), seen.model.as_str()),
        ("loading", "second")
    );
    assert!(signal(&report).1 > 0, "no backtrace of the load that hung");
    for model in ["kjv", "second"] {
        cluster.workers(all_have(model)).await.unwrap();
    }
    let after = client.workers().await.unwrap();
    let (calm, now) = (worker(&before, "w1"), worker(&after, "w1"));
    assert_eq!((now.pid, now.deaths), (calm.pid, 0));
    assert_eq!(worker(&after, "w0").deaths, 1);
}

#[tokio::test]
async fn garbage_on_the_control_connection_ends_the_worker_that_says_it() {
    let cluster = house(&[]).await;
    // The scheduler hangs up, and a worker without a scheduler ends.
    let report = dies_of(&cluster, Fault::GarbageOnControl, "exit").await;
    assert!(
        report.reason.contains("nobody had asked it to"),
        "{}",
        report.reason
    );
}

#[tokio::test]
async fn wrong_numbers_are_found_out_cost_the_process_and_then_the_device() {
    let cluster = house(&["--check-interval", "100ms", "--check-share", "1"]).await;
    let client = cluster.client().await.unwrap();
    let calm = undisturbed(&client).await;
    let before = client.workers().await.unwrap();
    Fault::WrongNumbers
        .order(worker(&before, "w0").pid)
        .unwrap();
    let report = report(&client).await;
    assert_eq!(report.kind, "corrupt", "{}", report.reason);
    assert!(
        report.reason.contains("model kjv")
            && report
                .reason
                .contains("s before, and what it computed since then is in doubt"),
        "{}",
        report.reason
    );
    let back = |all: &[v1::WorkerInfo]| all_have("kjv")(all) && worker(all, "w0").epoch == 2;
    let workers = cluster.workers(back).await.unwrap();
    // Whoever serves from now on is right again.
    exact_on_both(&client, &calm).await;

    Fault::WrongNumbers
        .order(worker(&workers, "w0").pid)
        .unwrap();
    let out = |all: &[v1::WorkerInfo]| worker(all, "w0").state() == v1::WorkerState::Quarantined;
    let workers = cluster.workers(out).await.unwrap();
    let w0 = worker(&workers, "w0");
    assert_eq!((w0.deaths, w0.last_exit_kind.as_str()), (2, "corrupt"));
    let again = undisturbed(&client).await;
    assert!(
        again
            .iter()
            .zip(&calm)
            .all(|(a, b)| a.token_ids == b.token_ids)
    );

    let released = cluster.hotcell(&["release", "w0"]).unwrap();
    assert!(released.status.success(), "{released:?}");
    let back = |all: &[v1::WorkerInfo]| all_have("kjv")(all) && worker(all, "w0").epoch == 3;
    let workers = cluster.workers(back).await.unwrap();
    exact_on_both(&client, &calm).await;
    let (calm, now) = (worker(&before, "w1"), worker(&workers, "w1"));
    assert_eq!((now.pid, now.epoch, now.deaths), (calm.pid, calm.epoch, 0));
}

/// A stream on each worker, at once.
async fn exact_on_both(client: &Client, calm: &[Completion]) {
    let mut streams = Vec::new();
    for (index, prompt) in PROMPTS.into_iter().enumerate() {
        streams.push(Begun::new(client, prompt, options(index, "")).await);
    }
    for (stream, calm) in streams.into_iter().zip(calm) {
        assert_eq!(stream.finish().await.0, calm.token_ids);
    }
}

#[tokio::test]
async fn a_standby_that_hung_up_takes_no_place() {
    let arguments = [
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
        "--standby",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let complete = |all: &[v1::WorkerInfo]| {
        let count = |state| all.iter().filter(|w| w.state() == state).count();
        (
            count(v1::WorkerState::Ready),
            count(v1::WorkerState::Standby),
        ) == (1, 1)
    };
    let before = cluster.workers(complete).await.unwrap();
    let client = cluster.client().await.unwrap();
    let short = || GenerateOptions {
        max_tokens: 150,
        ..options(0, "")
    };
    let calm = client.generate(PROMPTS[0], short()).await.unwrap();
    let calm = calm.complete().await.unwrap();
    Fault::CloseTokens
        .order(worker(&before, "w0.standby").pid)
        .unwrap();
    let stream = Begun::new(&client, PROMPTS[0], short()).await;
    Fault::Segfault.order(worker(&before, "w0").pid).unwrap();
    let (ids, finished) = stream.finish().await;
    assert_eq!((ids, finished.deaths_survived), (calm.token_ids, 1));
    let after = cluster.workers(complete).await.unwrap();
    let w0 = worker(&after, "w0");
    assert_eq!((w0.epoch, w0.deaths), (2, 1));
    assert_ne!(w0.pid, worker(&before, "w0.standby").pid);
    let report = client.crash("w0.standby.1").await.unwrap();
    assert_eq!(report.kind, "protocol", "{}", report.reason);
    assert!(
        report.reason.contains("token connection"),
        "{}",
        report.reason
    );
}

#[tokio::test]
async fn a_black_box_of_garbage_harms_nobody_and_is_reported_as_such() {
    let cluster = house(&[]).await;
    assert_eq!(break_amid(&cluster, Fault::ScribbleBlackBox).await, 0);
    let client = cluster.client().await.unwrap();
    // Idle, in a state that there is not: whoever watches it has to take it for hung.
    let workers = client.workers().await.unwrap();
    Fault::ScribbleBlackBox
        .order(worker(&workers, "w0").pid)
        .unwrap();
    let report = report(&client).await;
    assert_eq!(report.kind, "wedged", "{}", report.reason);
    assert!(report.blackbox.is_none() && !report.blackbox_problem.is_empty());
    cluster.workers(all_have("kjv")).await.unwrap();
}

#[tokio::test]
async fn garbage_instead_of_tokens_is_a_broken_protocol() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::GarbageOnTokens, "protocol").await;
    assert!(
        report.reason.contains("token connection"),
        "{}",
        report.reason
    );
}

#[tokio::test]
async fn a_worker_that_hangs_up_is_replaced() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::CloseTokens, "protocol").await;
    assert!(
        report.reason.contains("token connection"),
        "{}",
        report.reason
    );
}

#[tokio::test]
async fn a_late_answer_is_an_answer() {
    let cluster = house(&[]).await;
    assert_eq!(break_amid(&cluster, Fault::Late).await, 0);
    let client = cluster.client().await.unwrap();
    assert!(client.crashes().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_full_log_holds_up_nobody_and_is_kept_short() {
    let cluster = house(&[]).await;
    assert_eq!(break_amid(&cluster, Fault::FillLog).await, 0);
    let client = cluster.client().await.unwrap();
    let workers = client.workers().await.unwrap();
    Fault::Segfault.order(worker(&workers, "w0").pid).unwrap();
    // What has a stream on each worker finds the one that was told.
    undisturbed(&client).await;
    let report = report(&client).await;
    assert!(report.log.len() <= hotcell_proto::limits::KEPT_LOG_LINES);
    assert!(report.log.iter().any(|line| line.starts_with("line ")));
    for line in &report.log {
        assert!(line.len() <= hotcell_proto::limits::MAX_LOG_LINE + 16);
        assert!(!line.contains('\x1b'), "{line:?}");
    }
    let said = cluster.scheduler.log();
    let passed = said.lines().filter(|l| l.contains(" is red ")).count();
    assert!(
        passed < 20_000,
        "{passed} lines of a worker in the scheduler's log"
    );
}

#[tokio::test]
async fn a_worker_that_spins_on_all_cores_starves_nobody() {
    let cluster = house(&[]).await;
    assert_eq!(break_amid(&cluster, Fault::Spin).await, 0);
}

#[tokio::test]
async fn a_fork_is_a_forbidden_system_call() {
    let cluster = house(&[]).await;
    let report = dies_of(&cluster, Fault::Fork, "exit").await;
    assert!(
        report.reason.contains("forbidden system call"),
        "{}",
        report.reason
    );
    let seen = report.blackbox.unwrap();
    assert!(seen.error.contains("clone"), "{}", seen.error);
}

#[tokio::test]
async fn wrong_handles_are_nobody_elses_handles() {
    let cluster = house(&[]).await;
    let client = cluster.client().await.unwrap();
    let sessions = [open(&client).await, open(&client).await];
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    for session in &sessions {
        let tensor = session.tensor(&values, &[64]).unwrap();
        assert_eq!(tensor.to_vec::<f32>().await.unwrap(), values);
    }
    for info in client.workers().await.unwrap() {
        Fault::LieAboutHandles.order(info.pid).unwrap();
    }
    let liar = open(&client).await;
    let tensor = liar.tensor(&values, &[64]).unwrap();
    let got = timeout(SOON, async { (&tensor + 1.0).to_vec::<f32>().await });
    match got.await.unwrap() {
        // It did not need to name anything that it was told.
        Ok(got) => assert_eq!(got[1], 2.0),
        Err(error) => assert_ne!(error.reason(), Reason::Internal, "{error}"),
    }
    let calm = undisturbed(&client).await;
    assert_eq!(calm.len(), 2);
    let workers = client.workers().await.unwrap();
    assert!(workers.iter().all(|w| w.deaths == 0), "{workers:#?}");
}

async fn open(client: &Client) -> Session {
    Session::over(client, SessionOptions::default())
        .await
        .unwrap()
}

#[tokio::test]
async fn a_request_that_kills_whoever_computes_it_is_poison_and_others_go_on() {
    let cluster = house(&[]).await;
    let client = cluster.client().await.unwrap();
    let calm = undisturbed(&client).await;
    let mut streams = Vec::new();
    for (index, prompt) in PROMPTS.into_iter().enumerate() {
        streams.push(Begun::new(&client, prompt, options(index, &format!("good-{index}"))).await);
    }
    let prompt = Prompt::Ids(POISON.iter().chain(&[300, 301]).copied().collect());
    let evil = client.generate(prompt, options(9, "evil")).await.unwrap();
    let error = evil.complete().await.unwrap_err();
    assert_eq!(error.reason(), Reason::RequestPoisoned, "{error}");
    assert!(error.message().contains("evil"), "{error}");
    for (stream, calm) in streams.into_iter().zip(&calm) {
        assert_eq!(stream.finish().await.0, calm.token_ids);
    }
    cluster
        .workers(|all| all.len() == 2 && all_have("kjv")(all))
        .await
        .unwrap();
}
