//! What clients leave behind and hold up: one that is killed leaves nothing, and bytes that nobody takes are nowhere kept.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Client, Reason,
    tensor::{CacheSpec, DType, HostTensor, Session, SessionOptions, Tensor},
    v1,
};
use hotcell_tests::cluster::{Cluster, Process, SOON, holds, resident, signal_pid};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
/// What a test's client is told: the road it takes and the address.
const CLIENT: &str = "HOTCELL_TEST_TENSOR_CLIENT";
const READY: &str = "this client holds all it wants";
/// Bytes of tensors that it holds at least.
const HELD: u64 = 100 * MIB;

async fn open(address: &Address, relayed: bool) -> Session {
    let options = SessionOptions {
        relayed,
        ..SessionOptions::default()
    };
    let session = Session::open(address, options).await.unwrap();
    assert_eq!(session.is_direct(), !relayed);
    session
}

fn address(cluster: &Cluster) -> Address {
    format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap()
}

/// A scheduler with one worker, and that worker's process.
async fn cluster() -> (Cluster, u32) {
    let cluster = Cluster::start(&["--devices", "cpu:1"]).await.unwrap();
    let ready = |w: &[v1::WorkerInfo]| w.len() == 1 && w[0].state() == v1::WorkerState::Ready;
    let workers = cluster.workers(ready).await.unwrap();
    (cluster, workers[0].pid)
}

/// Products that take a good while, node after node.
fn long(session: &Session) -> Tensor {
    let x = session.full(1.0f32 / 512.0, &[512, 512]);
    (0..200).fold(x.clone(), |product, _| product.matmul(&x))
}

/// Begins to read a tensor that its session has evaluated, and reads no more than the first message.
async fn begin_to_read(session: &Session, bytes: u64) -> tonic::Streaming<v1::DownloadChunk> {
    let list = session.list().await.unwrap();
    let tensor = list.tensors.iter().find(|t| t.bytes == bytes).unwrap();
    let request = v1::DownloadRequest {
        tensor: tensor.handle.clone(),
        ..v1::DownloadRequest::default()
    };
    let mut download = session.raw_download(request).await.unwrap();
    let first = download.message().await.unwrap().unwrap();
    assert!(!first.data.is_empty() && (first.data.len() as u64) < bytes);
    download
}

/// Not a test: this program again, as the client that gets killed, with one of everything that a session may hold.
#[tokio::test]
async fn helper_client() {
    let Ok(told) = std::env::var(CLIENT) else {
        return;
    };
    let (road, address) = told.split_once(' ').unwrap();
    let relayed = road == "relayed";
    let session = open(&address.parse().unwrap(), relayed).await;
    let big = session.full(1.5f32, &[12 << 20]);
    big.eval().await.unwrap();
    let data = HostTensor::from_slice(&vec![7u8; 40 << 20], &[40 << 20]).unwrap();
    let uploaded = session.upload(&data).await.unwrap();
    let cache = CacheSpec {
        dtype: DType::F32,
        blocks: 1024,
        block_len: 16,
        kv_heads: 4,
        head_dim: 64,
    };
    let cache = session.cache(cache).await.unwrap();
    let shared = match relayed {
        true => None,
        false => Some(session.shared(DType::F32, &[4 << 20]).await.unwrap()),
    };
    let function = session.compile(|a| vec![&a[0] * 3.0 + 1.0]);
    let called = function.call_eval(std::slice::from_ref(&big)).await;
    // Freed, and kept for what comes next.
    drop(called.unwrap());
    session.flush().await.unwrap();
    let unread = begin_to_read(&session, big.nbytes().unwrap() as u64).await;
    // More work than there is time for, on two streams.
    let streams = [session.stream(), session.stream()];
    let mut queued = Vec::new();
    for n in 0..200 {
        let one = long(&session);
        let stream = &streams[n % 2];
        stream.async_eval(std::slice::from_ref(&one)).await.unwrap();
        queued.push(one);
    }
    let waits = tokio::spawn({
        let event = streams[0].record();
        async move { event.synchronize().await }
    });
    eprintln!("{READY}");
    waits.await.unwrap().unwrap();
    // It is killed long before.
    drop((uploaded, cache, shared, unread, queued));
    panic!("all of it was done");
}

