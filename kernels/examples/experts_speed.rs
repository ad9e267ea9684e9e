//! How fast products with chosen experts are, weights as stored and packed: GB/s of weights read for one token, tokens per
//! second for 128.
//!
//! `cargo run --release -p hotcell-kernels --example experts_speed -- [dtype] [threads]`

use std::time::Instant;

use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    cpu::{CpuDevice, pack, path::CpuPath},
    plan::{PlanHints, Slot},
};

/// Experts of Qwen3-30B-A3B, and how many of them a token has.
const EXPERTS: usize = 128;
const USED: usize = 8;
const N: usize = 768;
const K: usize = 2048;
const TOKENS: usize = 128;

fn buffer(device: &dyn Device, bytes: &[u8]) -> Result<Buffer, DeviceError> {
    let buffer = device.allocate("example", bytes.len())?;
    buffer.write(0, bytes)?;
    Ok(buffer)
}

/// Ids of experts, all different within a token, others in each round.
fn ids(round: usize) -> Vec<u8> {
    let id = |choice: usize| (round * 37 + choice / USED * 11 + choice % USED * 16) % EXPERTS;
    let ids = (0..TOKENS * USED).map(|choice| id(choice) as i32);
    ids.flat_map(i32::to_ne_bytes).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let dtype = arguments.next().unwrap_or_else(|| "q4_k".to_owned());
    let dtype = DType::from_name(&dtype).ok_or("no such dtype")?;
    let threads = arguments.next().map_or(Ok(2), |n| n.parse())?;
    let row = dtype.row_bytes(K).ok_or("no whole blocks")?;
    let stored: Vec<u8> = (0..(EXPERTS * N * row) as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8 & 0x3b)
        .collect();
    let mut packed = vec![0; stored.len()];
    pack::pack(dtype, K, &stored, &mut packed);
    let x: Vec<u8> = (0..TOKENS * K)
        .flat_map(|i| ((i % 37) as f32 / 18.0 - 1.0).to_ne_bytes())
        .collect();

    let device = CpuDevice::with_path(threads, CpuPath::detect())?;
    let mut graph = GraphBuilder::new(TOKENS);
    let tensor = |dtype, shape| TensorSpec::new(dtype, shape);
    let input = graph.tensor("x", tensor(DType::F32, Shape::rows(&[1, K])?)?)?;
    let weights = graph.constant("w", tensor(dtype, Shape::fixed(&[EXPERTS, N, K])?)?)?;
    let chosen = graph.tensor("ids", tensor(DType::I32, Shape::rows(&[USED])?)?)?;
    let y = graph.mul_mat_id(weights, input, chosen)?;
    let graph = graph.finish(&[y])?;
    let mut plan = device.plan(&graph, &PlanHints::default())?;
    let out = device.allocate("out", TOKENS * USED * N * 4)?;
    let ids_buffer = device.allocate("ids", TOKENS * USED * 4)?;
    plan.bind(Slot::Input(0), &buffer(&device, &x)?, 0)?;
    plan.bind(Slot::Input(1), &buffer(&device, &stored)?, 0)?;
    plan.bind(Slot::Input(2), &ids_buffer, 0)?;
    plan.bind(Slot::Output(0), &out, 0)?;
    let packed = buffer(&device, &packed)?;
    let mut stream = device.stream();
    for (form, name) in [(None, "stored"), (Some(&packed), "packed")] {
        plan.bind_packed(Slot::Input(1), form, 0)?;
        let mut best = [f64::MAX; 2];
        for round in 0..200 {
            ids_buffer.write(0, &ids(round))?;
            for (best, tokens) in best.iter_mut().zip([1, TOKENS]) {
                // Of many tokens a few rounds tell.
                if tokens > 1 && round % 20 != 0 {
                    continue;
                }
                let begun = Instant::now();
                stream.execute(plan.as_mut(), tokens)?;
                *best = best.min(begun.elapsed().as_secs_f64());
            }
        }
        let read = (USED * N * row) as f64 / best[0] / 1e9;
        let many = TOKENS as f64 / best[1];
        println!("{dtype} {name}: 1 token {read:.1} GB/s; {TOKENS} tokens {many:.0} tokens/s");
    }
    Ok(())
}
