//! The CUDA backend beside its device: copies within its memory, and multiplications by tensor cores with the instruction that its kernels use
//! (`mma.sync`; devices of compute capability 9 and more have others, with which they reach more).
//!
//! `cargo bench -p hotcell-tests --bench gpu -- [names…] [--quick]` on a machine with a GPU and its driver. Names are those of shapes of layers (1b, 8b,
//! 70b), `experts` that tokens choose, and those of models that are served by the programs as they are shipped (kjv, llama-1b, llama-8b; see `gpu/served.rs`); all of them when none is named.
//! `deploy/gpu-check` takes it to machines that have nothing else. `--quick` runs tiny layers and serves the bundled model on the driver without a device
//! (`tests/fakecuda`): it shows that all of it works, and no figure of it means anything.
//!
//! A copy reads and writes, and a step mostly reads, which is easier; what a step reads besides weights is not counted. So a share is no
//! bound in either way. Weights of BF16 and of 8-bit floats are multiplied with three parts of each activation, so that a third of the peak is all they can have.
//!
//! Layers have random weights and no model around them: a step is a plan's execution, from the host's call until it returns, and the median of
//! many. A line beside each figure tells the ops that take most, by the device's own clock.

#[path = "gpu/experts.rs"]
mod experts;
#[path = "gpu/served.rs"]
mod served;

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicBool, AtomicU64},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_graph::{DType, op};
use hotcell_kernels::{
    backend::{Buffer, Device, Trail},
    cuda::{CudaBackend, CudaDevice},
    plan::{Plan, PlanHints, Slot},
};
use hotcell_tests::{
    bench::{Goal, figure, median},
    chance::Chance,
    fakecuda::FakeDriver,
    layers::{BLOCK_LEN, Filling, Layers, Row},
};

/// Tokens that are in the cache when one more is drawn, and of a prompt.
const CONTEXT: usize = 1000;
const PROMPT: usize = 512;

/// A model's layer: its name, heads, heads of keys, numbers of a head, and numbers inside; and how many of them are measured.
const SHAPES: [(&str, [usize; 5]); 3] = [
    ("1b", [32, 8, 64, 8192, 16]),
    ("8b", [32, 8, 128, 14336, 4]),
    ("70b", [64, 8, 128, 28672, 2]),
];

/// Products with experts.
const EXPERTS: &str = "experts";

/// Weights, and whether tensor cores multiply them as bytes.
const WEIGHTS: [(&str, DType, bool); 5] = [
    ("bf16", DType::BF16, false),
    ("fp8", DType::F8E4M3, false),
    ("q8_0", DType::Q8_0, true),
    ("q4_0", DType::Q4_0, true),
    ("q4_k", DType::Q4K, true),
];

static PROGRESS: AtomicU64 = AtomicU64::new(0);
static NODE: AtomicU64 = AtomicU64::new(0);
static EACH: AtomicBool = AtomicBool::new(false);

/// A figure that means something unless it is a quick one.
fn figure_of(quick: bool, name: &str, value: f64, unit: &str, goal: Goal) {
    match quick {
        true => figure(&format!("quick_{name}"), value, unit, Goal::None),
        false => figure(name, value, unit, goal),
    }
}

struct Bench {
    device: CudaDevice,
    quick: bool,
    chance: Chance,
}

/// Layers on the device.
struct There {
    plan: Box<dyn Plan>,
    /// Inputs that have a number for each row.
    rows: Vec<(Row, Buffer)>,
    /// Bytes of weights of which a step reads all, and products' weights.
    read: usize,
    multiplied: usize,
    /// Of the ops' numbers.
    names: HashMap<u64, &'static str>,
    _buffers: Vec<Buffer>,
}

impl Bench {
    fn tries(&self) -> usize {
        if self.quick { 4 } else { 30 }
    }

    fn figure(&self, name: &str, value: f64, unit: &str, goal: Goal) {
        figure_of(self.quick, name, value, unit, goal);
    }

