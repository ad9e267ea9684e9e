//! Experts that tokens choose, of a layer of a model of 30 billion parameters, of which 3 billion compute each token (Qwen3-30B-A3B's
//! shape), without anything around them.

use std::time::Instant;

use anyhow::{Context, Result};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cuda::{Ceilings, CudaDevice},
    plan::{PlanHints, Slot},
};
use hotcell_tests::{
    bench::{Goal, median},
    chance::Chance,
    layers::Filling,
};

use super::figure_of;

/// What a layer has, and how many tokens of a prompt are computed at once.
#[derive(Clone, Copy)]
struct Sizes {
    experts: usize,
    used: usize,
    hidden: usize,
    inner: usize,
    prompt: usize,
}

const WHOLE: Sizes = Sizes {
    experts: 128,
    used: 8,
    hidden: 2048,
    inner: 768,
    prompt: 512,
};
const QUICK: Sizes = Sizes {
    experts: 3,
    used: 2,
    hidden: 256,
    inner: 256,
    prompt: 70,
};

/// Weights, and whether tensor cores multiply them as bytes.
const WEIGHTS: [(&str, DType, bool); 4] = [
    ("bf16", DType::BF16, false),
    ("q4_k", DType::Q4K, true),
    ("mxfp4", DType::MXFP4, true),
    ("nvfp4", DType::NVFP4, true),
];

/// Measures a step of one token, and one of a prompt.
///
/// # Errors
/// The device's.
pub fn run(device: &CudaDevice, quick: bool, most: &Ceilings, chance: &mut Chance) -> Result<()> {
    let sizes = if quick { QUICK } else { WHOLE };
    for (stored, dtype, as_bytes) in WEIGHTS {
        let one = step(device, sizes, dtype, 1, quick, chance)?;
        let all = step(device, sizes, dtype, sizes.prompt, quick, chance)?;
        let of_one = 3 * sizes.hidden * sizes.inner;
        let bytes = |experts: usize| -> Result<f64> {
            let bytes = dtype.row_bytes(of_one).context("weights")?;
            Ok((experts * bytes) as f64)
        };
        let name = format!("experts_decode_{stored}");
        println!("{name}: {:.1} us", one * 1e6);
        let share = bytes(sizes.used)? / one / most.copied;
        let unit = "of what a copy reads and writes";
        figure_of(quick, &name, share, unit, Goal::None);
        let peak = match as_bytes {
            true => most.bytes,
            false => most.bf16 / 3.0,
        };
        let operations = 2.0 * (sizes.prompt * sizes.used * of_one) as f64;
        let least = (operations / peak).max(bytes(sizes.experts)? / most.copied);
        let name = format!("experts_prefill_{stored}");
        println!("{name}: {:.1} us", all * 1e6);
        let unit = "of reading all weights, or of multiplying, whichever takes longer";
        figure_of(quick, &name, least / all, unit, Goal::None);
    }
    Ok(())
}

/// The median seconds of a step of so many tokens.
fn step(
    device: &CudaDevice,
    sizes: Sizes,
    dtype: DType,
    rows: usize,
    quick: bool,
    chance: &mut Chance,
) -> Result<f64> {
    let Sizes {
        experts,
        used,
        hidden,
        inner,
        ..
    } = sizes;
    let mut g = GraphBuilder::new(rows);
    let of_rows = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::rows(dims)?);
    let x = g.tensor("x", of_rows(DType::F32, &[1, hidden])?)?;
    let ids = g.tensor("ids", of_rows(DType::U32, &[used])?)?;
    let mut weights = |name, n, k| {
        let shape = Shape::fixed(&[experts, n, k])?;
        g.constant(name, TensorSpec::new(dtype, shape)?)
    };
    let gate = weights("gate", inner, hidden)?;
    let up = weights("up", inner, hidden)?;
    let down = weights("down", hidden, inner)?;
    let (gate, up) = (g.mul_mat_id(gate, x, ids)?, g.mul_mat_id(up, x, ids)?);
    let y = g.swiglu(gate, up)?;
    let y = g.mul_mat_id(down, y, ids)?;
    let graph = g.finish(&[y])?;
    let mut plan = device.plan(&graph, &PlanHints::default())?;
    let mut buffers: Vec<Buffer> = Vec::new();
    for (i, input) in graph.inputs().iter().enumerate() {
        let ValueSpec::Tensor(spec) = &input.spec else {
            continue;
        };
        let bytes = spec.bytes(rows).context("an input")?;
        let buffer = device.allocate(&input.name, bytes)?;
        match spec.dtype {
            DType::F32 => buffer.write(0, &vec![0; bytes])?,
            DType::U32 => {
                // Of each token different ones.
                let choices = (0..rows).flat_map(|_| {
                    let first = chance.below(experts);
                    (0..used).map(move |i| ((first + i * experts / used) % experts) as i32)
                });
                buffer.write_i32(0, &choices.collect::<Vec<_>>())?;
            }
            _ => {
                let pattern = Filling::Weights(dtype, hidden * inner).weights(chance);
                for at in (0..bytes).step_by(pattern.len()) {
                    buffer.write(at, &pattern)?;
                }
            }
        }
        plan.bind(Slot::Input(i), &buffer, 0)?;
        buffers.push(buffer);
    }
    let result = device.allocate("a result", rows * used * hidden * 4)?;
    plan.bind(Slot::Output(0), &result, 0)?;
    let mut all = Vec::new();
    // The first ones are launched one by one, and recorded.
    for i in 0..if quick { 4 } else { 33 } {
        let begun = Instant::now();
        plan.execute(rows)?;
        if i >= 3 {
            all.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(median(all))
}
