//! The bundled model as a GGUF file, for programs that read nothing else.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use hotcell_worker::weights::NameScheme;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

use crate::{
    cluster::kjv,
    synthetic::gguf::testing::{Value, Writer},
};

// GGUF's numbers of dtypes.
const F32: u32 = 0;
const BF16: u32 = 30;

/// The model's measures.
struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
}

fn json(name: &str) -> Result<Json> {
    Ok(serde_json::from_slice(&fs::read(kjv().join(name))?)?)
}

fn number(of: &Json, key: &str) -> Result<usize> {
    let number = of.get(key).and_then(Json::as_u64);
    Ok(number.with_context(|| format!("no {key}"))? as usize)
}

fn metadata(config: &Json, shape: &Shape) -> Result<Writer> {
    let n = |n: usize| Value::U32(n as u32);
    let text = |text: &str| Value::Str(text.to_owned());
    let real = |key: &str| {
        let number = config.get(key).and_then(Json::as_f64);
        anyhow::Ok(Value::F32(
            number.with_context(|| format!("no {key}"))? as f32
        ))
    };
    let (tokens, kinds, merges) = vocabulary()?;
    Ok(Writer::default()
        .value("general.architecture", text("llama"))
        .value("general.name", text("kjv"))
        // BF16, mostly.
        .value("general.file_type", Value::U32(32))
        .value("llama.vocab_size", n(tokens.len()))
        .value(
            "llama.context_length",
            n(number(config, "max_position_embeddings")?),
        )
        .value("llama.embedding_length", n(shape.hidden))
        .value("llama.block_count", n(shape.layers))
        .value(
            "llama.feed_forward_length",
            n(number(config, "intermediate_size")?),
        )
        .value("llama.attention.head_count", n(shape.heads))
        .value("llama.attention.head_count_kv", n(shape.kv_heads))
        .value(
            "llama.attention.layer_norm_rms_epsilon",
            real("rms_norm_eps")?,
        )
        .value("llama.rope.dimension_count", n(shape.hidden / shape.heads))
        .value("llama.rope.freq_base", real("rope_theta")?)
        .value("tokenizer.ggml.model", text("gpt2"))
        .value("tokenizer.ggml.pre", text("gpt-2"))
        .value("tokenizer.ggml.tokens", Value::Strs(tokens))
        .value("tokenizer.ggml.token_type", Value::I32s(kinds))
        .value("tokenizer.ggml.merges", Value::Strs(merges))
        .value(
            "tokenizer.ggml.bos_token_id",
            n(number(config, "bos_token_id")?),
        )
        .value(
            "tokenizer.ggml.eos_token_id",
            n(number(config, "eos_token_id")?),
        )
        .value("tokenizer.ggml.add_bos_token", Value::Bool(true)))
}

/// Tokens by id, GGUF's kind of each (3 is control, 1 is ordinary), and merges.
fn vocabulary() -> Result<(Vec<String>, Vec<i32>, Vec<String>)> {
    let tokenizer = json("tokenizer.json")?;
    let at = |place: &str| tokenizer.pointer(place).context("a part is missing");
    let vocabulary = at("/model/vocab")?.as_object().context("no vocabulary")?;
    let added = at("/added_tokens")?.as_array().context("no added tokens")?;
    let mut all: Vec<(usize, String, i32)> = Vec::new();
    for (token, id) in vocabulary {
        all.push((id.as_u64().context("no id")? as usize, token.clone(), 1));
    }
    for token in added {
        let content = token.get("content").and_then(Json::as_str);
        let (id, content) = (number(token, "id")?, content.context("no content")?);
        all.retain(|(known, ..)| *known != id);
        all.push((id, content.to_owned(), 3));
    }
    all.sort_unstable();
    ensure!(
        all.iter().enumerate().all(|(at, (id, ..))| at == *id),
        "an id is missing"
    );
    let merges = at("/model/merges")?.as_array().context("no merges")?;
    let merges = merges.iter().map(|merge| match merge {
        Json::String(pair) => Ok(pair.clone()),
        Json::Array(pair) => {
            let parts: Vec<_> = pair.iter().filter_map(Json::as_str).collect();
            Ok(parts.join(" "))
        }
        other => anyhow::bail!("{other} is no merge"),
    });
    let merges = merges.collect::<Result<_>>()?;
    let (tokens, kinds) = all
        .into_iter()
        .map(|(_, token, kind)| (token, kind))
        .unzip();
    Ok((tokens, kinds, merges))
}