    fn place(&mut self, layers: &Layers) -> Result<There> {
        let (graph, fillings) = layers.graph()?;
        let mut plan = self.device.plan(&graph, &PlanHints::default())?;
        let (mut rows, mut buffers) = (Vec::new(), Vec::new());
        let (mut read, mut multiplied) = (0, 0);
        for (i, (input, filling)) in graph.inputs().iter().zip(&fillings).enumerate() {
            let bytes = match filling {
                Filling::Rows(_) => layers.max_rows * 4,
                Filling::Blocks => layers.blocks * 4,
                Filling::Weights(dtype, n) => dtype.row_bytes(*n).context("weights")?,
                Filling::Zeros(bytes) => *bytes,
            };
            let buffer = self.device.allocate(&input.name, bytes)?;
            plan.bind(Slot::Input(i), &buffer, 0)?;
            match filling {
                Filling::Rows(row) => rows.push((*row, buffer.clone())),
                Filling::Blocks => {
                    let numbers: Vec<i32> = (0..layers.blocks as i32).collect();
                    buffer.write_i32(0, &numbers)?;
                }
                Filling::Weights(dtype, n) => {
                    // The same again and again: whole blocks of them.
                    let some = (*n).min(1 << 20);
                    let pattern = Filling::Weights(*dtype, some).weights(&mut self.chance);
                    for at in (0..bytes).step_by(pattern.len().max(1)) {
                        buffer.write(at, &pattern[..pattern.len().min(bytes - at)])?;
                    }
                    // Of the table a row is read.
                    let is_table = *n == layers.tokens * layers.hidden() && read == 0;
                    if *n > layers.hidden() && !is_table {
                        read += bytes;
                        multiplied += n;
                    }
                }
                Filling::Zeros(_) => {}
            }
            buffers.push(buffer);
        }
        for (o, value) in graph.outputs().iter().enumerate() {
            let op::ValueSpec::Tensor(spec) = graph.spec(*value)? else {
                continue;
            };
            let bytes = spec.bytes(layers.max_rows).context("results")?;
            let buffer = self.device.allocate("a result", bytes)?;
            plan.bind(Slot::Output(o), &buffer, 0)?;
            buffers.push(buffer);
        }
        let names = graph.nodes().iter().map(|node| node.op.name);
        let numbered = names.filter_map(|name| Some((op::number(name)?.into(), name)));
        Ok(There {
            names: numbered.collect(),
            plan,
            rows,
            read,
            multiplied,
            _buffers: buffers,
        })
    }

    /// The median time of a step of rows at these places, and the ops that take most of it.
    fn step(&self, there: &mut There, rows: usize, first: usize) -> Result<(f64, String)> {
        for (row, buffer) in &there.rows {
            let numbers: Vec<i32> = (first..first + rows)
                .map(|i| match row {
                    Row::Token => i as i32 % 32,
                    Row::Sequence => 0,
                    Row::Position | Row::Slot => i as i32,
                })
                .collect();
            buffer.write_i32(0, &numbers)?;
        }
        let mut all = Vec::new();
        // The first ones are launched one by one, and recorded.
        for i in 0..self.tries() + 3 {
            let begun = Instant::now();
            there.plan.execute(rows)?;
            if i >= 3 {
                all.push(begun.elapsed().as_secs_f64());
            }
        }
        let timed = there.plan.execute_timed(rows)?.unwrap_or_default();
        let mut ops: BTreeMap<u64, (Duration, usize)> = BTreeMap::new();
        for step in timed {
            let of = ops.entry(step.mark).or_default();
            *of = (of.0 + step.took, of.1 + 1);
        }
        let mut ops: Vec<_> = ops.into_iter().collect();
        ops.sort_by_key(|(_, (took, _))| std::cmp::Reverse(*took));
        let told = ops.iter().take(6).map(|(mark, (took, count))| {
            let name = there.names.get(mark).copied().unwrap_or("another");
            format!("{count} {name} {:.1} us", took.as_secs_f64() * 1e6)
        });
        Ok((median(all), told.collect::<Vec<_>>().join(", ")))
    }

