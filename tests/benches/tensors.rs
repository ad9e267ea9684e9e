//! The tensor plane: what the road to a worker costs beside bare gRPC, and kernels beside plain loops, a matrix library
//! and the machine's memory.
//!
//! `cargo bench -p hotcell-tests --bench tensors -- [transfers] [calls] [fused] [matmul] [ops]`; all when none is named. `--every`
//! lists every op, not the worst five; `--op=NAME` measures these only; `--best` compares least times instead of medians.

#[path = "tensors/bare.rs"]
mod bare;
#[path = "tensors/calls.rs"]
mod calls;
#[path = "tensors/fused.rs"]
mod fused;
#[path = "tensors/matmul.rs"]
mod matmul;
#[path = "tensors/memory.rs"]
mod memory;
#[path = "tensors/ops.rs"]
mod ops;
#[path = "tensors/transfers.rs"]
mod transfers;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use hotcell_client::{
    Address,
    tensor::{Session, SessionOptions},
    v1,
};
use hotcell_graph::{Graph, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device},
    plan::{Plan, PlanHints, Slot},
};
use hotcell_tests::{
    bench::median,
    cluster::{Cluster, SOON},
};

/// Threads of both sides of a comparison.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The median of times; with `--best` the least, for machines that are busy with something else.
fn typical(times: Vec<f64>) -> f64 {
    match std::env::args().any(|a| a == "--best") {
        true => times.into_iter().fold(f64::INFINITY, f64::min),
        false => median(times),
    }
}

/// Seconds that `work` takes.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// A scheduler with a worker that is ready.
async fn cluster() -> Result<Cluster> {
    let cluster = Cluster::start(&[]).await?;
    let ready = |workers: &[v1::WorkerInfo]| {
        !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    cluster.workers(ready).await?;
    Ok(cluster)
}

/// A session through the scheduler, or to the worker itself.
async fn session(cluster: &Cluster, relayed: bool) -> Result<Session> {
    let address: Address = format!("unix:{}", cluster.socket.display()).parse()?;
    let options = SessionOptions {
        relayed,
        ..SessionOptions::default()
    };
    let session = Session::open(&address, options).await?;
    anyhow::ensure!(
        session.is_direct() != relayed,
        "the session took the wrong road"
    );
    Ok(session)
}

/// A graph made ready in this process, with buffers for all it reads and writes.
struct Bound {
    plan: Box<dyn Plan>,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
}

impl Bound {
    /// Plans a graph that has no rows.
    fn new(device: &dyn Device, graph: &Graph) -> Result<Self> {
        let mut plan = device.plan(graph, &PlanHints::default())?;
        let allocate = |spec: &ValueSpec| -> Result<Buffer> {
            let ValueSpec::Tensor(t) = spec else {
                anyhow::bail!("{spec} is no tensor")
            };
            Ok(device.allocate("a benchmark", t.bytes(0).context("too large")?)?)
        };
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (i, input) in graph.inputs().iter().enumerate() {
            let buffer = allocate(&input.spec)?;
            plan.bind(Slot::Input(i), &buffer, 0)?;
            inputs.push(buffer);
        }
        for (i, &value) in graph.outputs().iter().enumerate() {
            let buffer = allocate(&graph.spec(value)?)?;
            plan.bind(Slot::Output(i), &buffer, 0)?;
            outputs.push(buffer);
        }
        Ok(Self {
            plan,
            inputs,
            outputs,
        })
    }

    /// Seconds of one execution.
    fn run(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.plan.execute(0)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Waits for a file that another process makes.
async fn appears(path: &Path) -> Result<()> {
    let start = Instant::now();
    while !path.exists() {
        anyhow::ensure!(start.elapsed() < SOON, "{} does not appear", path.display());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` runs benches with --test; there is nothing to check here.
    if arguments.iter().any(|a| a == "--test") {
        return Ok(());
    }
    if let [flag, socket] = &arguments[..]
        && flag == bare::FLAG
    {
        return bare::serve(Path::new(socket));
    }
    let named: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| named.is_empty() || named.iter().any(|n| *n == part);
    println!("{} threads", threads());
    let runtime = tokio::runtime::Runtime::new()?;
    if wanted("transfers") {
        runtime.block_on(transfers::measure())?;
    }
    if wanted("calls") {
        runtime.block_on(calls::measure())?;
    }
    drop(runtime);
    if wanted("fused") {
        fused::measure()?;
    }
    if wanted("matmul") {
        matmul::measure()?;
    }
    if wanted("ops") {
        ops::measure()?;
    }
    Ok(())
}
