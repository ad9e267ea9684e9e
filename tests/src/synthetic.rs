//! Models of any size: a Llama's shape, random weights, the bundled model's tokenizer.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Context, Result};

use crate::cluster::kjv;

/// A model's measures.
#[derive(Clone, Copy, Debug)]
pub struct Measures {
    /// Width of the hidden states.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Heads; as many for keys and values.
    pub heads: usize,
    /// Width of the feed-forward layers.
    pub inner: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions.
    pub context: usize,
}

impl Measures {
    /// Weights of 1 GiB and a little, with the bundled model's vocabulary.
    pub const GIB: Measures = Measures {
        hidden: 2048,
        layers: 10,
        heads: 16,
        inner: 5888,
        vocab: 4096,
        context: 512,
    };

    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let Measures {
            hidden,
            layers,
            inner,
            vocab,
            ..
        } = *self;
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        for layer in 0..layers {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
            for part in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                tensors.push((name(&format!("self_attn.{part}")), vec![hidden, hidden]));
            }
            tensors.push((name("mlp.gate_proj"), vec![inner, hidden]));
            tensors.push((name("mlp.up_proj"), vec![inner, hidden]));
            tensors.push((name("mlp.down_proj"), vec![hidden, inner]));
            tensors.push((name("input_layernorm"), vec![hidden]));
            tensors.push((name("post_attention_layernorm"), vec![hidden]));
        }
        tensors
    }
}

/// Writes a model's folder, weights in BF16, and returns how many bytes of weights it has.
///
/// # Errors
/// When it cannot be written.
pub fn write(folder: &Path, measures: &Measures) -> Result<u64> {
    let Measures {
        hidden,
        layers,
        heads,
        inner,
        vocab,
        context,
    } = *measures;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": inner, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": context,
        "tie_word_embeddings": true,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    std::fs::copy(kjv().join("tokenizer.json"), folder.join("tokenizer.json"))?;
    let tensors = measures.tensors();
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in &tensors {
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
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let scale = 2.0 / (hidden as f32).sqrt();
    let noise: Vec<u8> = (0..1 << 16).flat_map(|_| bf16(random() * scale)).collect();
    let ones: Vec<u8> = (0..1 << 16).flat_map(|_| bf16(1.0)).collect();
    for (name, shape) in &tensors {
        let source = if name.contains("norm") { &ones } else { &noise };
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
