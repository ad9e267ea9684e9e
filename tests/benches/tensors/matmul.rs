//! Products of 1024 × 1024 matrices, beside the `gemm` crate on as many threads.

use anyhow::{Context, Result, ensure};
use half::bf16;
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::cpu::{CpuDevice, path::CpuPath};
use hotcell_tests::bench::{Goal, figure};

use crate::{Bound, typical};

const N: usize = 1024;
const ROUNDS: usize = 15;

/// Prints the figures.
pub fn measure() -> Result<()> {
    let numbers = |k: usize| -> Vec<f32> {
        let number = |i| ((i * k) % 37) as f32 / 18.0 - 1.0;
        (0..N * N).map(number).collect()
    };
    let (a, b) = (numbers(7), numbers(11));
    let mut c = vec![0.0f32; N * N];
    let bytes = |v: &[f32]| -> Vec<u8> { v.iter().flat_map(|v| v.to_ne_bytes()).collect() };
    let mut ours = product(DType::F32, [&bytes(&a), &bytes(&b)])?;
    let (time, reference) = compare(&mut ours, || gemm(&a, &b, &mut c))?;
    let mut results = vec![0.0f32; N * N];
    let output = ours.outputs.first().context("no output")?;
    output.read_f32(0, &mut results)?;
    agree(results.iter().copied(), c.iter().copied())?;
    report("f32", time, reference);

    // gemm has no bf16. The best it can do is to widen, multiply in f32, and round.
    let narrow =
        |values: &[f32]| -> Vec<bf16> { values.iter().map(|&v| bf16::from_f32(v)).collect() };
    let (a, b) = (narrow(&a), narrow(&b));
    let bytes = |v: &[bf16]| -> Vec<u8> { v.iter().flat_map(|v| v.to_ne_bytes()).collect() };
    let mut ours = product(DType::BF16, [&bytes(&a), &bytes(&b)])?;
    let (mut wide_a, mut wide_b) = (vec![0.0f32; N * N], vec![0.0f32; N * N]);
    let mut rounded = vec![bf16::ZERO; N * N];
    let (time, reference) = compare(&mut ours, || {
        for (wide, narrow) in [(&mut wide_a, &a), (&mut wide_b, &b)] {
            for (w, n) in wide.iter_mut().zip(narrow) {
                *w = f32::from_bits(u32::from(n.to_bits()) << 16);
            }
        }
        gemm(&wide_a, &wide_b, &mut c);
        for (r, c) in rounded.iter_mut().zip(&c) {
            // To the nearest, ties to even; nothing here is NaN.
            let bits = c.to_bits();
            *r = bf16::from_bits(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16);
        }
    })?;
    let mut results = vec![0u8; 2 * N * N];
    let output = ours.outputs.first().context("no output")?;
    output.read(0, &mut results)?;
    let results = results.as_chunks::<2>().0.iter();
    let results = results.map(|b| bf16::from_ne_bytes(*b).to_f32());
    agree(results, rounded.iter().map(|r| r.to_f32()))?;
    report("bf16", time, reference);
    Ok(())
}

/// Both sum in f32, in different orders, and bf16 is rounded to 8 bits.
fn agree(ours: impl Iterator<Item = f32>, theirs: impl Iterator<Item = f32>) -> Result<()> {
    let apart = ours
        .zip(theirs)
        .map(|(a, b)| (a - b).abs() / (1.0 + b.abs()));
    let apart = apart.fold(0.0f32, f32::max);
    ensure!(apart < 1e-2, "the products are {apart} apart");
    Ok(())
}

fn product(dtype: DType, operands: [&[u8]; 2]) -> Result<Bound> {
    let device = CpuDevice::with_path(crate::threads() as u32, CpuPath::detect())?;
    let mut graph = GraphBuilder::new(0);
    let spec = TensorSpec::new(dtype, Shape::fixed(&[N, N])?)?;
    let (a, b) = (graph.tensor("a", spec.clone())?, graph.tensor("b", spec)?);
    let c = graph.matmul(a, b)?;
    let bound = Bound::new(&device, &graph.finish(&[c])?)?;
    for (buffer, bytes) in bound.inputs.iter().zip(operands) {
        buffer.write(0, bytes)?;
    }
    Ok(bound)
}

/// Median seconds of ours and of the reference, taken in turns.
fn compare(ours: &mut Bound, mut reference: impl FnMut()) -> Result<(f64, f64)> {
    let (mut times, mut references) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS + 1 {
        times.push(ours.run()?);
        references.push(crate::seconds(&mut reference));
    }
    // The first of each woke threads and touched memory.
    Ok((
        typical(times.split_off(1)),
        typical(references.split_off(1)),
    ))
}

fn report(dtype: &str, time: f64, reference: f64) {
    let speed = |time: f64| 2.0 * (N as f64).powi(3) / time / 1e9;
    println!(
        "{dtype} matmul: {:.1} GFLOP/s, gemm {:.1}",
        speed(time),
        speed(reference)
    );
    let (name, goal) = (format!("matmul_{dtype}"), Goal::AtLeast(0.9));
    figure(&name, reference / time, "of gemm's speed", goal);
}

/// `c = a @ b`, all row-major.
fn gemm(a: &[f32], b: &[f32], c: &mut [f32]) {
    let threads = gemm::Parallelism::Rayon(crate::threads());
    let (to, a_at, b_at) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
    let (row, one) = (N as isize, 1);
    assert!([a.len(), b.len(), c.len()].iter().all(|&n| n == N * N));
    // SAFETY: each matrix has N × N elements at these strides, and c is nobody else's.
    unsafe {
        gemm::gemm(
            N, N, N, to, one, row, false, a_at, one, row, b_at, one, row, 0.0, 1.0, false, false,
            false, threads,
        );
    }
}
