//! Tensor sessions that were opened to go on after a loss, while their workers, and the scheduler, are killed.
//!
//! What a script of calls gives must be the same bytes whenever and however often the worker dies under it, nothing may stay
//! behind on the worker, and what cannot be made again must be refused by name.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    process::Command,
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Reason,
    tensor::{
        Backend, BackendParams, Cache, CacheSpec, DType, HostTensor, PagedOptions, Pages, Recovery,
        Session, SessionOptions, Tensor, TensorFile,
    },
    v1,
};
use hotcell_tests::{
    cluster::{Cluster, Process, SOON, all_have, binaries, kjv, signal_pid},
    fault::Fault,
};
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

/// Workers that die often and come back at once.
const RESTARTS: [&str; 6] = [
    "--restart-budget",
    "1000",
    "--restart-backoff",
    "1ms",
    "--restart-backoff-max",
    "20ms",
];

fn address(cluster: &Cluster) -> Address {
    format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap()
}

fn is_ready(workers: &[v1::WorkerInfo]) -> bool {
    !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
}

async fn cluster() -> Cluster {
    let cluster = Cluster::start(&RESTARTS).await.unwrap();
    cluster.workers(is_ready).await.unwrap();
    cluster
}

async fn fault_cluster() -> Cluster {
    let mut arguments = RESTARTS.to_vec();
    arguments.extend([
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
    ]);
    let cluster = Cluster::start(&arguments).await.unwrap();
    cluster.workers(is_ready).await.unwrap();
    cluster
}

fn options(relayed: bool) -> SessionOptions {
    SessionOptions {
        relayed,
        recovery: Some(Recovery {
            patience: SOON,
            ..Recovery::default()
        }),
        ..SessionOptions::default()
    }
}

async fn session(cluster: &Cluster, relayed: bool) -> Session {
    let session = Session::open(&address(cluster), options(relayed))
        .await
        .unwrap();
    assert_eq!(session.is_direct(), !relayed);
    session
}

/// The process of a session's worker.
async fn pid(cluster: &Cluster, session: &Session) -> u32 {
    let worker = session.describe().await.unwrap().worker;
    let epoch = session.epoch();
    let mut found = None;
    let seen = |all: &[v1::WorkerInfo]| all.iter().any(|w| w.id == worker && w.epoch == epoch);
    for info in cluster.workers(seen).await.unwrap() {
        if info.id == worker {
            found = Some(info.pid);
        }
    }
    found.unwrap()
}

/// Whether a process has ended, though it may not have been reaped.
fn is_gone(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('Z'),
        Err(_) => true,
    }
}

/// Kills a session's worker and waits until it is dead.
async fn kill(cluster: &Cluster, session: &Session) {
    let pid = pid(cluster, session).await;
    kill_pid(pid).await;
}

async fn kill_pid(pid: u32) {
    signal_pid(pid, Signal::KILL).unwrap();
    let start = Instant::now();
    while !is_gone(pid) {
        assert!(start.elapsed() < SOON);
        sleep(Duration::from_millis(1)).await;
    }
}

async fn bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.fetch().await.unwrap().bytes().to_vec()
}

