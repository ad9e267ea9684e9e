//! Embeddings: against `transformers` by way of its logits, and the same beside anything.

use hotcell_graph::DType;
use hotcell_kernels::cpu::dequant::dequantize_row;
use hotcell_tests::{cluster::golden, model::open};
use hotcell_worker::generate::embed::Pooling;
use safetensors::SafeTensors;

use crate::bench::{Bench, SIZE, Size, all_kinds, alone, prompt};

fn embed(bench: &mut Bench, tokens: &[u32], pooling: Pooling) -> Vec<f32> {
    let mut answer = bench.embed(tokens, pooling);
    bench.run();
    answer.try_recv().unwrap().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The head's rows: logits are their products with a final state, which the reference's logits can be held to, also
/// their mean to the mean of the states.
fn head(model: &str) -> Vec<Vec<f32>> {
    let source = open(&golden(model)).unwrap();
    let name = match source.config.tied_embeddings {
        true => source.names.token_embedding(),
        false => source.names.output_head(),
    };
    let weight = source.weights.get(name).unwrap();
    let mut values = vec![0.0; weight.elements()];
    dequantize_row(weight.dtype, weight.bytes(), &mut values);
    let width = source.config.hidden;
    values.chunks(width).map(<[f32]>::to_vec).collect()
}

#[test]
fn states_make_the_logits_that_transformers_computed() {
    for model in ["llama2", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe"] {
        let path = golden("expected").join(format!("{model}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = file.tensor("short.prompt").unwrap();
        let ids: Vec<u32> = (ids.data().as_chunks::<8>().0.iter())
            .map(|b| i64::from_le_bytes(*b) as u32)
            .collect();
        let rows = file.tensor("short.prefill").unwrap();
        let width = rows.shape()[1];
        let values: Vec<f64> = (rows.data().as_chunks::<4>().0.iter())
            .map(|b| f64::from(f32::from_le_bytes(*b)))
            .collect();
        assert_eq!(values.len(), ids.len() * width, "a row for each token");
        let head = head(model);
        let size = Size {
            model,
            cache: DType::F32,
            ..SIZE
        };
        for pooling in [Pooling::Last, Pooling::Mean] {
            let state = embed(&mut Bench::new(size), &ids, pooling);
            let from = if pooling == Pooling::Last {
                ids.len() - 1
            } else {
                0
            };
            let count = (ids.len() - from) as f64;
            let mut largest = 0.0f64;
            let mut worst = 0.0f64;
            for (i, row) in head.iter().enumerate() {
                let ours: f64 = (row.iter().zip(&state))
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let theirs = values[from * width..].iter().skip(i).step_by(width);
                let theirs = theirs.sum::<f64>() / count;
                largest = largest.max(theirs.abs());
                worst = worst.max((ours - theirs).abs());
            }
            assert!(
                worst < 1e-3 * largest,
                "{model} {pooling:?}: {worst:e} of {largest}"
            );
        }
    }
}

#[test]
fn neither_chunks_nor_neighbours_nor_what_was_read_before_change_a_bit() {
    let tokens = prompt(3, 70);
    for pooling in [Pooling::Last, Pooling::Mean] {
        let expected = bits(&embed(&mut Bench::new(SIZE), &tokens, pooling));
        for (rows, blocks) in [(1, 64), (7, 64), (33, 64), (128, 64), (128, 10)] {
            let size = Size {
                rows,
                blocks,
                ..SIZE
            };
            let mut bench = Bench::new(size);
            let asks = all_kinds();
            let said = alone(SIZE, &asks);
            let mut answers: Vec<_> = (0..3).map(|_| bench.embed(&tokens, pooling)).collect();
            crate::bench::together(&mut bench, &asks, &said, "beside embeddings");
            answers.push(bench.embed(&tokens, pooling));
            bench.run();
            for mut answer in answers {
                let values = answer.try_recv().unwrap().unwrap();
                assert_eq!(bits(&values), expected, "{pooling:?} {size:?}");
            }
        }
    }
}

#[test]
fn one_that_nobody_waits_for_gives_its_room_back() {
    let mut bench = Bench::with_blocks(8);
    drop(bench.embed(&prompt(1, 100), Pooling::Mean));
    let answer = bench.embed(&prompt(2, 100), Pooling::Mean);
    assert!(bench.batch.step());
    drop(answer);
    bench.run();
    assert!(bench.batch.is_empty());
    assert_eq!(bench.status().used_blocks, 0);
}
