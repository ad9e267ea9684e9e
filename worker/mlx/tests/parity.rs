//! The bundled model on MLX against the CPU backend, in this process.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{path::Path, rc::Rc};

use hotcell_graph::DType;
use hotcell_kernels::{
    backend::{Backend, Device},
    cpu::{CpuBackend, dequant::dequantize_row},
    mlx::MlxBackend,
};
use hotcell_tests::{
    cluster::kjv,
    model::{Solo, argmax, open},
    synthetic::{
        Measures,
        gguf::{Weights, small},
    },
};

/// Tokens that both draw.
const TOKENS: usize = 256;
/// Greatest difference between a logit of the one and of the other.
const BOUND: f32 = 1e-3;

fn devices() -> [Rc<dyn Device>; 2] {
    [
        CpuBackend.open("cpu:0", &[]).unwrap(),
        MlxBackend.open("mlx:0", &[]).unwrap(),
    ]
}

/// Greatest difference between two rows of logits.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    each.fold(
        0.0,
        |most, d| if d.is_nan() { f32::NAN } else { d.max(most) },
    )
}

fn follow(cache: DType, bound: f32) {
    let source = open(&kjv()).unwrap();
    let solos = devices().map(|d| Solo::on(&*d, &source, cache).unwrap());
    let took = compare(solos, TOKENS, bound);
    println!("{cache}: {took}");
}

/// Feeds both the same and has both draw the same tokens: how far their logits were apart, and how long it took.
fn compare([mut cpu, mut mlx]: [Solo; 2], tokens: usize, bound: f32) -> String {
    let prompt: Vec<u32> = (0..40).map(|i| 50 + i * 7).collect();
    let mut worst = 0f32;
    let mut compare = |ours: &[Vec<f32>], theirs: &[Vec<f32>]| {
        for (ours, theirs) in ours.iter().zip(theirs) {
            let d = difference(ours, theirs);
            assert!(d < bound, "logits differ by {d}");
            worst = worst.max(d);
        }
        let last = |rows: &[Vec<f32>]| argmax(rows.last().unwrap());
        let (ours, theirs) = (last(ours), last(theirs));
        assert_eq!(ours, theirs, "the tokens that are drawn");
        ours as u32
    };
    let mut next = compare(
        &mlx.feed(&prompt, 16).unwrap(),
        &cpu.feed(&prompt, 16).unwrap(),
    );
    let start = std::time::Instant::now();
    for _ in 0..tokens {
        next = compare(
            &mlx.feed(&[next], 1).unwrap(),
            &cpu.feed(&[next], 1).unwrap(),
        );
    }
    let took = start.elapsed();
    format!("{tokens} equal tokens, logits differ by {worst:e} at most, {took:?} on both")
}

#[test]
fn a_model_in_mxfp4_draws_what_the_processor_draws_with_its_numbers_in_f32() {
    let measures = Measures {
        hidden: 256,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        inner: 512,
        vocab: 700,
        context: 128,
        tied: false,
    };
    for dtype in [DType::MXFP4, DType::NVFP4] {
        let folder = tempfile::tempdir().unwrap();
        let [blocks, numbers] = ["blocks", "numbers"].map(|name| {
            let folder = folder.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            folder.join("model.gguf")
        });
        let mut writer = small("m", &measures, Weights::Pure(dtype)).unwrap();
        std::fs::write(&blocks, writer.write()).unwrap();
        for tensor in &mut writer.tensors {
            let dtype = DType::from_gguf_id(tensor.kind).unwrap();
            let mut values = vec![0f32; tensor.dims.iter().product::<u64>() as usize];
            dequantize_row(dtype, &tensor.data, &mut values);
            tensor.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            tensor.kind = DType::F32.gguf_id().unwrap();
        }
        std::fs::write(&numbers, writer.write()).unwrap();
        let [cpu, mlx] = devices();
        let solo = |device: &dyn Device, path: &Path| {
            Solo::on(device, &open(path).unwrap(), DType::F32).unwrap()
        };
        let took = compare([solo(&*cpu, &numbers), solo(&*mlx, &blocks)], 64, BOUND);
        println!("{dtype}: {took}");
    }
}

#[test]
fn the_bundled_model_draws_the_tokens_that_it_draws_on_the_processor() {
    follow(DType::F32, BOUND);
}

#[test]
fn so_it_does_with_a_cache_of_half_the_size() {
    // What is rounded to f16 differs by a unit of f16 now and then.
    follow(DType::F16, 0.05);
}
