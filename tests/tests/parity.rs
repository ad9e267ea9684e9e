//! Forward passes against `transformers` and against themselves.
//!
//! Goldens come from `tests/golden/models/make.py`.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::path::{Path, PathBuf};

use hotcell_graph::{CacheSpec, DType};
use hotcell_kernels::{
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_tests::{
    bundled::write_gguf,
    cluster::kjv,
    model::{Solo, argmax, open},
    rewritten::{changed, fused_experts, stack, stack_of},
};
use hotcell_worker::{
    model::{
        run::{KINDS, Row, RunShape, Runner},
        text::ModelText,
    },
    weights::ModelSource,
};
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

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
            assert!(r < 1e-4, "{model} {which} on {path}: {r}");
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
fn gemma3_with_two_ropes_and_a_window_in_five_of_six_layers_equals_transformers() {
    exact("gemma3", "gemma3");
}

#[test]
fn gemma3_with_caps_in_bf16_equals_transformers() {
    exact("gemma3-cap", "gemma3-cap");
}

#[test]
fn qwen3_moe_with_a_dense_layer_equals_transformers() {
    exact("qwen3_moe", "qwen3_moe");
}

#[test]
fn qwen3_moe_with_plain_weights_in_every_second_layer_equals_transformers() {
    exact("qwen3_moe-step", "qwen3_moe-step");
}

#[test]
fn weights_in_8_bit_floats_with_their_scales_equal_transformers() {
    for name in ["qwen3-fp8", "qwen3_moe-fp8", "llama2-fp8"] {
        exact(name, name);
    }
}

#[test]
fn gguf_files_of_the_same_weights_equal_transformers() {
    for name in ["llama3", "qwen2", "qwen3", "gemma3", "qwen3_moe"] {
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
        ("qwen3_moe-q8_0", "qwen3_moe-q8_0"),
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
        "gemma3",
        "gemma3-cap",
        "qwen3_moe",
        "qwen3_moe-step",
        "gguf/qwen3_moe-q8_0.gguf",
        "qwen3-fp8",
        "qwen3_moe-fp8",
        "llama2-fp8",
    ] {
        let source = open(&golden().join(model)).unwrap();
        let by_tiles = ["gemma3-cap", "qwen3_moe-step"].contains(&model) || model.ends_with("fp8");
        let prompt: Vec<u32> = (0..61u32).map(|i| (i * 37 + 11) % 250).collect();
        let fits = |cache: &DType| cache.row_bytes(source.config.head_dim).is_some();
        for cache in CacheSpec::DTYPES.into_iter().filter(fits) {
            let whole_on = |path| {
                let mut solo = Solo::new(&source, 1, path, cache).unwrap();
                bits(&solo.feed(&prompt, 64).unwrap())
            };
            let plain = whole_on(CpuPath::Portable);
            for path in CpuPath::available() {
                // With tiles, weights in BF16 and E4M3 are multiplied in another order.
                let apart = path == CpuPath::Amx && by_tiles;
                let whole = if apart { whole_on(path) } else { plain.clone() };
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

/// The logits of all positions of several prompts that are computed side by side, in chunks of different lengths.
fn together(source: &ModelSource, threads: u32, prompts: &[Vec<u32>]) -> Vec<Vec<Vec<f32>>> {
    let shape = RunShape {
        max_rows: 64,
        max_sequences: 64,
        ..RunShape::for_model(&source.config, DType::F32)
    };
    let shape = RunShape {
        window_blocks: shape.blocks,
        ..shape
    };
    let device = CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
    let mut runner = Runner::new(&device, source, shape, &PlanHints::default(), &|| {}).unwrap();
    let each = shape.blocks_per_sequence();
    let block = |sequence: usize, i: usize| i * prompts.len() + sequence;
    for sequence in 0..prompts.len() {
        let table: Vec<u32> = (0..each).map(|i| block(sequence, i) as u32).collect();
        let table = &table[..each.min(shape.blocks / prompts.len())];
        for kind in 0..source.config.kinds() {
            runner.set_table(kind, sequence, 0, table).unwrap();
        }
    }
    let mut logits = vec![vec![]; prompts.len()];
    for step in 0.. {
        let mut rows = vec![];
        // Who comes first changes from step to step.
        for turn in 0..prompts.len() {
            let sequence = (turn + step) % prompts.len();
            let done = logits[sequence].len();
            let chunk = 1 + (sequence * 3 + step) % 7;
            let tokens = prompts[sequence].iter().enumerate().skip(done).take(chunk);
            rows.extend(tokens.map(|(position, &token)| Row {
                token,
                position,
                sequence,
                slots: [block(sequence, position / shape.block_len) * shape.block_len
                    + position % shape.block_len; KINDS],
            }));
        }
        if rows.is_empty() {
            return logits;
        }
        let picks: Vec<usize> = (0..rows.len()).collect();
        runner.step(&rows, &picks).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let mut values = vec![0.0; runner.vocab()];
            runner.logits(i, &mut values).unwrap();
            logits[row.sequence].push(values);
        }
    }
    unreachable!("prompts end")
}

#[test]
fn what_else_is_in_the_batch_changes_no_bit() {
    for model in [
        "llama2",
        "gemma3",
        "gemma3-cap",
        "qwen3_moe",
        "qwen3_moe-step",
        "gguf/qwen3_moe-q8_0.gguf",
        "qwen3-fp8",
        "qwen3_moe-fp8",
        "llama2-fp8",
    ] {
        let source = open(&golden().join(model)).unwrap();
        let prompt = |seed: u32, n: u32| (0..n).map(|i| (i * 37 + seed * 11) % 250).collect();
        let prompts: Vec<Vec<u32>> =
            vec![prompt(1, 61), prompt(2, 9), prompt(1, 40), prompt(5, 33)];
        for threads in [1, 2] {
            let side_by_side = together(&source, threads, &prompts);
            for (prompt, beside) in prompts.iter().zip(&side_by_side) {
                let mut solo = Solo::new(&source, 1, CpuPath::detect(), DType::F32).unwrap();
                let alone = solo.feed(prompt, 64).unwrap();
                assert_eq!(bits(&alone), bits(beside), "{model}: {threads} threads");
            }
        }
    }
}

/// Logits of one prompt, longer than any window.
fn logits_of(source: &ModelSource) -> Vec<Vec<u32>> {
    let prompt: Vec<u32> = (0..61u32).map(|i| (i * 37 + 11) % 250).collect();
    let mut solo = Solo::new(source, 2, CpuPath::detect(), DType::F16).unwrap();
    bits(&solo.feed(&prompt, 64).unwrap())
}

#[test]
fn a_gguf_file_and_a_folder_of_the_same_weights_give_the_same_bits() {
    for name in ["qwen2", "qwen3", "gemma3", "qwen3_moe"] {
        let folder = open(&golden().join(name)).unwrap();
        let file = open(&golden().join(format!("gguf/{name}-f32.gguf"))).unwrap();
        assert_eq!(logits_of(&folder), logits_of(&file), "{name}");
    }
}

#[test]
fn experts_in_one_tensor_or_one_by_one_give_the_same_bits() {
    let single = logits_of(&open(&golden().join("qwen3_moe")).unwrap());
    // As transformers 5 holds them.
    let fused = fused_experts();
    assert_eq!(single, logits_of(&open(fused.path()).unwrap()));
    let apart = changed("qwen3_moe", |tensors| {
        for part in ["gate_proj", "up_proj", "down_proj"] {
            stack(tensors, 0, &[part], part);
        }
    });
    assert_eq!(single, logits_of(&open(apart.path()).unwrap()));
}

#[test]
fn scaled_experts_in_one_tensor_or_one_by_one_give_the_same_bits() {
    let single = logits_of(&open(&golden().join("qwen3_moe-fp8")).unwrap());
    let fused = changed("qwen3_moe-fp8", |tensors| {
        for layer in [0, 2] {
            for (parts, name) in [
                (&["gate_proj", "up_proj"][..], "gate_up_proj"),
                (&["down_proj"], "down_proj"),
            ] {
                stack(tensors, layer, parts, name);
                let scales = format!("{name}_scale_inv");
                stack_of(tensors, layer, parts, ".weight_scale_inv", &scales);
            }
        }
    });
    assert_eq!(single, logits_of(&open(fused.path()).unwrap()));
}

#[test]
fn experts_that_are_missing_or_unlike_are_refused_by_name() {
    let expert = "model.layers.2.mlp.experts.5.up_proj.weight";
    let refused = |folder: &TempDir| {
        let source = open(folder.path()).unwrap();
        let solo = Solo::new(&source, 1, CpuPath::detect(), DType::F16);
        format!("{:#}", solo.err().unwrap())
    };
    let missing = changed("qwen3_moe", |tensors| drop(tensors.remove(expert)));
    let error = refused(&missing);
    assert!(
        error.contains(&format!("tensor '{expert}' is missing")),
        "{error}"
    );
    let unlike = changed("qwen3_moe", |tensors| {
        let (dtype, _, data) = tensors.get_mut(expert).unwrap();
        *dtype = Dtype::F16;
        data.truncate(data.len() / 2);
    });
    let error = refused(&unlike);
    assert!(
        error.contains(&format!("tensor '{expert}' is f16")),
        "{error}"
    );
    let misshapen = changed("qwen3_moe", |tensors| {
        tensors.get_mut(expert).unwrap().1.reverse();
        tensors.get_mut(expert).unwrap().1[0] /= 2;
        tensors.get_mut(expert).unwrap().1[1] *= 2;
    });
    let error = refused(&misshapen);
    assert!(
        error.contains(&format!("tensor '{expert}' has shape")),
        "{error}"
    );
    let no_router = changed("qwen3_moe", |tensors| {
        drop(tensors.remove("model.layers.0.mlp.gate.weight"))
    });
    let error = refused(&no_router);
    assert!(
        error.contains("tensor 'model.layers.0.mlp.gate.weight' is missing"),
        "{error}"
    );
}

#[test]
fn a_cache_of_bytes_is_close_and_only_for_heads_of_whole_blocks() {
    let feed = |model: &str, cache| -> anyhow::Result<Vec<Vec<f32>>> {
        let source = open(&golden().join(model)).unwrap();
        let prompt: Vec<u32> = (0..40).collect();
        Solo::new(&source, 1, CpuPath::detect(), cache)?.feed(&prompt, 64)
    };
    let (full, bytes) = (
        feed("qwen3", DType::F32).unwrap(),
        feed("qwen3", DType::Q8_0).unwrap(),
    );
    assert_ne!(bits(&full), bits(&bytes));
    let worst = full
        .iter()
        .zip(&bytes)
        .map(|(a, b)| nmse(b, a))
        .fold(0.0, f64::max);
    assert!(worst < 1e-3, "{worst:e}");
    // Heads of 16.
    let refused = feed("llama2", DType::Q8_0).unwrap_err().to_string();
    assert!(
        refused.contains("heads of 16") && refused.contains("q8_0"),
        "{refused}"
    );
}

#[test]
fn the_bundled_model_is_itself_as_a_gguf_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("kjv.gguf");
    write_gguf(&path).unwrap();
    let sources = [kjv(), path].map(|path| open(&path).unwrap());
    let ids = sources.each_ref().map(|source| {
        let text = ModelText::open(source).unwrap();
        let said =
            "And God said, Let there be light: and there was light. 1 Kings 7:23\n\n Ä日本語";
        text.tokenizer.encode(said, true).unwrap()
    });
    assert_eq!(ids[0], ids[1]);
    assert!(ids[0].len() > 20);
    let [own, gguf] = sources.each_ref().map(|source| {
        let mut solo = Solo::new(source, 2, CpuPath::detect(), DType::F32).unwrap();
        solo.feed(&ids[0], 64).unwrap()
    });
    for (own, gguf) in own.iter().zip(&gguf) {
        // Summed in another order.
        assert!(relative(gguf, own) < 1e-4, "{}", relative(gguf, own));
    }
}
