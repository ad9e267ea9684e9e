//! What MLX costs here: gathering a paged cache, weights that it copies, and products with packed weights beside the CPU
//! backend's. `cargo run --release --example measure`.

use std::{
    error::Error,
    rc::Rc,
    time::{Duration, Instant},
};

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Backend, Buffer, Device, HostRegion},
    cpu::{CpuBackend, pack},
    mlx::{MlxBackend, memory},
    plan::{Plan, PlanHints, Slot},
};

/// Tokens of the sequence that one more row attends to.
const TOKENS: usize = 4000;
const BLOCK: usize = 16;
/// As in a model of 1.1B parameters.
const HEADS: usize = 32;
const KEY_HEADS: usize = 4;
const DEPTH: usize = 64;
/// How long each thing is done again and again: of all times the least is what it takes undisturbed.
const LONG: Duration = Duration::from_secs(3);
/// Side of the square matrix that is imported.
const SIDE: usize = 4096;
/// Rows of the weights that are multiplied with, of as many numbers as those.
const OUTS: usize = 16384;

fn spec(dtype: DType, dims: &[usize]) -> Result<TensorSpec, GraphError> {
    TensorSpec::new(dtype, Shape::fixed(dims)?)
}

fn cache() -> CacheSpec {
    CacheSpec {
        dtype: DType::F16,
        blocks: TOKENS.div_ceil(BLOCK),
        block_len: BLOCK,
        kv_heads: KEY_HEADS,
        head_dim: DEPTH,
    }
}

fn attention() -> Result<Graph, GraphError> {
    let mut g = GraphBuilder::new(0);
    let queries = g.tensor("queries", spec(DType::F32, &[1, HEADS, DEPTH])?)?;
    let cache_in = g.cache("cache", cache())?;
    let tables = g.tensor("tables", spec(DType::I32, &[1, cache().blocks])?)?;
    let sequences = g.tensor("sequences", spec(DType::I32, &[1])?)?;
    let positions = g.tensor("positions", spec(DType::I32, &[1])?)?;
    let out = g.paged_attention(
        queries, cache_in, tables, sequences, positions, 0.125, 0, 0.0,
    )?;
    g.finish(&[out])
}

/// Seconds of the fastest execution.
fn timed(plan: &mut dyn Plan) -> Result<f64, Box<dyn Error>> {
    plan.execute(0)?;
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed() < LONG {
        let begin = Instant::now();
        plan.execute(0)?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// The same attention over keys and values that MLX holds already, one after another: what is left without the gather.
fn attend_gathered(device: &dyn Device) -> Result<f64, Box<dyn Error>> {
    let mut g = GraphBuilder::new(0);
    let queries = g.tensor("queries", spec(DType::F32, &[1, HEADS, 1, DEPTH])?)?;
    let held = [1, KEY_HEADS, TOKENS, DEPTH];
    let keys = g.constant("keys", spec(DType::F32, &held)?)?;
    let values = g.constant("values", spec(DType::F32, &held)?)?;
    let out =
        g.scaled_dot_product_attention(queries, keys, values, None, None, 0.125, false, 0, 0.0)?;
    let mut plan = device.plan(&g.finish(&[out])?, &PlanHints::default())?;
    let size = HEADS * DEPTH * 4;
    let (queries, out) = (device.allocate("q", size)?, device.allocate("o", size)?);
    plan.bind(Slot::Input(0), &queries, 0)?;
    for i in 1..3 {
        let held = device.import(Rc::new(Owned(vec![0; TOKENS * KEY_HEADS * DEPTH * 4])))?;
        plan.bind(Slot::Input(i), &held, 0)?;
    }
    plan.bind(Slot::Output(0), &out, 0)?;
    timed(&mut *plan)
}

fn attend(device: &dyn Device) -> Result<f64, Box<dyn Error>> {
    let graph = attention()?;
    let mut plan = device.plan(&graph, &PlanHints::default())?;
    let bytes = cache().bytes().ok_or("a cache without a size")?;
    let blocks: Vec<i32> = (0..i32::try_from(cache().blocks)?).rev().collect();
    let sizes = [HEADS * DEPTH * 4, bytes, blocks.len() * 4, 4, 4];
    for (i, size) in sizes.into_iter().enumerate() {
        let buffer = device.allocate("an input", size)?;
        match i {
            2 => buffer.write_i32(0, &blocks)?,
            4 => buffer.write_i32(0, &[i32::try_from(TOKENS)? - 1])?,
            _ => {}
        }
        plan.bind(Slot::Input(i), &buffer, 0)?;
    }
    let out: Buffer = device.allocate("the output", HEADS * DEPTH * 4)?;
    plan.bind(Slot::Output(0), &out, 0)?;
    timed(&mut *plan)
}

struct Owned(Vec<u8>);

// SAFETY: the vector is never changed, so its bytes stay where they are.
unsafe impl HostRegion for Owned {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that MLX holds more of when weights of `SIDE²` f32 are multiplied with.
fn import(device: &dyn Device) -> Result<usize, Box<dyn Error>> {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[1, SIDE])?)?;
    let w = g.constant("w", spec(DType::F32, &[SIDE, SIDE])?)?;
    let y = g.mul_mat(x, w)?;
    let mut plan = device.plan(&g.finish(&[y])?, &PlanHints::default())?;
    let weights = device.import(Rc::new(Owned(vec![0; SIDE * SIDE * 4])))?;
    let (x, y) = (
        device.allocate("x", SIDE * 4)?,
        device.allocate("y", SIDE * 4)?,
    );
    plan.bind(Slot::Input(0), &x, 0)?;
    plan.bind(Slot::Input(1), &weights, 0)?;
    plan.bind(Slot::Output(0), &y, 0)?;
    let before = memory()?.active;
    plan.execute(0)?;
    Ok(memory()?.active.saturating_sub(before))
}

/// Weights of a block type whose scales are near 1.
fn blocks(dtype: DType) -> Vec<u8> {
    let scale: &[u8] = match dtype {
        DType::Q4_0 => &[0, 0x3c],
        DType::MXFP4 => &[127],
        _ => &[0x38; 4],
    };
    let mut bytes = vec![0; OUTS * SIDE / dtype.block_len() * dtype.block_bytes()];
    for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        for (j, byte) in block.iter_mut().enumerate() {
            let number = (i * 64 + j).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            *byte = scale.get(j).copied().unwrap_or(number as u8);
        }
    }
    bytes
}