/// Waits until a session holds so many tensors on its worker; what was dropped is reported a moment later.
async fn holds(session: &Session, tensors: u32) {
    let start = Instant::now();
    loop {
        let memory = session.memory().await.unwrap();
        if memory.tensors == tensors {
            return;
        }
        assert!(start.elapsed() < SOON, "{tensors} tensors: {memory:?}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Kills the worker before the call of this number.
struct Killer<'a> {
    cluster: &'a Cluster,
    at: Option<usize>,
    next: usize,
}

impl Killer<'_> {
    async fn pass(&mut self, session: &Session) {
        if self.at == Some(self.next) {
            kill(self.cluster, session).await;
        }
        self.next += 1;
    }
}

/// A session's life with a bit of everything. Returns the bytes of all it made, and how many bytes what it holds in the
/// end has.
async fn life(session: &Session, killer: &mut Killer<'_>) -> (Vec<Vec<u8>>, u64) {
    let mut all = Vec::new();
    session.set_cache_limit(0).await.unwrap();
    killer.pass(session).await;
    let small = session.tensor(&[1.0f32, -2.0, 3.0, 0.5], &[2, 2]).unwrap();
    let large: Vec<f32> = (0..100_000).map(|i| (i as f32).sqrt()).collect();
    let large = HostTensor::from_slice(&large, &[100, 1000]).unwrap();
    let uploaded = session.upload(&large).await.unwrap();
    killer.pass(session).await;
    let key = session.random_key(7);
    let noise = key.random_normal(&[100, 1000], 0.0, 1.0);
    let sum = &uploaded + &noise;
    let both = [sum.clone(), noise.exp()];
    session.eval(&both).await.unwrap();
    killer.pass(session).await;
    all.push(bytes(&sum).await);
    killer.pass(session).await;
    // What these were made of is dropped.
    let [sum, noise] = both;
    drop((uploaded, key));
    let lease = session
        .keep(&[sum.clone(), &sum.softmax(-1) * 2.0])
        .await
        .unwrap();
    killer.pass(session).await;
    let layer = session.compile(|a| vec![a[0].matmul(&a[1]).tanh(), &a[1] + 1.0]);
    let mut value = small.clone();
    for _ in 0..3 {
        let results = layer
            .call_eval(&[value.clone(), small.clone()])
            .await
            .unwrap();
        killer.pass(session).await;
        value = results[0].clone();
        all.push(bytes(&results[1]).await);
    }
    let rows = session.compile_shapeless(|a| vec![(&a[0] * 0.1).softmax(-1)]);
    for n in [3, 5] {
        let argument = session.arange(0.0, n as f64 * 4.0, 1.0, DType::F32);
        let result = rows.call_eval(&[argument.reshape(&[n, 4])]).await.unwrap();
        killer.pass(session).await;
        all.push(bytes(&result[0]).await);
    }
    let zeros = session.empty(DType::I64, &[5]).await.unwrap();
    let (one, two) = (session.stream(), session.stream());
    let later = &noise * 3.0;
    one.async_eval(std::slice::from_ref(&later)).await.unwrap();
    killer.pass(session).await;
    // That a wait is one at all: `a_stream_waits_for_an_event_of_the_session_it_is_in_now`.
    two.wait(&one.record()).unwrap();
    let last = later.sum(&[0], false);
    two.eval(std::slice::from_ref(&last)).await.unwrap();
    killer.pass(session).await;
    one.synchronize().await.unwrap();
    session.async_eval(&[&last - 1.0]).await.unwrap();
    killer.pass(session).await;
    session.synchronize().await.unwrap();
    let mut pipeline = session.pipeline().await.unwrap();
    let mut pending = Vec::new();
    for i in 0..6 {
        if i == 3 {
            killer.pass(session).await;
        }
        let arguments = [value, small.clone()];
        let call = pipeline.call(&layer, &arguments);
        let call = call.await.unwrap();
        value = call.results[0].clone();
        pending.push(call);
    }
    for call in pending {
        call.wait().await.unwrap();
    }
    killer.pass(session).await;
    assert_eq!(
        session.weights("none").await.unwrap_err().reason(),
        Reason::ModelNotFound
    );
    for tensor in [&value, &zeros, &last, &noise, &sum, &later] {
        all.push(bytes(tensor).await);
    }
    drop((lease, later, pipeline));
    killer.pass(session).await;
    for tensor in [&value, &zeros, &last, &noise, &sum] {
        all.push(bytes(tensor).await);
    }
    holds(session, 5).await;
    let memory = session.memory().await.unwrap();
    assert_eq!((memory.cache_limit, memory.cache), (0, 0));
    let held = session.list().await.unwrap().tensors;
    (all, held.iter().map(|t| t.bytes).sum())
}

#[tokio::test]
async fn a_session_gives_the_same_bytes_before_whichever_call_its_worker_is_killed() {
    let cluster = cluster().await;
    for relayed in [false, true] {
        let undisturbed = session(&cluster, relayed).await;
        let mut nobody = Killer {
            cluster: &cluster,
            at: None,
            next: 0,
        };
        let expected = life(&undisturbed, &mut nobody).await;
        assert_eq!(undisturbed.recoveries(), 0);
        for at in 0..nobody.next {
            let session = session(&cluster, relayed).await;
            let epoch = session.epoch();
            let mut killer = Killer {
                cluster: &cluster,
                at: Some(at),
                next: 0,
            };
            let got = life(&session, &mut killer).await;
            assert!(
                got == expected,
                "relayed: {relayed}, killed before {at}: {got:?}"
            );
            assert_eq!(session.recoveries(), 1, "killed before {at}");
            assert!(session.epoch() > epoch);
        }
    }
}

#[tokio::test]
async fn a_thousand_calls_survive_three_deaths() {
    let cluster = cluster().await;
    let run = async |deaths: &[usize]| {
        let session = session(&cluster, false).await;
        let step = session.compile(|a| vec![(&a[0] * 1.001 + &a[1]).sin()]);
        let with = session.random_key(3).random_normal(&[64], 0.0, 1.0);
        let mut value = session.tensor(&[0.5f32; 64], &[64]).unwrap();
        for i in 0..1000 {
            if deaths.contains(&i) {
                kill(&cluster, &session).await;
            }
            let results = step.call_eval(&[value, with.clone()]).await.unwrap();
            value = results[0].clone();
        }
        let bytes = bytes(&value).await;
        // The last value and the noise: nothing of what was made again on the way.
        holds(&session, 2).await;
        assert_eq!(session.recoveries(), deaths.len() as u64);
        bytes
    };
    assert_eq!(run(&[250, 251, 900]).await, run(&[]).await);
}

#[tokio::test]
async fn a_worker_that_breaks_within_a_call_has_it_done_again_elsewhere() {
    let cluster = fault_cluster().await;
    for relayed in [false, true] {
        let session = session(&cluster, relayed).await;
        let x = session.random_key(1).random_uniform(&[300, 300], 0.0, 1.0);
        let step = session.compile(|a| vec![a[0].matmul(&a[0]).softmax(-1)]);
        let once = step.call_eval(std::slice::from_ref(&x)).await.unwrap();
        let twice = step.call_eval(&once).await.unwrap();
        let expected = bytes(&twice[0]).await;
        for (deaths, fault) in [Fault::Segfault, Fault::Abort, Fault::ExitZero]
            .into_iter()
            .enumerate()
        {
            fault.order(pid(&cluster, &session).await).unwrap();
            // It strikes in the midst of this.
            let again = step.call_eval(&once).await.unwrap();
            assert_eq!(session.recoveries(), deaths as u64 + 1, "{fault:?}");
            assert_eq!(bytes(&again[0]).await, expected);
            let lazy = x.matmul(&x).softmax(-1);
            assert_eq!(bytes(&lazy).await, bytes(&once[0]).await);
        }
    }
}

#[tokio::test]
async fn large_transfers_and_queued_work_go_on_whenever_the_worker_is_killed() {
    let cluster = cluster().await;
    let size = 64 << 20;
    let data: Vec<u8> = (0..size as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let data = HostTensor::from_slice(&data, &[size]).unwrap();
    let flipped: Vec<u8> = data.bytes().iter().map(|b| 255 - b).collect();
    for relayed in [false, true] {
        let session = session(&cluster, relayed).await;
        let mut deaths = 0;
        let mut own = vec![0; size];
        for delay in [0, 5, 25] {
            let delay = Duration::from_millis(delay);
            // An upload.
            let victim = pid(&cluster, &session).await;
            let killer = tokio::spawn(async move {
                sleep(delay).await;
                kill_pid(victim).await;
            });
            let there = session.upload(&data).await.unwrap();
            killer.await.unwrap();
            let not = 255.0 - &there;
            not.eval().await.unwrap();
            deaths += 1;
            assert_eq!(session.recoveries(), deaths);
            // A download of it.
            let victim = pid(&cluster, &session).await;
            let killer = tokio::spawn(async move {
                sleep(delay).await;
                kill_pid(victim).await;
            });
            own.fill(0);
            not.fetch_into(&mut own).await.unwrap();
            assert!(own == flipped, "killed after {delay:?}");
            killer.await.unwrap();
            assert_eq!(there.fetch().await.unwrap(), data);
            deaths += 1;
            assert_eq!(session.recoveries(), deaths);
            // Work that is queued and that nobody waits for.
            let queued = &there.cast(DType::F32) * 0.5;
            session
                .async_eval(&[queued.clone(), &queued + 1.0])
                .await
                .unwrap();
            sleep(delay).await;
            kill(&cluster, &session).await;
            let sum = queued
                .cast(DType::U8)
                .equal(&there.right_shift(&session.scalar(1u8)));
            assert!(sum.all(&[], false).item::<bool>().await.unwrap());
            deaths += 1;
            assert_eq!(session.recoveries(), deaths);
        }
    }
}

#[tokio::test]
async fn a_stream_waits_for_an_event_of_the_session_it_is_in_now() {
    let cluster = cluster().await;
    for relayed in [false, true] {
        let session = session(&cluster, relayed).await;
        let (one, two) = (session.stream(), session.stream());
        let state = async || {
            let list = session.list().await.unwrap();
            let long = list.tensors.iter().find(|t| t.bytes == 512 * 512 * 4);
            long.unwrap().state()
        };
        // Products that take a good while, node after node, and that nothing else reads.
        let long = || {
            let x = session.full(1.0f32 / 512.0, &[512, 512]);
            (0..200).fold(x.clone(), |product, _| product.matmul(&x))
        };
        let waits = |x: f32| session.full(x, &[]) + 1.0;
        let lost = long();
        one.async_eval(std::slice::from_ref(&lost)).await.unwrap();
        let event = one.record();
        kill(&cluster, &session).await;
        // What the lost session queued is never done there: an event of it has passed.
        two.wait(&event).unwrap();
        let first = waits(1.0);
        timeout(SOON, two.eval(std::slice::from_ref(&first)))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(first.item::<f32>().await.unwrap(), 2.0);
        assert_eq!(session.recoveries(), 1);
        drop(lost);
        let product = long();
        one.async_eval(std::slice::from_ref(&product))
            .await
            .unwrap();
        assert_eq!(state().await, v1::TensorState::Pending);
        two.wait(&one.record()).unwrap();
        let second = waits(2.0);
        two.eval(std::slice::from_ref(&second)).await.unwrap();
        assert_eq!(state().await, v1::TensorState::Ready);
        assert_eq!(second.item::<f32>().await.unwrap(), 3.0);
        assert_eq!(session.recoveries(), 1);
    }
}

#[tokio::test]
async fn a_cache_dies_with_its_worker_and_steps_are_not_run_twice() {
    let cluster = cluster().await;
    let session = session(&cluster, false).await;
    let spec = CacheSpec {
        dtype: DType::F32,
        blocks: 1,
        block_len: 1,
        kv_heads: 1,
        head_dim: 1,
    };
    let one = |x: f32| session.full(x, &[1, 1, 1]);
    let zeros = |shape: &[usize]| session.zeros(DType::I32, shape);
    let pages = || Pages {
        tables: zeros(&[1, 1]),
        sequences: zeros(&[1]),
        positions: zeros(&[1]),
    };
    let write = async |cache: &Cache, x: f32| {
        let mut step = session.step();
        step.write(cache, &one(1.0), &one(x), &zeros(&[1]));
        let seen = step.attend(&one(1.0), cache, &pages(), PagedOptions::default());
        step.run(std::slice::from_ref(&seen)).await.map(|()| seen)
    };
    let cache = session.cache(spec).await.unwrap();
    let seen = write(&cache, 3.0).await.unwrap();
    assert_eq!(seen.to_vec::<f32>().await.unwrap(), [3.0]);
    let made = &seen + 1.0;
    made.eval().await.unwrap();
    let kept = &seen + 2.0;
    kept.checkpoint().await.unwrap();
    kill(&cluster, &session).await;
    for error in [
        write(&cache, 4.0).await.err().unwrap(),
        cache.fetch().await.unwrap_err(),
        seen.fetch().await.unwrap_err(),
        made.fetch().await.unwrap_err(),
    ] {
        assert_eq!(error.reason(), Reason::TensorLost, "{error}");
    }
    assert_eq!(kept.to_vec::<f32>().await.unwrap(), [5.0]);
    let again = session.cache(spec).await.unwrap();
    let seen = write(&again, 5.0).await.unwrap();
    assert_eq!(seen.to_vec::<f32>().await.unwrap(), [5.0]);
    assert_eq!(session.recoveries(), 1);
}

#[tokio::test]
async fn what_cannot_be_made_again_is_refused_by_name() {
    let cluster = cluster().await;
    let session = session(&cluster, false).await;
    let written = session.full(1.0f32, &[4]).named("state");
    let before = &written + 1.0;
    session
        .eval(&[written.clone(), before.clone()])
        .await
        .unwrap();
    written
        .write(0, 9.0f32.to_le_bytes().to_vec())
        .await
        .unwrap();
    let after = &written + 1.0;
    after.eval().await.unwrap();
    let kept = &written * 2.0;
    kept.eval().await.unwrap();
    kept.checkpoint().await.unwrap();
    let shared = session.shared(DType::F32, &[2]).await.unwrap();
    // A write that does not fit leaves a tensor what it was.
    let error = before.write(15, vec![0; 2]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidArgument);
    kill(&cluster, &session).await;
    // Made of what was there before it was overwritten; and fetched before the worker died.
    assert_eq!(before.to_vec::<f32>().await.unwrap(), [2.0; 4]);
    assert_eq!(kept.to_vec::<f32>().await.unwrap(), [18.0, 2.0, 2.0, 2.0]);
    for (tensor, words) in [
        (&written, "overwritten in place"),
        (&after, "was made of another one"),
        (shared.tensor(), "shared"),
    ] {
        let error = (tensor - 1.0).eval().await.err().unwrap();
        assert_eq!(error.reason(), Reason::TensorLost, "{error:?}");
        assert!(error.message().contains(words), "{error}");
        let named = error.get("tensor").is_some_and(|name| name == "state");
        assert_eq!(named, words != "shared", "{error:?}");
    }
    let error = written.write(0, vec![0; 4]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::TensorLost);
    assert_eq!(session.recoveries(), 1);
    // A write while the worker dies is not done again.
    let other = session.full(1.0f32, &[4]).named("other");
    other.eval().await.unwrap();
    let victim = pid(&cluster, &session).await;
    kill_pid(victim).await;
    let lost = other.write(0, vec![0; 4]).await;
    match lost {
        // The loss was found before anything was sent.
        Ok(()) => assert_eq!(other.to_vec::<f32>().await.unwrap(), [0.0, 1.0, 1.0, 1.0]),
        Err(error) => {
            assert_eq!(error.reason(), Reason::WorkerLost, "{error:?}");
            let error = other.fetch().await.unwrap_err();
            assert_eq!(error.reason(), Reason::TensorLost, "{error:?}");
            assert_eq!(error.get("tensor"), Some("other"));
        }
    }
    // The session itself goes on.
    assert_eq!(session.full(3.0f32, &[]).item::<f32>().await.unwrap(), 3.0);
}

#[tokio::test]
async fn what_is_too_much_to_hold_is_said_to_be() {
    let cluster = cluster().await;
    let mut options = options(false);
    let recovery = options.recovery.as_mut().unwrap();
    recovery.max_bytes = 1 << 20;
    let session = Session::open(&address(&cluster), options).await.unwrap();
    let data = HostTensor::from_slice(&vec![7u8; 600 << 10], &[600 << 10]).unwrap();
    // The same bytes count once.
    let first = session.upload(&data).await.unwrap();
    let second = session.upload(&data).await.unwrap();
    let other = HostTensor::from_slice(&vec![8u8; 600 << 10], &[600 << 10]).unwrap();
    let other = session.upload(&other).await.unwrap().named("other");
    assert_eq!(
        other.checkpoint().await.unwrap_err().reason(),
        Reason::LimitExceeded
    );
    kill(&cluster, &session).await;
    assert_eq!(first.fetch().await.unwrap(), data);
    assert_eq!(second.fetch().await.unwrap(), data);
    let error = other.fetch().await.unwrap_err();
    assert_eq!(error.reason(), Reason::TensorLost);
    assert_eq!(error.get("tensor"), Some("other"));
}

#[tokio::test]
async fn a_session_that_did_not_ask_for_it_ends_beside_one_that_did() {
    let cluster = cluster().await;
    for relayed in [false, true] {
        let plain = SessionOptions {
            relayed,
            ..SessionOptions::default()
        };
        let plain = Session::open(&address(&cluster), plain).await.unwrap();
        let session = session(&cluster, relayed).await;
        let (x, y) = (plain.full(1.0f32, &[4]), session.full(1.0f32, &[4]));
        x.eval().await.unwrap();
        y.eval().await.unwrap();
        kill(&cluster, &session).await;
        let (lost, on) = tokio::join!(x.fetch(), y.fetch());
        assert_eq!(lost.unwrap_err().reason(), Reason::WorkerLost);
        assert_eq!(on.unwrap().to_vec::<f32>().unwrap(), [1.0; 4]);
        assert_eq!((plain.recoveries(), session.recoveries()), (0, 1));
        // Not later either.
        let error = (&x + 1.0).eval().await.err().unwrap();
        assert!([Reason::WorkerLost, Reason::HandleStale].contains(&error.reason()));
    }
}

#[tokio::test]
async fn many_calls_at_once_share_one_recovery() {
    let cluster = cluster().await;
    let session = session(&cluster, true).await;
    let x = session.random_key(5).random_normal(&[1000], 0.0, 1.0);
    x.eval().await.unwrap();
    kill(&cluster, &session).await;
    let tasks: Vec<_> = (0..16)
        .map(|i| {
            let sum = (&x * f64::from(i)).sum(&[], false);
            tokio::spawn(async move { sum.item::<f32>().await.unwrap() })
        })
        .collect();
    let mut sums = Vec::new();
    for task in tasks {
        sums.push(task.await.unwrap());
    }
    assert_eq!(session.recoveries(), 1);
    for (i, sum) in sums.into_iter().enumerate() {
        let again = (&x * i as f64).sum(&[], false);
        assert_eq!(again.item::<f32>().await.unwrap().to_bits(), sum.to_bits());
    }
    // x, and no copy of it that another task made.
    holds(&session, 1).await;
}

#[tokio::test]
async fn a_call_whose_worker_dies_at_every_try_ends_with_a_typed_error() {
    let cluster = cluster().await;
    let session = session(&cluster, false).await;
    let x = session.random_key(1).random_normal(&[1024, 1024], 0.0, 1.0);
    x.eval().await.unwrap();
    // Long enough to be killed in.
    let mut long = x.clone();
    for _ in 0..300 {
        long = long.matmul(&x) * 0.01;
    }
    let call = tokio::spawn(async move { long.eval().await.err() });
    let mut deaths = 0;
    while !call.is_finished() {
        if session.recoveries() == deaths {
            let worker = cluster.workers(is_ready).await.unwrap();
            if worker[0].epoch == session.epoch() {
                kill_pid(worker[0].pid).await;
                deaths += 1;
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
    let error = call.await.unwrap().unwrap();
    assert_eq!(error.reason(), Reason::WorkerLost, "{error:?}");
    assert_eq!(error.get("recoveries"), Some("3"), "{error:?}");
    assert_eq!((deaths, session.recoveries()), (4, 3));
    // The next one is done.
    assert_eq!(x.shape().unwrap(), [1024, 1024]);
    assert!(x.is_finite().all(&[], false).item::<bool>().await.unwrap());
    assert_eq!(session.recoveries(), 4);
}

#[tokio::test]
async fn a_worker_that_does_not_come_back_ends_the_call_in_time() {
    let mut cluster = cluster().await;
    let mut options = options(false);
    options.recovery.as_mut().unwrap().patience = Duration::from_millis(300);
    let session = Session::open(&address(&cluster), options).await.unwrap();
    let x = session.full(1.0f32, &[4]);
    x.eval().await.unwrap();
    let victim = pid(&cluster, &session).await;
    cluster.scheduler.signal(Signal::KILL).unwrap();
    cluster.scheduler.wait().unwrap();
    let start = Instant::now();
    while !is_gone(victim) {
        assert!(start.elapsed() < SOON);
        sleep(Duration::from_millis(1)).await;
    }
    let ended = timeout(SOON, x.fetch()).await.unwrap();
    let error = ended.unwrap_err();
    assert_eq!(error.reason(), Reason::NoWorker, "{error:?}");
    assert!(error.message().contains("no other session"), "{error}");
}

#[tokio::test]
async fn a_session_goes_on_under_a_new_scheduler() {
    let mut cluster = cluster().await;
    for relayed in [false, true] {
        let session = session(&cluster, relayed).await;
        let x = session.random_key(9).random_normal(&[50], 0.0, 1.0);
        let expected = bytes(&x).await;
        cluster.scheduler.signal(Signal::KILL).unwrap();
        cluster.scheduler.wait().unwrap();
        let read = tokio::spawn(async move { (bytes(&x).await, bytes(&(&x * 1.0)).await) });
        let mut command = Command::new(binaries().unwrap().join("hotcell-scheduler"));
        command.arg("--socket").arg(&cluster.socket);
        command
            .env_clear()
            .env("XDG_CONFIG_HOME", cluster.folder.path());
        cluster.scheduler = Process::start(&mut command).unwrap();
        let (first, second) = timeout(SOON, read).await.unwrap().unwrap();
        assert!(first == expected && second == expected);
        // A direct session's worker may have answered before it ended.
        assert_eq!(session.describe().await.unwrap().worker, "w0");
        let x = session.full(2.0f32, &[]);
        assert_eq!(x.item::<f32>().await.unwrap(), 2.0);
        cluster.workers(is_ready).await.unwrap();
    }
}

#[tokio::test]
async fn weights_are_found_again_in_the_next_worker() {
    let cluster = Cluster::with_model("kjv", &kjv(), &RESTARTS).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let params = BackendParams {
        recovery: options(false).recovery,
        ..BackendParams::at(address(&cluster))
    };
    let backend = Backend::open("kjv", params).await.unwrap();
    let name = "model.embed_tokens.weight";
    let file = TensorFile::open(&kjv().join("model.safetensors")).unwrap();
    let weight = backend.get(name).await.unwrap();
    let norm = weight.cast(DType::F32).square().sum(&[-1], false);
    let expected = bytes(&norm).await;
    for _ in 0..2 {
        kill(&cluster, backend.session()).await;
        assert_eq!(bytes(&norm).await, expected);
        assert_eq!(
            weight.fetch().await.unwrap(),
            file.get(name).unwrap().unwrap()
        );
        let again = weight.cast(DType::F32).square().sum(&[-1], false);
        assert_eq!(bytes(&again).await, expected);
    }
    assert_eq!(backend.session().recoveries(), 2);
}

#[tokio::test]
async fn an_expression_deeper_than_a_graph_is_made_again() {
    let cluster = cluster().await;
    let session = session(&cluster, false).await;
    let one = session.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    let mut sum = one.clone();
    for _ in 0..20_000 {
        sum = &sum + &one;
    }
    sum.eval().await.unwrap();
    kill(&cluster, &session).await;
    assert_eq!(sum.to_vec::<f32>().await.unwrap(), [20_001.0, 40_002.0]);
    holds(&session, 1).await;
}