    fn run(&mut self, names: &[String]) -> Result<()> {
        let (bytes, rounds) = if self.quick {
            (1 << 16, 2)
        } else {
            (1 << 30, 20_000)
        };
        let most = self.device.ceilings(bytes, rounds)?;
        self.figure("gpu_copied", most.copied / 1e9, "GB/s", Goal::None);
        self.figure("gpu_bf16", most.bf16 / 1e12, "TFLOP/s", Goal::None);
        self.figure("gpu_bytes", most.bytes / 1e12, "TOP/s", Goal::None);
        if names.iter().any(|name| name == EXPERTS) {
            experts::run(&self.device, self.quick, &most, &mut self.chance)?;
        }
        for (shape, [heads, kv_heads, head_dim, inner, count]) in SHAPES {
            if !names.iter().any(|name| name == shape) {
                continue;
            }
            for (stored, weights, as_bytes) in WEIGHTS {
                let mut layers = Layers {
                    count,
                    heads,
                    kv_heads,
                    head_dim,
                    inner,
                    tokens: 32,
                    max_rows: PROMPT,
                    blocks: (CONTEXT + PROMPT).div_ceil(BLOCK_LEN),
                    weights,
                    of_values: weights,
                    cache: DType::F16,
                    interleaved: false,
                };
                let (mut context, mut prompt) = (CONTEXT, PROMPT);
                if self.quick {
                    (layers.heads, layers.kv_heads, layers.head_dim) = (4, 2, 64);
                    (layers.inner, layers.count) = (512, 2);
                    (context, prompt) = (20, 70);
                }
                let mut there = self.place(&layers)?;
                let (seconds, ops) = self.step(&mut there, 1, context)?;
                let share = there.read as f64 / seconds / most.copied;
                let name = format!("decode_{shape}_{stored}");
                println!(
                    "{name}: {:.1} us a layer; {ops}",
                    seconds * 1e6 / layers.count as f64
                );
                let unit = "of what a copy reads and writes";
                self.figure(&name, share, unit, Goal::AtLeast(0.85));
                let (seconds, ops) = self.step(&mut there, prompt, 0)?;
                let operations = 2.0 * (there.multiplied * prompt) as f64;
                let (peak, unit) = match as_bytes {
                    true => (most.bytes, "of the peak of mma.sync on bytes"),
                    false => (
                        most.bf16 / 3.0,
                        "of a third of the peak of mma.sync on BF16",
                    ),
                };
                let name = format!("prefill_{shape}_{stored}");
                println!(
                    "{name}: {:.1} us a layer; {ops}",
                    seconds * 1e6 / layers.count as f64
                );
                let share = operations / seconds / peak;
                self.figure(&name, share, unit, Goal::AtLeast(0.7));
            }
        }
        Ok(())
    }
}

/// Measures layers.
fn layers(quick: bool, names: &[String]) -> Result<()> {
    let folder = match quick {
        true => {
            let (driver, has_kernels) = FakeDriver::new("devices = 1\n")?.with_kernels()?;
            ensure!(has_kernels, "g++ is not installed");
            Some(driver.enter()?)
        }
        false => None,
    };
    let device = CudaBackend::open_device("cuda:0", &[])?;
    println!("{}", device.info().description);
    // Steps are told apart by their op.
    device.leave(Trail {
        progress: &PROGRESS,
        node: &NODE,
        pack: |_, op, _| op.into(),
        each: &EACH,
    });
    let mut bench = Bench {
        device,
        quick,
        chance: Chance::new(0x6b5),
    };
    let ran = bench.run(names);
    if let Some(folder) = folder {
        std::fs::remove_dir_all(folder)?;
    }
    ran
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let (flags, mut names): (Vec<_>, Vec<_>) =
        args.into_iter().partition(|arg| arg.starts_with("--"));
    let quick = flags.iter().any(|flag| flag == "--quick");
    ensure!(flags.iter().all(|flag| flag == "--quick"), "{flags:?}");
    let known: Vec<&str> = SHAPES
        .iter()
        .map(|(shape, _)| *shape)
        .chain([EXPERTS])
        .chain(served::MODELS)
        .collect();
    ensure!(
        names.iter().all(|name| known.contains(&name.as_str())),
        "of {names:?} not all are of {known:?}"
    );
    if names.is_empty() {
        // On a driver without a device, what takes a while there is left out.
        let wanted = known
            .iter()
            .filter(|name| !quick || !name.starts_with("llama"));
        names = wanted.map(|name| (*name).to_owned()).collect();
    }
    let (models, shapes): (Vec<_>, Vec<_>) = names
        .into_iter()
        .partition(|name| served::MODELS.contains(&name.as_str()));
    if !quick
        && std::env::var_os("HOTCELL_GPU").is_none()
        && let Err(why) = CudaBackend::look()
    {
        println!("not measured: {why}");
        return Ok(());
    }
    if !shapes.is_empty() {
        layers(quick, &shapes)?;
    }
    if models.is_empty() {
        return Ok(());
    }
    let mut served = served::Served::new(quick)?;
    tokio::runtime::Runtime::new()?.block_on(served.run(&models))
}