/// Rows of a projection in the order in which GGUF's Llama turns them: pairs side by side, where the bundled model has the
/// first of all pairs of a head and then the second of all.
fn turned(data: &[u8], heads: usize, rows: usize) -> Result<Vec<u8>> {
    let (row, half) = (data.len() / rows, rows / heads / 2);
    let mut out = Vec::with_capacity(data.len());
    for head in 0..heads {
        for pair in 0..half {
            for part in 0..2 {
                let from = (head * 2 * half + part * half + pair) * row;
                out.extend_from_slice(data.get(from..from + row).context("a row is missing")?);
            }
        }
    }
    Ok(out)
}

/// BF16 is the upper half of F32.
fn wide(data: &[u8]) -> Vec<u8> {
    let halves = data.chunks_exact(2);
    halves.flat_map(|half| [&[0, 0], half].concat()).collect()
}

/// Writes it.
///
/// # Errors
/// When the bundled model is not what it is expected to be, or the file cannot be written.
pub fn write_gguf(path: &Path) -> Result<()> {
    let config = json("config.json")?;
    let shape = Shape {
        hidden: number(&config, "hidden_size")?,
        layers: number(&config, "num_hidden_layers")?,
        heads: number(&config, "num_attention_heads")?,
        kv_heads: number(&config, "num_key_value_heads")?,
    };
    let file = fs::read(kjv().join("model.safetensors"))?;
    let weights = SafeTensors::deserialize(&file)?;
    let (own, gguf) = (NameScheme::HuggingFace, NameScheme::Gguf);
    let mut names = vec![
        (
            own.token_embedding().to_owned(),
            gguf.token_embedding().to_owned(),
            None,
        ),
        (
            own.final_norm().to_owned(),
            gguf.final_norm().to_owned(),
            None,
        ),
    ];
    for layer in 0..shape.layers {
        names.extend([
            (own.q(layer), gguf.q(layer), Some(shape.heads)),
            (own.k(layer), gguf.k(layer), Some(shape.kv_heads)),
            (own.v(layer), gguf.v(layer), None),
            (own.o(layer), gguf.o(layer), None),
            (own.gate(layer), gguf.gate(layer), None),
            (own.up(layer), gguf.up(layer), None),
            (own.down(layer), gguf.down(layer), None),
            (own.attn_norm(layer), gguf.attn_norm(layer), None),
            (own.ffn_norm(layer), gguf.ffn_norm(layer), None),
        ]);
    }
    ensure!(names.len() == weights.len(), "{} tensors", weights.len());
    let mut writer = metadata(&config, &shape)?;
    for (from, to, heads) in names {
        let tensor = weights.tensor(&from)?;
        ensure!(tensor.dtype() == Dtype::BF16, "{from} is no BF16");
        let dims: Vec<u64> = tensor.shape().iter().rev().map(|n| *n as u64).collect();
        let rows = tensor.shape().first().copied().context("no shape")?;
        let (kind, data) = match (dims.len(), heads) {
            // llama.cpp wants norms in F32.
            (1, _) => (F32, wide(tensor.data())),
            (_, Some(heads)) => (BF16, turned(tensor.data(), heads, rows)?),
            _ => (BF16, tensor.data().to_vec()),
        };
        writer = writer.tensor(&to, &dims, kind, data);
    }
    Ok(fs::write(path, writer.write())?)
}
