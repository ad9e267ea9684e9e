//! A graph of a thousand elementwise nodes, beside the same loops in plain Rust.

use std::thread;

use anyhow::{Context, Result, ensure};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::cpu::{CpuDevice, path::CpuPath};
use hotcell_tests::bench::{Goal, figure};

use crate::{Bound, typical};

const NODES: usize = 1000;
const ELEMENTS: usize = 1 << 20;
/// Ops of a pass, as many as the backend makes one kernel of.
const GROUP: usize = 32;
const ROUNDS: usize = 9;

#[derive(Clone, Copy)]
enum Step {
    Add,
    Mul,
    Sub,
    Abs,
}

/// The graph's ops in order.
fn steps() -> impl Iterator<Item = Step> {
    let four = [Step::Add, Step::Mul, Step::Sub, Step::Abs];
    four.into_iter().cycle().take(NODES)
}

/// Prints the figure.
pub fn measure() -> Result<()> {
    let device = CpuDevice::with_path(crate::threads() as u32, CpuPath::detect())?;
    let mut graph = GraphBuilder::new(0);
    let spec = TensorSpec::new(DType::F32, Shape::fixed(&[ELEMENTS])?)?;
    let [x, a, b, c] = ["x", "a", "b", "c"].map(|n| graph.tensor(n, spec.clone()));
    let (mut value, a, b, c) = (x?, a?, b?, c?);
    for step in steps() {
        value = match step {
            Step::Add => graph.add(value, a)?,
            Step::Mul => graph.mul(value, b)?,
            Step::Sub => graph.sub(value, c)?,
            Step::Abs => graph.abs(value)?,
        };
    }
    let mut ours = Bound::new(&device, &graph.finish(&[value])?)?;
    let number = |k: usize, i: usize| ((i * 7 + k * 13) % 97) as f32 / 97.0 + 0.25;
    let data: Vec<Vec<f32>> = (0..4)
        .map(|k| (0..ELEMENTS).map(|i| number(k, i)).collect())
        .collect();
    for (buffer, values) in ours.inputs.iter().zip(&data) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        buffer.write(0, &bytes)?;
    }
    let mut plain = vec![0.0f32; ELEMENTS];
    let mut run_plain = |tile: usize| crate::seconds(|| chain(&data, &mut plain, tile));
    ours.run()?;
    run_plain(1024);
    let mut times = Vec::new();
    let mut tiles = [(512, vec![]), (1024, vec![]), (2048, vec![])];
    for _ in 0..ROUNDS {
        times.push(ours.run()?);
        for (tile, times) in &mut tiles {
            times.push(run_plain(*tile));
        }
    }
    let mut results = vec![0.0f32; ELEMENTS];
    let output = ours.outputs.first().context("no output")?;
    output.read_f32(0, &mut results)?;
    ensure!(results == plain, "the graph and the loops disagree");
    let time = typical(times);
    let best = tiles.map(|(tile, times)| {
        let time = typical(times);
        println!("plain loops, tiles of {tile}: {:.2} ms", time * 1e3);
        time
    });
    let best = best.into_iter().fold(f64::MAX, f64::min);
    println!(
        "{NODES} nodes on {ELEMENTS} elements: {:.2} ms in {} kernels, plain loops {:.2} ms",
        time * 1e3,
        ours.plan.memory().steps,
        best * 1e3,
    );
    let goal = Goal::AtLeast(0.9);
    figure("fused_1000", best / time, "of plain loops' speed", goal);
    Ok(())
}

/// All threads, each its own part; pass by pass, tile by tile, op by op.
fn chain(data: &[Vec<f32>], out: &mut [f32], tile: usize) {
    let steps: Vec<Step> = steps().collect();
    let part = ELEMENTS.div_ceil(crate::threads()).next_multiple_of(64);
    thread::scope(|scope| {
        for (p, out) in out.chunks_mut(part).enumerate() {
            let steps = &steps;
            scope.spawn(move || {
                let at = p * part..p * part + out.len();
                let [x, a, b, c] = [0, 1, 2, 3].map(|k: usize| &data[k][at.clone()]);
                out.copy_from_slice(x);
                for pass in steps.chunks(GROUP) {
                    run_pass(pass, out, [a, b, c], tile);
                }
            });
        }
    });
}

#[inline(always)]
fn pass_body(pass: &[Step], out: &mut [f32], others: [&[f32]; 3], tile: usize) {
    let [a, b, c] = others.map(|o| o.chunks(tile));
    for (((v, a), b), c) in out.chunks_mut(tile).zip(a).zip(b).zip(c) {
        for step in pass {
            match step {
                Step::Add => v.iter_mut().zip(a).for_each(|(v, a)| *v += a),
                Step::Mul => v.iter_mut().zip(b).for_each(|(v, b)| *v *= b),
                Step::Sub => v.iter_mut().zip(c).for_each(|(v, c)| *v -= c),
                Step::Abs => v.iter_mut().for_each(|v| *v = v.abs()),
            }
        }
    }
}

/// The loops, with the widest registers there are.
fn run_pass(pass: &[Step], out: &mut [f32], others: [&[f32]; 3], tile: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2")]
        fn avx512(pass: &[Step], out: &mut [f32], others: [&[f32]; 3], tile: usize) {
            pass_body(pass, out, others, tile);
        }
        #[target_feature(enable = "avx2")]
        fn avx2(pass: &[Step], out: &mut [f32], others: [&[f32]; 3], tile: usize) {
            pass_body(pass, out, others, tile);
        }
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx2");
        if wide {
            // SAFETY: the processor has all that it enables, asked for just above.
            return unsafe { avx512(pass, out, others, tile) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { avx2(pass, out, others, tile) };
        }
    }
    pass_body(pass, out, others, tile);
}
