//! How fast products of activations are: GFLOP/s per dtype, size and path on some threads.
//!
//! `cargo run --release -p hotcell-kernels --example gemm_speed -- [threads] [path] [dtype]`

use std::hint::black_box;
use std::time::Instant;

use hotcell_graph::DType;
use hotcell_kernels::cpu::gemm::{Gemm, Grid, Operands};
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_kernels::cpu::pool::Pool;

/// The best of some tenths of a second of runs.
fn best(mut run: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < 0.5 {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}

/// Numbers in ±1 of a dtype.
fn numbers(dtype: DType, count: usize) -> Vec<u8> {
    (0..count)
        .flat_map(|i| {
            let value = (i % 37) as f32 / 18.0 - 1.0;
            match dtype {
                DType::F64 => f64::from(value).to_ne_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(value).to_ne_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(value).to_ne_bytes().to_vec(),
                _ => value.to_ne_bytes().to_vec(),
            }
        })
        .collect()
}

/// Memory at the start of a cache line.
fn lines(bytes: usize) -> Vec<[u64; 8]> {
    vec![[0; 8]; bytes.div_ceil(64) + 1]
}

fn line(of: &mut [[u64; 8]]) -> *mut u8 {
    let at = of.as_mut_ptr().cast::<u8>();
    at.wrapping_add(at.align_offset(64))
}

struct Shared<T>(T);
// SAFETY: threads write results and scratch of their own.
unsafe impl<T> Sync for Shared<T> {}

fn main() {
    let (counts, wanted): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.parse::<usize>().is_ok());
    let threads = counts.first().and_then(|n| n.parse().ok()).unwrap_or(2);
    let Ok(mut pool) = Pool::new(threads) else {
        return;
    };
    let sizes = [
        (1024, 1024, 1024),
        (4096, 1024, 1024),
        (512, 4096, 512),
        (128, 128, 128),
        (1, 4096, 4096),
        (4, 4096, 4096),
        (12, 4096, 4096),
        (16, 4096, 4096),
        (4096, 1, 4096),
        (4096, 8, 1024),
        (1024, 64, 1024),
    ];
    for path in CpuPath::available() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let label = format!("{path} {dtype}");
            if !wanted
                .iter()
                .all(|part| label.split(' ').any(|w| w == part))
            {
                continue;
            }
            for (m, n, k) in sizes {
                if path == CpuPath::Portable && m * n * k > 1 << 24 {
                    continue;
                }
                let gemm = Gemm { dtype, m, n, k };
                let (a, b) = (numbers(dtype, m * k), numbers(dtype, k * n));
                let mut out = lines(m * n * dtype.block_bytes());
                let room = gemm.scratch_bytes().next_multiple_of(64);
                let mut scratch = lines(room * threads);
                let at = Shared((
                    Operands {
                        a: a.as_ptr(),
                        b: b.as_ptr(),
                        out: line(&mut out),
                    },
                    line(&mut scratch),
                ));
                let seconds = best(|| {
                    let at = &at;
                    pool.run(|part, _| {
                        for unit in Grid::of(1, m, n, k, threads).units(part) {
                            // SAFETY: sizes as allocated; units and scratch are this part's.
                            unsafe {
                                let (at, scratch) = at.0;
                                gemm.run(
                                    path,
                                    at,
                                    unit.rows,
                                    unit.columns,
                                    scratch.add(part * room),
                                );
                            }
                        }
                    });
                    black_box(&out);
                });
                let flops = 2.0 * (m * n * k) as f64 / seconds / 1e9;
                let read = (b.len() + a.len()) as f64 / seconds / 1e9;
                println!(
                    "{label:<14} {m:>5} × {n:>5} × {k:>5}: {flops:8.1} GFLOP/s, operands {read:6.1} GB/s"
                );
            }
        }
    }
}