/// Seconds of the fastest product of `rows` rows with weights of a block type. `packs`: whether they are multiplied with as
/// schedulers have them packed for it.
fn multiply(
    device: &dyn Device,
    packs: bool,
    dtype: DType,
    rows: usize,
) -> Result<f64, Box<dyn Error>> {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[rows, SIDE])?)?;
    let w = g.constant("w", spec(dtype, &[OUTS, SIDE])?)?;
    let y = g.mul_mat(x, w)?;
    let mut plan = device.plan(&g.finish(&[y])?, &PlanHints::default())?;
    let stored = blocks(dtype);
    let mut packed = vec![0; stored.len()];
    pack::pack(dtype, SIDE, &stored, &mut packed);
    let import = |bytes| device.import(Rc::new(Owned(bytes)));
    let (stored, packed) = (import(stored)?, import(packed)?);
    let numbers = (0..rows * SIDE).map(|i| (i % 37) as f32 / 18.0 - 1.0);
    let numbers: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
    let x = device.allocate("x", numbers.len())?;
    x.write(0, &numbers)?;
    let y = device.allocate("y", rows * OUTS * 4)?;
    plan.bind(Slot::Input(0), &x, 0)?;
    plan.bind(Slot::Input(1), &stored, 0)?;
    plan.bind(Slot::Output(0), &y, 0)?;
    if packs && !plan.bind_packed(Slot::Input(1), Some(&packed), 0)? {
        return Err(format!("{dtype} weights are not packed").into());
    }
    timed(&mut *plan)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mlx = MlxBackend.open("mlx:0", &[])?;
    let cpu = CpuBackend.open("cpu:0", &[])?;
    println!("{}", mlx.info().description);
    println!("FIGURE mlx_attention_4000={:.3} ms", attend(&*mlx)? * 1e3);
    println!(
        "FIGURE mlx_attention_4000_gathered={:.3} ms",
        attend_gathered(&*mlx)? * 1e3
    );
    println!("FIGURE cpu_attention_4000={:.3} ms", attend(&*cpu)? * 1e3);
    let share = import(&*mlx)? as f64 / (SIDE * SIDE * 4) as f64;
    println!("FIGURE mlx_copies_of_weights={share:.2}");
    for dtype in [DType::Q4_0, DType::MXFP4, DType::NVFP4] {
        let devices: [(&str, &dyn Device, bool); 2] = [("mlx", &*mlx, false), ("cpu", &*cpu, true)];
        for (name, device, packs) in devices {
            let bytes = dtype.row_bytes(OUTS * SIDE).ok_or("too large")?;
            let one = bytes as f64 / multiply(device, packs, dtype, 1)? / 1e9;
            println!("FIGURE {name}_{dtype}_1={one:.2} GB/s");
            let many = 2.0 * (64 * OUTS * SIDE) as f64 / 1e9;
            let many = many / multiply(device, packs, dtype, 64)?;
            println!("FIGURE {name}_{dtype}_64={many:.1} GFLOP/s");
        }
    }
    Ok(())
}
