//! A thousand streams of server-sent events at once: what they take of the scheduler's memory, and of a processor.
//!
//! Every stream has a connection of its own, and every one of them draws. The model is a tiny one with random weights, on
//! as many workers as it takes for all streams to run (a worker draws for 64 at once); the workers are those that break on
//! command, told to be late at every step, so that all tokens together come at about the rate that the goal is for and not
//! as fast as the machine can. What the scheduler took of a processor (its own time in user and kernel mode, of all its
//! threads) is then scaled to that rate exactly. Memory is what the scheduler's resident bytes grew by from before the first
//! stream until all of them have gone on for a while.
//!
//! Beside it stands what the kernel alone takes for as many bytes: one thread that only writes pieces of the same size, at
//! the same rate, to as many connections of this host, whose readers are woken at its expense as they are at the scheduler's.

use std::{
    convert::Infallible,
    io::Write as _,
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_tests::{
    bench::Goal,
    cluster::{Cluster, all_have, cpu_seconds, free_address, holds, private_folder},
    fault::Fault,
    synthetic::{Measures, write},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::{
    io::AsyncReadExt as _,
    net::TcpStream,
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

use crate::{Bench, http::Connection};

/// The bundled model's vocabulary and nearly nothing to compute.
const MODEL: Measures = Measures {
    hidden: 128,
    layers: 1,
    heads: 2,
    kv_heads: 2,
    inner: 256,
    vocab: 4096,
    context: 4096,
    tied: true,
};
/// What a worker may take for the contexts of its streams, of which none comes near its end.
const MEMORY: &str = "134217728";
/// Streams that one worker draws for at once.
const PER_WORKER: usize = 64;
/// Tokens per second that the goal is for.
const RATE: f64 = 10_000.0;
/// A worker that is told to be late is so for half a second at least.
const AGAIN: Duration = Duration::from_millis(150);
/// How long all streams may take until they have begun.
const BEGIN: Duration = Duration::from_secs(180);

/// Files: a connection for each stream, and what else there is.
fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    // What is missing then will be said by who misses it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
}

/// Tells the workers to be late, again and again.
async fn keep_late(workers: Vec<u32>) -> Result<Infallible> {
    loop {
        for worker in &workers {
            Fault::Late.order(*worker)?;
        }
        sleep(AGAIN).await;
    }
}

/// Pieces that came.
struct Pieces {
    /// Over each stream.
    counts: Vec<AtomicU64>,
    /// What all of them have.
    bytes: AtomicU64,
}

fn seen(pieces: &Pieces) -> Vec<u64> {
    let counts = pieces.counts.iter();
    counts.map(|p| p.load(Ordering::Relaxed)).collect()
}

/// Reads one stream until its end, which is not expected.
async fn read(to: SocketAddr, number: usize, pieces: Arc<Pieces>) -> Result<()> {
    let mut connection = Connection::new(to).await?;
    // Sampled from nearly equal odds, so that nothing repeats itself and no token can be guessed.
    let body = json!({
        "model": "m", "prompt": prompt(number), "stream": true, "temperature": 1.0, "seed": number,
        "max_tokens": MODEL.context - 64, "ignore_eos": true,
    });
    connection.post("/v1/completions", &body).await?;
    let count = pieces.counts.get(number).context("a stream too many")?;
    let mut piece = Vec::new();
    while connection.piece(&mut piece).await? {
        count.fetch_add(1, Ordering::Relaxed);
        let bytes = piece.len() as u64;
        pieces.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
    anyhow::bail!("stream {number} ended: {}", String::from_utf8_lossy(&piece))
}

/// No two begin alike.
fn prompt(number: usize) -> Vec<usize> {
    (0..16)
        .map(|at| (number * 37 + at * 11) % 3000 + 500)
        .collect()
}

/// A few whole answers, so that what is allocated once is there.
async fn warm_up(to: SocketAddr) -> Result<()> {
    for number in 0..8 {
        let mut connection = Connection::new(to).await?;
        let body = json!({"model": "m", "prompt": prompt(5000 + number), "max_tokens": 8, "ignore_eos": true});
        let kind = connection.post("/v1/completions", &body).await?;
        connection.rest(kind).await?;
    }
    Ok(())
}

/// Tokens that came so far, as the scheduler counts them.
async fn tokens(to: SocketAddr) -> Result<f64> {
    // A connection that is not used for a while is closed.
    let page = Connection::new(to).await?.get("/metrics").await?;
    let lines = page
        .lines()
        .filter(|l| l.starts_with("hotcell_generated_tokens_total"));
    let counts = lines.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok());
    Ok(counts.sum())
}

async fn start(model: &Path, http: SocketAddr, workers: usize) -> Result<(Cluster, Vec<u32>)> {
    let (devices, http) = (format!("cpu:{workers}"), http.to_string());
    let flags = [
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
        "--devices",
        &devices,
        "--http",
        &http,
        "--model-memory",
        MEMORY,
        "--check-interval",
        "0",
    ];
    let cluster = Cluster::with_model("m", model, &flags).await?;
    let all = cluster
        .workers(|all| all.len() == workers && all_have("m")(all))
        .await?;
    Ok((cluster, all.iter().map(|worker| worker.pid).collect()))
}

pub async fn run(bench: &Bench) -> Result<()> {
    let (streams, window): (usize, _) = match bench.quick {
        true => (100, Duration::from_secs(2)),
        false => (1000, Duration::from_secs(15)),
    };
    raise_file_limit();
    let folder = private_folder()?;
    write(folder.path(), &MODEL)?;
    let http = free_address()?;
    let (cluster, workers) = start(folder.path(), http, streams.div_ceil(PER_WORKER)).await?;
    let scheduler = cluster.scheduler.pid();
    warm_up(http).await?;
    tokens(http).await?;
    sleep(Duration::from_secs(1)).await;
    let (before, _) = holds(scheduler)?;

    let late = tokio::spawn(keep_late(workers));
    let pieces = Arc::new(Pieces {
        counts: (0..streams).map(|_| AtomicU64::new(0)).collect(),
        bytes: AtomicU64::new(0),
    });
    let mut readers = JoinSet::new();
    for number in 0..streams {
        readers.spawn(read(http, number, Arc::clone(&pieces)));
    }
    let begun = Instant::now();
    while seen(&pieces).contains(&0) {
        alive(&mut readers)?;
        let waiting = seen(&pieces).iter().filter(|count| **count == 0).count();
        ensure!(begun.elapsed() < BEGIN, "{waiting} streams have not begun");
        sleep(Duration::from_millis(50)).await;
    }
    println!(
        "{streams} streams began within {:.1} s",
        begun.elapsed().as_secs_f64()
    );

    let pieces_before = seen(&pieces);
    let tokens_before = tokens(http).await?;
    let (from, used_before) = (Instant::now(), cpu_seconds(scheduler)?);
    sleep(window).await;
    let used = cpu_seconds(scheduler)? - used_before;
    let took = from.elapsed().as_secs_f64();
    let drawn = tokens(http).await? - tokens_before;
    let pieces_after = seen(&pieces);
    let (after, _) = holds(scheduler)?;
    alive(&mut readers)?;
    let moved = pieces_before
        .iter()
        .zip(&pieces_after)
        .filter(|(a, b)| b > a)
        .count();
    ensure!(
        moved == streams,
        "only {moved} of {streams} streams went on"
    );
    ensure!(!late.is_finished(), "a worker died");
    late.abort();
    readers.shutdown().await;
    drop(cluster);

    let all = pieces_after.iter().sum::<u64>().max(1);
    let size = pieces.bytes.load(Ordering::Relaxed) / all;
    let bare = bare(streams, size as usize, window / 3).await?;
    let sent = pieces_after.iter().sum::<u64>() - pieces_before.iter().sum::<u64>();
    println!(
        "{drawn} tokens in {took:.1} s, told in {sent} pieces; the scheduler took {used:.2} s of a processor and holds {:.1} MiB",
        after as f64 / f64::from(1 << 20),
    );
    let each = (after - before) as f64 / 1024.0 / streams as f64;
    bench.figure("streams_memory", each, "KiB/stream", Goal::AtMost(64.0));
    bench.figure("streams_rate", drawn / took, "tokens/s", Goal::None);
    bench.figure(
        "streams_scheduler",
        used / took * 100.0,
        "% of a core",
        Goal::None,
    );
    bench.figure(
        "streams_scheduler_at_10000_scaled",
        used / drawn * RATE * 100.0,
        "% of a core",
        Goal::AtMost(25.0),
    );
    bench.figure(
        "streams_bare_writes_at_10000",
        bare * RATE * 100.0,
        "% of a core",
        Goal::None,
    );
    Ok(())
}

/// Seconds of a processor that this thread took so far.
fn thread_seconds() -> Result<f64> {
    // proc(5): time on a processor in nanoseconds, time in a queue, turns.
    let told = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = told.split(' ').next().context("an empty schedstat")?;
    Ok(nanoseconds.parse::<f64>()? / 1e9)
}

/// Seconds of a processor that it takes to write a piece of `size` bytes to one of so many connections whose readers wait, each
/// of which gets one in turn, at [`RATE`].
async fn bare(streams: usize, size: usize, window: Duration) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = listener.local_addr()?;
    let writing = spawn_blocking(move || -> Result<f64> {
        let accepted = (0..streams).map(|_| {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        let accepted: Vec<_> = accepted.collect::<std::io::Result<_>>()?;
        let piece = vec![b'x'; size];
        let round = Duration::from_secs_f64(streams as f64 / RATE);
        let (before, from, mut rounds) = (thread_seconds()?, Instant::now(), 0);
        while from.elapsed() < window {
            for mut stream in &accepted {
                stream.write_all(&piece)?;
            }
            rounds += 1;
            std::thread::sleep((round * rounds).saturating_sub(from.elapsed()));
        }
        Ok((thread_seconds()? - before) / (f64::from(rounds) * streams as f64))
    });
    let mut readers = JoinSet::new();
    for _ in 0..streams {
        let mut stream = TcpStream::connect(to).await?;
        readers.spawn(async move {
            let mut bytes = vec![0; 8 << 10];
            // Until the other end is gone.
            while matches!(stream.read(&mut bytes).await, Ok(1..)) {}
        });
    }
    let each = writing.await??;
    readers.shutdown().await;
    Ok(each)
}

/// No stream has ended.
fn alive(readers: &mut JoinSet<Result<()>>) -> Result<()> {
    match readers.try_join_next() {
        None => Ok(()),
        Some(ended) => ended?.context("a stream broke"),
    }
}