/// What a worker's sessions hold now, as it says: sessions, tensors, plans, and bytes, those in use and those kept.
async fn census(client: &Client) -> ((u32, u32, u32), u64) {
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("", every).await.unwrap();
    let sample = samples.next().await.unwrap().unwrap();
    let kinds = ["tensors", "tensors_kept"];
    let memory = sample.memory.iter();
    let bytes = memory.filter(|m| kinds.contains(&m.kind.as_str()));
    let bytes = bytes.map(|m| m.bytes).sum();
    let all = sample.tensors.unwrap();
    ((all.sessions, all.tensors, all.plans), bytes)
}

#[tokio::test]
async fn a_client_that_is_killed_leaves_nothing_whichever_road_it_took() {
    let (cluster, pid) = cluster().await;
    let client = cluster.client().await.unwrap();
    // Somebody else, who stays.
    let other = open(&address(&cluster), true).await;
    let kept = other.arange(0.0, 1000.0, 1.0, DType::F32);
    kept.eval().await.unwrap();
    // What the allocator keeps of one client's memory serves the next: the second time it takes no more.
    let mut settled = None;
    for road in ["direct", "relayed", "direct", "relayed"] {
        let before = census(&client).await;
        assert_eq!((before.0.0, before.0.1), (1, 1), "{before:?}");
        let (_, descriptors) = holds(cluster.scheduler.pid()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "helper_client", "--nocapture"])
            .env(CLIENT, format!("{road} unix:{}", cluster.socket.display()))
            .stdout(Stdio::null());
        let mut killed = Process::start(&mut command).unwrap();
        let start = Instant::now();
        while !killed.log().contains(READY) {
            assert!(start.elapsed() < 2 * SOON, "{road}: {}", killed.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let during = census(&client).await;
        assert_eq!(during.0.0, 2, "{during:?}");
        assert!(during.0.1 > 200 && during.0.2 > before.0.2, "{during:?}");
        assert!(during.1 > before.1 + HELD, "{during:?}");
        assert!(holds(cluster.scheduler.pid()).unwrap().1 > descriptors);
        killed.signal(Signal::KILL).unwrap();
        assert!(!killed.wait().unwrap().success());
        // All of it, though work was queued and bytes were on their way.
        let start = Instant::now();
        loop {
            let now = census(&client).await;
            let (_, open) = holds(cluster.scheduler.pid()).unwrap();
            if now == before && open <= descriptors {
                break;
            }
            let waited = start.elapsed();
            let all = format!("{road}: {now:?} after {before:?}; {open} after {descriptors}");
            assert!(waited < SOON, "{all}");
        }
        println!("{road}: nothing was left after {:?}", start.elapsed());
        if road == "relayed" {
            let before = *settled.get_or_insert_with(|| resident(pid).unwrap());
            // The last bytes on their way are freed a moment after the session.
            while resident(pid).unwrap() >= before + HELD as i64 {
                let now = resident(pid).unwrap();
                assert!(start.elapsed() < SOON, "{now} bytes after {before}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        // The other one has what it had, and the worker is the same.
        let sum = kept.sum(&[], false).item::<f32>().await.unwrap();
        assert_eq!(sum, 499_500.0);
        other.flush().await.unwrap();
        let workers = cluster.workers(|_| true).await.unwrap();
        assert_eq!((workers[0].pid, workers[0].deaths), (pid, 0));
    }
}

/// Bytes that are asked for and not taken.
const ASKED: u64 = 1 << 30;
/// By how much each process may grow meanwhile: a sixteenth of it, room for a connection's windows at both of its ends and
/// what an allocator keeps of them.
const BOUND: i64 = 64 << 20;

/// Held by whoever looks at this process, which others would grow as well.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Looks how much processes have grown.
struct Watched {
    pids: Vec<(&'static str, u32, i64)>,
}

impl Watched {
    fn new(pids: &[(&'static str, u32)]) -> Self {
        let pids = pids.iter();
        let now = |&(name, pid)| (name, pid, resident(pid).unwrap());
        Self {
            pids: pids.map(now).collect(),
        }
    }

    /// # Panics
    /// When one has grown by more than it may.
    fn look(&self, what: &str) -> Vec<i64> {
        let grown = |(name, pid, before): &(&str, u32, i64)| {
            let more = resident(*pid).unwrap() - before;
            assert!(more < BOUND, "{what}: the {name} has {more} bytes more");
            more
        };
        self.pids.iter().map(grown).collect()
    }
}

/// What else a session may do.
async fn goes_on(session: &Session, round: u32) {
    let x = session.tensor(&[f64::from(round)], &[1]).unwrap();
    assert_eq!(
        (&x + 1.0).item::<f64>().await.unwrap(),
        f64::from(round) + 1.0
    );
}

#[tokio::test]
async fn a_download_that_nobody_reads_is_nowhere_kept() {
    let _alone = ALONE.lock().await;
    for relayed in [false, true] {
        // Of its own each time: what others left would hide what is taken.
        let (cluster, pid) = cluster().await;
        let session = open(&address(&cluster), relayed).await;
        let big = session.full(3u8, &[ASKED as usize]);
        big.eval().await.unwrap();
        goes_on(&session, 0).await;
        let watched = Watched::new(&[
            ("worker", pid),
            ("scheduler", cluster.scheduler.pid()),
            ("client", std::process::id()),
        ]);
        let mut unread = begin_to_read(&session, ASKED).await;
        let (start, mut rounds, mut most) = (Instant::now(), 0, vec![]);
        while start.elapsed() < Duration::from_secs(2) || rounds < 20 {
            goes_on(&session, rounds).await;
            rounds += 1;
            most = watched.look("an unread download");
        }
        println!("relayed {relayed}: {most:?} bytes more, {rounds} rounds beside it");
        // Who reads it after all, gets it all, and nothing is gathered on the way.
        let mut left = 0;
        while let Some(chunk) = unread.message().await.unwrap() {
            left += chunk.data.len() as u64;
            if left % (64 * MIB) < chunk.data.len() as u64 {
                watched.look("a download");
            }
            assert!(chunk.data.iter().all(|b| *b == 3));
        }
        // The first message was read before.
        assert!((ASKED - MIB..ASKED).contains(&left), "{left}");
        // One that ends unread leaves nothing either.
        drop(begin_to_read(&session, ASKED).await);
        goes_on(&session, rounds).await;
        watched.look("a download that was given up");
    }
}

#[tokio::test]
async fn an_upload_whose_reader_is_slow_is_nowhere_kept() {
    let _alone = ALONE.lock().await;
    let bytes = bytes::Bytes::from(vec![5u8; ASKED as usize]);
    // A tensor that is there takes each chunk between two nodes of what the worker is busy with; one that is yet to be
    // computed takes none before it is.
    for (relayed, is_there) in [(false, true), (true, true), (false, false), (true, false)] {
        let what = format!("relayed: {relayed}, there: {is_there}");
        let (cluster, pid) = cluster().await;
        let session = open(&address(&cluster), relayed).await;
        let busy = session.stream();
        let mut queued = Vec::new();
        for _ in 0..50 {
            let one = long(&session);
            busy.async_eval(std::slice::from_ref(&one)).await.unwrap();
            queued.push(one);
        }
        let target = session.full(3u8, &[ASKED as usize]);
        let later = session.stream();
        if !is_there {
            later.wait(&busy.record()).unwrap();
        }
        later
            .async_eval(std::slice::from_ref(&target))
            .await
            .unwrap();
        if is_there {
            later.synchronize().await.unwrap();
        }
        goes_on(&session, 0).await;
        let scheduler = ("scheduler", cluster.scheduler.pid());
        let watched = Watched::new(&[("worker", pid), scheduler, ("client", std::process::id())]);
        let write = tokio::spawn({
            let (target, bytes) = (target.clone(), bytes.clone());
            async move { target.write(0, bytes).await }
        });
        let (start, mut rounds, mut most) = (Instant::now(), 0, vec![]);
        while start.elapsed() < Duration::from_secs(1) {
            goes_on(&session, rounds).await;
            rounds += 1;
            most = watched.look(&what);
        }
        println!("{what}: {most:?} bytes more, {rounds} rounds beside it");
        // A worker that does nothing at all, for less time than would make a hang of it.
        signal_pid(pid, Signal::STOP).unwrap();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            most = watched.look(&what);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let unread = !write.is_finished();
        signal_pid(pid, Signal::CONT).unwrap();
        println!("{what}: {most:?} bytes more, beside a worker that stands still");
        assert!(
            unread,
            "{what}: it was written before the worker stood still"
        );
        assert!(busy.cancel().await.unwrap() > 0);
        // The tensor itself is written now, where it was not before.
        let watched = match is_there {
            true => watched,
            false => Watched::new(&[scheduler, ("client", std::process::id())]),
        };
        while !write.is_finished() {
            watched.look(&what);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        write.await.unwrap().unwrap();
        goes_on(&session, rounds).await;
        let (least, most) = (target.min(&[], false), target.max(&[], false));
        assert_eq!(least.item::<u8>().await.unwrap(), 5);
        assert_eq!(most.item::<u8>().await.unwrap(), 5);
        let stopped = queued.last().unwrap().fetch().await.unwrap_err();
        assert_eq!(stopped.reason(), Reason::TensorNotReady);
    }
}
