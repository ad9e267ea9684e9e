//! Models of any size: a Llama's shape and random weights, as a folder or as a GGUF file.

pub mod blocks;
pub mod gguf;
mod vocabulary;

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Context, Result};
use hotcell_worker::weights::NameScheme;

use crate::{chance::Chance, cluster::kjv};

/// A model's measures.
#[derive(Clone, Copy, Debug)]
pub struct Measures {
    /// Width of the hidden states.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of the feed-forward layers.
    pub inner: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions.
    pub context: usize,
    /// Whether the output head is the embedding.
    pub tied: bool,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Embedding,
    Head,
    Norm,
    /// The values' projection of a layer.
    Values(usize),
    /// The feed-forward's last projection of a layer.
    Down(usize),
    Other,
}

/// A tensor: its shape is outermost dimension first.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    part: Part,
}

impl Measures {
    /// Weights of 1 GiB and a little in BF16, with the bundled model's vocabulary.
    pub const GIB: Measures = Measures {
        hidden: 2048,
        layers: 10,
        heads: 16,
        kv_heads: 16,
        inner: 5888,
        vocab: 4096,
        context: 512,
        tied: true,
    };

    /// `stories15M` (karpathy/tinyllamas), with a longer context.
    pub const LLAMA_15M: Measures = Measures {
        hidden: 288,
        layers: 6,
        heads: 6,
        kv_heads: 6,
        inner: 768,
        vocab: 32_000,
        context: 8192,
        tied: true,
    };

    /// TinyLlama 1.1B (jzhang38/TinyLlama), with a longer context.
    pub const LLAMA_1B: Measures = Measures {
        hidden: 2048,
        layers: 22,
        heads: 32,
        kv_heads: 4,
        inner: 5632,
        vocab: 32_000,
        context: 8192,
        tied: false,
    };

    /// Llama 3.1 8B (meta-llama/Llama-3.1-8B), with fewer words.
    pub const LLAMA_8B: Measures = Measures {
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        inner: 14_336,
        vocab: 32_000,
        context: 8192,
        tied: false,
    };

    /// The shapes that have names.
    pub const NAMED: &[(&str, Measures)] = &[
        ("llama-15m", Measures::LLAMA_15M),
        ("llama-1b", Measures::LLAMA_1B),
        ("llama-8b", Measures::LLAMA_8B),
    ];

    fn tensors(&self, names: NameScheme) -> Vec<Tensor> {
        let Measures {
            hidden,
            layers,
            heads,
            kv_heads,
            inner,
            vocab,
            tied,
            ..
        } = *self;
        let tensor = |name: String, shape: &[usize], part: Part| Tensor {
            name,
            shape: shape.to_vec(),
            part,
        };
        let matrix = |name: String, n: usize, k: usize| tensor(name, &[n, k], Part::Other);
        let norm = |name: String| tensor(name, &[hidden], Part::Norm);
        let embedding = names.token_embedding().to_owned();
        let mut tensors = vec![
            tensor(embedding, &[vocab, hidden], Part::Embedding),
            norm(names.final_norm().to_owned()),
        ];
        if !tied {
            let head = names.output_head().to_owned();
            tensors.push(tensor(head, &[vocab, hidden], Part::Head));
        }
        let kv = hidden / heads * kv_heads;
        for layer in 0..layers {
            tensors.extend([
                matrix(names.q(layer), hidden, hidden),
                matrix(names.k(layer), kv, hidden),
                tensor(names.v(layer), &[kv, hidden], Part::Values(layer)),
                matrix(names.o(layer), hidden, hidden),
                matrix(names.gate(layer), inner, hidden),
                matrix(names.up(layer), inner, hidden),
                tensor(names.down(layer), &[hidden, inner], Part::Down(layer)),
                norm(names.attn_norm(layer)),
                norm(names.ffn_norm(layer)),
            ]);
        }
        tensors
    }
}

/// Writes a model's folder, weights in BF16, with the bundled model's tokenizer, and returns how many bytes of weights
/// it has.
///
/// # Errors
/// When it cannot be written.
pub fn write(folder: &Path, measures: &Measures) -> Result<u64> {
    let Measures {
        hidden,
        layers,
        heads,
        kv_heads,
        inner,
        vocab,
        context,
        tied,
    } = *measures;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    std::fs::copy(kjv().join("tokenizer.json"), folder.join("tokenizer.json"))?;
    let tensors = measures.tensors(NameScheme::HuggingFace);
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for Tensor { name, shape, .. } in &tensors {
        let begin = end;
        end += shape.iter().product::<usize>() * 2;
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = BufWriter::new(File::create(folder.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    // Random numbers need not differ from tensor to tensor; one page of them is repeated.
    let mut chance = Chance::new(0);
    let mut random = || chance.share() as f32 - 0.5;
    let scale = 2.0 / (hidden as f32).sqrt();
    let noise: Vec<u8> = (0..1 << 16).flat_map(|_| bf16(random() * scale)).collect();
    let ones: Vec<u8> = (0..1 << 16).flat_map(|_| bf16(1.0)).collect();
    for Tensor { shape, part, .. } in &tensors {
        let source = if *part == Part::Norm { &ones } else { &noise };
        let mut left = shape.iter().product::<usize>() * 2;
        while left > 0 {
            let piece = source.get(..left.min(source.len())).context("a piece")?;
            file.write_all(piece)?;
            left -= piece.len();
        }
    }
    file.flush()?;
    Ok(end as u64)
}

/// The upper half of a number's bits, which is its BF16 rounded towards zero.
fn bf16(value: f32) -> [u8; 2] {
    let [_, _, low, high] = value.to_le_bytes();
    [low, high]
}
