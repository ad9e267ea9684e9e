//! Forward passes against `transformers` and against themselves.
//!
//! Goldens come from `tests/golden/models/make.py`.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::path::{Path, PathBuf};

use hotcell_graph::DType;
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_tests::model::{Solo, argmax, open};
use hotcell_worker::weights::ModelSource;
use safetensors::SafeTensors;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/models")
}

struct Expected {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    prefill: Vec<Vec<f32>>,
    decode: Vec<Vec<f32>>,
}

fn expected(name: &str, which: &str) -> Expected {
    let bytes = std::fs::read(
        golden()
            .join("expected")
            .join(format!("{name}.safetensors")),
    )
    .unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = |key: &str| -> Vec<u32> {
        let t = file.tensor(&format!("{which}.{key}")).unwrap();
        t.data()
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| i64::from_le_bytes(*b) as u32)
            .collect()
    };
    let rows = |key: &str| -> Vec<Vec<f32>> {
        let t = file.tensor(&format!("{which}.{key}")).unwrap();
        let values: Vec<f32> = t
            .data()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        values.chunks(t.shape()[1]).map(<[f32]>::to_vec).collect()
    };
    Expected {
        prompt: ids("prompt"),
        tokens: ids("tokens"),
        prefill: rows("prefill"),
        decode: rows("decode"),
    }
}

/// Greatest difference, relative to the greatest reference value of the row.
fn relative(ours: &[f32], reference: &[f32]) -> f32 {
    assert_eq!(ours.len(), reference.len());
    let largest = reference.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    ours.iter().zip(reference).fold(0.0f32, |m, (a, b)| {
        let d = (a - b).abs();
        assert!(d.is_finite());
        m.max(d / largest)
    })
}

/// Normalised mean square error.
fn nmse(ours: &[f32], reference: &[f32]) -> f64 {
    let sum = |f: &dyn Fn(f32, f32) -> f64| {
        ours.iter()
            .zip(reference)
            .map(|(a, b)| f(*a, *b))
            .sum::<f64>()
    };
    sum(&|a, b| f64::from(a - b).powi(2)) / sum(&|_, b| f64::from(b).powi(2))
}

/// Runs prompt and greedy decode; calls `check` with each row of logits and its reference.
fn follow(
    source: &ModelSource,
    name: &str,
    path: CpuPath,
    mut check: impl FnMut(&str, &[f32], &[f32]),
) {
    for which in ["long", "short"] {
        let e = expected(name, which);
        let mut solo = Solo::new(source, 2, path, DType::F32).unwrap();
        let logits = solo.feed(&e.prompt, 64).unwrap();
        for (ours, reference) in logits.iter().rev().zip(e.prefill.iter().rev()) {
            check(which, ours, reference);
        }
        for (token, reference) in e.tokens.iter().zip(&e.decode) {
            let ours = solo.feed(&[*token], 1).unwrap();
            check(which, &ours[0], reference);
        }
        assert_eq!(e.decode.len(), 32);
    }
}

fn exact(model: &str, name: &str) {
    let source = open(&golden().join(model)).unwrap();
    for path in CpuPath::available() {
        let mut worst = 0.0f32;
        follow(&source, name, path, |which, ours, reference| {
            let r = relative(ours, reference);
            worst = worst.max(r);
            assert!(r < 1e-3, "{model} {which} on {path}: {r}");
            assert_eq!(argmax(ours), argmax(reference), "{model} {which} on {path}");
        });
        println!("{model} on {path}: worst relative difference {worst:e}");
    }
}

#[test]
fn llama2_equals_transformers() {
    exact("llama2", "llama2");
}

#[test]
fn llama3_in_shards_with_scaled_rope_equals_transformers() {
    exact("llama3", "llama3");
}

#[test]
fn mistral_with_a_window_equals_transformers() {
    exact("mistral", "mistral");
}

#[test]
fn qwen2_with_biases_equals_transformers() {
    exact("qwen2", "qwen2");
}

#[test]
fn qwen3_with_head_norms_equals_transformers() {
    exact("qwen3", "qwen3");
}

#[test]
fn gguf_files_of_the_same_weights_equal_transformers() {
    for name in ["llama3", "qwen2", "qwen3"] {
        exact(&format!("gguf/{name}-f32.gguf"), name);
    }
}

/// The reference multiplies unrounded activations; ours are rounded to 8 bits per block, as ggml's are,
/// which moves a logit by a share of the weights' own rounding. What the blocks decode to is compared
/// exactly in `blocks.rs`; this catches a wrong layout, scale or permutation.
#[test]
fn quantised_models_stay_close_to_their_dequantised_weights() {
    for (file, name) in [
        ("llama3-q8_0", "llama3-q8_0"),
        ("llama3-q4_0", "llama3-q4_0"),
        ("llama-k", "llama-k"),
    ] {
        let source = open(&golden().join(format!("gguf/{file}.gguf"))).unwrap();
        let (mut agree, mut all, mut worst) = (0, 0, 0.0f64);
        follow(&source, name, CpuPath::detect(), |_, ours, reference| {
            worst = worst.max(nmse(ours, reference));
            agree += usize::from(argmax(ours) == argmax(reference));
            all += 1;
        });
        println!("{file}: {agree} of {all} greedy tokens equal, worst NMSE {worst:.1e}");
        assert!(
            worst < 1e-2 && agree * 10 >= all * 9,
            "{file}: {agree}/{all}, NMSE {worst:e}"
        );
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter()
        .map(|r| r.iter().map(|v| v.to_bits()).collect())
        .collect()
}

/// The heart of continuation: the same logits, bit for bit, whole or in chunks, on any number of
/// threads, on every instruction path, with every cache dtype.
#[test]
fn chunks_threads_and_paths_change_no_bit() {
    for model in [
        "llama2",
        "mistral",
        "qwen2",
        "qwen3",
        "gguf/llama3-q8_0.gguf",
        "gguf/llama3-q4_0.gguf",
        "gguf/llama-k.gguf",
    ] {
        let source = open(&golden().join(model)).unwrap();
        let prompt: Vec<u32> = (0..61u32).map(|i| (i * 37 + 11) % 250).collect();
        for cache in [DType::F32, DType::F16, DType::BF16] {
            let whole = Solo::new(&source, 1, CpuPath::Portable, cache)
                .unwrap()
                .feed(&prompt, 64)
                .unwrap();
            let whole = bits(&whole);
            for path in CpuPath::available() {
                for (threads, chunk) in [(1, 64), (2, 64), (1, 1), (2, 1), (1, 5), (2, 5), (3, 7)] {
                    let mut solo = Solo::new(&source, threads, path, cache).unwrap();
                    let logits = bits(&solo.feed(&prompt, chunk).unwrap());
                    let differ = whole.iter().zip(&logits).position(|(a, b)| a != b);
                    assert_eq!(
                        differ, None,
                        "{model} {path} {cache}: {threads} threads, chunks of {chunk}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_cache_dtype_matters_and_is_close() {
    let source = open(&golden().join("llama2")).unwrap();
    let prompt: Vec<u32> = (0..40).collect();
    let run = |cache| {
        Solo::new(&source, 1, CpuPath::detect(), cache)
            .unwrap()
            .feed(&prompt, 64)
            .unwrap()
    };
    let (full, half) = (run(DType::F32), run(DType::F16));
    assert_ne!(bits(&full), bits(&half));
    let worst = full
        .iter()
        .zip(&half)
        .map(|(a, b)| nmse(b, a))
        .fold(0.0, f64::max);
    assert!(worst < 1e-4, "{worst:e}");
}
