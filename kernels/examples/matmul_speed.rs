//! How fast the multiplication is on one thread: GB/s of weights read for one row, GFLOP/s for 64 rows and for the 512 of a
//! prompt, per dtype and path, beside a loop that only reads.
//!
//! `cargo run --release -p hotcell-kernels --example matmul_speed -- [MiB of weights] [path] [dtype]`

use std::hint::black_box;
use std::time::Instant;

use hotcell_graph::DType;
use hotcell_kernels::cpu::dequant::is_weight_dtype;
use hotcell_kernels::cpu::matmul::{MulMat, pack, rows_at_once};
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_kernels::cpu::quantize::{prepare_row, scratch_bytes};

/// The best of some seconds' worth of runs.
fn best(mut run: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < 0.4 {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}

fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<64>();
    let mut sums = [0u64; 8];
    for word in words {
        for (sum, part) in sums.iter_mut().zip(word.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*part));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Numbers about one of a plain dtype.
fn plain(dtype: DType, bytes: usize) -> Vec<u8> {
    let one: &[u8] = match dtype {
        DType::F32 => &[0, 0, 0x80, 0x3f],
        DType::F16 => &[0, 0x3c],
        _ => &[0x80, 0x3f],
    };
    let mut numbers = one.repeat(bytes / one.len());
    for (i, number) in numbers.chunks_exact_mut(one.len()).enumerate() {
        number[0] ^= (i * 37 % 64) as u8;
    }
    numbers
}

/// Rows at most.
const MOST: usize = 512;

fn main() {
    let (numbers, wanted): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.parse::<usize>().is_ok());
    let size = numbers
        .first()
        .and_then(|n| n.parse::<usize>().ok())
        .unwrap_or(96)
        << 20;
    let k = 2048;
    let bytes: Vec<u8> = (0..size as u64)
        // No NaN of E4M3 among them.
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57).min(126) as u8)
        .collect();
    let seconds = best(|| {
        black_box(read(black_box(&bytes)));
    });
    println!("plain read: {:.1} GB/s", size as f64 / seconds / 1e9);
    let x: Vec<f32> = (0..MOST * k)
        .map(|i| (i % 37) as f32 / 18.0 - 1.0)
        .collect();
    for path in CpuPath::available() {
        for dtype in DType::ALL.iter().copied().filter(|&d| is_weight_dtype(d)) {
            let label = format!("{path} {dtype}");
            if !wanted
                .iter()
                .all(|part| label.split(' ').any(|word| word == part))
            {
                continue;
            }
            let Some(row) = dtype.row_bytes(k) else {
                continue;
            };
            let scratch = scratch_bytes(dtype, k);
            let mut prepared = vec![0; MOST * scratch];
            // At a line's beginning, as a plan has weights.
            let mut room = vec![0; size / row * row + 64];
            let lead = room.as_ptr().align_offset(64).min(64);
            let packed = &mut room[lead..][..size / row * row];
            let mut time = |w: &[u8], is_packed: bool, rows: usize, n: usize| {
                let mut out = vec![0.0f32; rows * n];
                best(|| {
                    for r in 0..rows {
                        prepare_row(
                            path,
                            dtype,
                            &x[r * k..][..k],
                            &mut prepared[r * scratch..][..scratch],
                        );
                    }
                    let product = MulMat {
                        dtype,
                        w: &w[..n * row],
                        packed: is_packed,
                        k,
                        x: &x,
                        x_stride: k,
                        prepared: &prepared,
                        rows,
                    };
                    // About as many at once as a plan has.
                    let pieces =
                        rows.div_ceil(rows_at_once(path, dtype, k).map_or(rows, |a| a.rows));
                    let height = rows.div_ceil(pieces);
                    for row in (0..rows).step_by(height) {
                        let piece = product.of_rows(row..rows.min(row + height));
                        let out = out[row * n..].as_mut_ptr();
                        // SAFETY: a piece's rows · n outputs, this thread only.
                        unsafe { piece.run(path, 0..n, out, n) };
                    }
                    black_box(&out);
                })
            };
            let n = size / row;
            let bytes = match dtype.block_bytes() {
                // Of numbers made of any bits many are subnormal, which takes very long, or infinite.
                2 | 4 => plain(dtype, size),
                _ => bytes.clone(),
            };
            pack::pack(dtype, k, &bytes[..packed.len()], packed);
            let many_n = 2048.min(n);
            for (form, w, is_packed) in [("stored", &bytes[..], false), ("packed", &*packed, true)]
            {
                let one = time(w, is_packed, 1, n);
                let few = [4, 8].map(|rows| time(w, is_packed, rows, n) / one);
                let many = [64, MOST].map(|rows| {
                    let seconds = time(w, is_packed, rows, many_n);
                    2.0 * (rows * many_n * k) as f64 / seconds / 1e9
                });
                let more = [16, 24, 32].map(|rows| time(w, is_packed, rows, n) / one);
                let [many, most] = many;
                println!(
                    "{label:<16} {form} 1 row {:6.1} GB/s; 4 rows {:.2} x, 8 rows {:.2} x the time, 16, 24 and 32 rows {more:.2?}; 64 rows {many:7.1}, {MOST} rows {most:7.1} GFLOP/s",
                    (n * row) as f64 / one / 1e9,
                    few[0],
                    few[1],
                );
            }
        }
    }
}
