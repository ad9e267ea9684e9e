//! How fast paged attention is: a decoding row over 4,000 keys, in GB/s of the cache read once, and a prompt of 512 rows, in GFLOP/s.
//!
//! `cargo run --release -p hotcell-kernels --example attention_speed -- [threads] [path] [dtype]`

use std::{error::Error, time::Instant};

use hotcell_graph::{CacheSpec, DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

/// Query heads, key heads, numbers of a head.
const SHAPES: [(&str, usize, usize, usize); 3] =
    [("1.1B", 32, 4, 64), ("8B", 32, 8, 128), ("7B", 32, 32, 128)];
const BLOCK_LEN: usize = 16;
/// Keys of a decoding row.
const KEYS: usize = 4000;
/// Rows of a prompt.
const PROMPT: usize = 512;
/// Bytes of the sequences that take turns, so that no processor's cache holds what is read.
const TOTAL: usize = 128 << 20;

fn i32s(
    device: &dyn Device,
    values: impl Iterator<Item = usize>,
) -> Result<Buffer, Box<dyn Error>> {
    let values: Vec<i32> = values.map(|v| v as i32).collect();
    let buffer = device.allocate("indices", values.len() * 4)?;
    buffer.write_i32(0, &values)?;
    Ok(buffer)
}

/// Seconds of the fastest of some executions of `rows` rows that end at `last`.
fn best(
    device: &CpuDevice,
    spec: CacheSpec,
    heads: usize,
    cache: &Buffer,
    rows: usize,
    last: usize,
) -> Result<f64, Box<dyn Error>> {
    let mut g = GraphBuilder::new(rows);
    let per_row = || TensorSpec::new(DType::I32, Shape::rows(&[])?);
    let queries = TensorSpec::new(DType::F32, Shape::rows(&[heads, spec.head_dim])?)?;
    let queries = g.tensor("queries", queries)?;
    let c = g.cache("cache", spec)?;
    let width = KEYS / BLOCK_LEN;
    let count = spec.blocks / width;
    let tables = TensorSpec::new(DType::I32, Shape::fixed(&[count, width])?)?;
    let tables = g.tensor("tables", tables)?;
    let (sequences, positions) = (
        g.tensor("sequences", per_row()?)?,
        g.tensor("positions", per_row()?)?,
    );
    let y = g.paged_attention(queries, c, tables, sequences, positions, 0.125, 0, 0.0)?;
    let mut plan = device.plan(&g.finish(&[y])?, &PlanHints::default())?;
    let numbers: Vec<u8> = (0..rows * heads * spec.head_dim)
        .flat_map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0).to_ne_bytes())
        .collect();
    let queries = device.allocate("queries", numbers.len())?;
    queries.write(0, &numbers)?;
    let out = device.allocate("out", numbers.len())?;
    // Blocks of a sequence lie apart, as those of a busy cache do.
    let tables = i32s(device, (0..spec.blocks).map(|i| i * 101 % spec.blocks))?;
    let positions = i32s(device, last + 1 - rows..last + 1)?;
    for (i, buffer) in [(0, &queries), (1, cache), (2, &tables), (4, &positions)] {
        plan.bind(Slot::Input(i), buffer, 0)?;
    }
    plan.bind(Slot::Output(0), &out, 0)?;
    let sequences: Vec<Buffer> = (0..count)
        .map(|s| i32s(device, std::iter::repeat_n(s, rows)))
        .collect::<Result<_, _>>()?;
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < 1.0 {
        let mut seconds = 0.0;
        for sequence in &sequences {
            plan.bind(Slot::Input(3), sequence, 0)?;
            let begin = Instant::now();
            plan.execute(rows)?;
            seconds += begin.elapsed().as_secs_f64();
        }
        best = best.min(seconds / count as f64);
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (numbers, wanted): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.parse::<u32>().is_ok());
    let threads = match numbers.first() {
        Some(n) => vec![n.parse::<u32>()?],
        None => vec![1, 2],
    };
    for (model, heads, kv_heads, head_dim) in SHAPES {
        for dtype in CacheSpec::DTYPES {
            for path in CpuPath::available() {
                let label = format!("{model} {dtype} {path}");
                let chosen = |part: &String| label.split(' ').any(|word| word == part);
                if path == CpuPath::Portable || !wanted.iter().all(chosen) {
                    continue;
                }
                for &threads in &threads {
                    let device = CpuDevice::with_path(threads, path)?;
                    let mut spec = CacheSpec {
                        dtype,
                        blocks: KEYS / BLOCK_LEN,
                        block_len: BLOCK_LEN,
                        kv_heads,
                        head_dim,
                    };
                    let sequence = spec.bytes().ok_or("too large")?;
                    spec.blocks *= TOTAL.div_ceil(sequence);
                    let bytes = spec.bytes().ok_or("too large")?;
                    let cache = device.allocate("cache", bytes)?;
                    // Small numbers in every form: the exponents are in the odd bytes.
                    let page: Vec<u8> = (0..1 << 16).map(|i| [i as u8, 0x2c][i % 2]).collect();
                    for at in (0..bytes).step_by(page.len()) {
                        cache.write(at, &page[..page.len().min(bytes - at)])?;
                    }
                    let time = |rows, last| best(&device, spec, heads, &cache, rows, last);
                    let decode = time(1, KEYS - 1)?;
                    let prompt = time(PROMPT, PROMPT - 1)?;
                    let flops = |pairs: usize| 4.0 * (pairs * heads * head_dim) as f64 / 1e9;
                    println!(
                        "{label:<18} {threads} threads: {KEYS} keys {:7.1} us, {:5.1} GB/s, {:6.1} GFLOP/s; {PROMPT} rows {:7.2} ms, {:6.1} GFLOP/s",
                        decode * 1e6,
                        sequence as f64 / decode / 1e9,
                        flops(KEYS) / decode,
                        prompt * 1e3,
                        flops(PROMPT * (PROMPT + 1) / 2) / prompt,
                    );
                }
            }
        }
    }
    Ok(())
}
