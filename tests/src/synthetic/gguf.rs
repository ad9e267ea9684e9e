//! A synthetic model as a GGUF file, weights of any type, written in parallel and never held in memory.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use hotcell_graph::DType;
use hotcell_worker::weights::NameScheme;
use testing::{Value, Writer};

use super::{Measures, Part, Tensor, blocks, blocks::is_writable, vocabulary::Vocabulary};
use crate::chance::nth;

// The writer that the reader's own tests use; it depends on nothing.
#[path = "../../../worker/src/format/gguf_testing.rs"]
pub(crate) mod testing;

/// Elements that are made at a time: whole blocks of every dtype.
const PIECE: usize = 1 << 20;
/// Changes whenever the same measures give other bytes.
pub const REVISION: u32 = 1;
/// Determines all weights.
const SEED: u64 = 0x5eed;

/// How the matrices of a file are stored; norms are F32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// All of them like this, the output head too (llama-quantize's `--pure`).
    Pure(DType),
    /// llama.cpp's mix "Q4_K - Medium".
    Q4KM,
}

impl Weights {
    /// Of this name: `q4_k_m` or a dtype's.
    pub fn from_name(name: &str) -> Option<Self> {
        if name == "q4_k_m" {
            return Some(Self::Q4KM);
        }
        let dtype = DType::from_name(name).filter(|dtype| is_writable(*dtype));
        dtype.map(Self::Pure)
    }

    /// All names.
    pub fn names() -> Vec<&'static str> {
        let all = DType::ALL.iter().copied();
        let dtypes = all.filter(|dtype| is_writable(*dtype));
        dtypes.map(DType::name).chain(["q4_k_m"]).collect()
    }

    /// The dtype of a tensor. Q4_K_M and what takes the place of K-quants where a row is no multiple of 256 are
    /// llama.cpp's rules: `llama_tensor_get_type_impl` and `tensor_type_fallback` in src/llama-quant.cpp (2026).
    fn dtype(self, measures: &Measures, tensor: &Tensor) -> DType {
        if tensor.part == Part::Norm {
            return DType::F32;
        }
        let row = tensor.shape.last().copied().unwrap_or(0);
        let wanted = match self {
            Self::Pure(dtype) => dtype,
            Self::Q4KM => {
                let layers = measures.layers;
                let more_bits = |layer: usize| {
                    layer < layers / 8
                        || layer >= 7 * layers / 8
                        || layer.checked_sub(layers / 8).is_some_and(|i| i % 3 == 2)
                };
                let head =
                    tensor.part == Part::Head || (measures.tied && tensor.part == Part::Embedding);
                match tensor.part {
                    _ if head => DType::Q6K,
                    Part::Values(layer) | Part::Down(layer) if more_bits(layer) => DType::Q6K,
                    _ => DType::Q4K,
                }
            }
        };
        if row.is_multiple_of(wanted.block_len()) {
            return wanted;
        }
        match wanted {
            DType::Q4K => DType::Q5_0,
            DType::Q5K => DType::Q5_1,
            DType::Q6K => DType::Q8_0,
            _ => DType::F16,
        }
    }

    /// `general.file_type`: llama.cpp's `llama_ftype` (include/llama.h).
    fn file_type(self) -> u32 {
        match self {
            Self::Q4KM => 15,
            Self::Pure(dtype) => match dtype {
                DType::F16 => 1,
                DType::Q4_0 => 2,
                DType::Q4_1 => 3,
                DType::Q8_0 => 7,
                DType::Q5_0 => 8,
                DType::Q5_1 => 9,
                DType::Q4K => 14,
                DType::Q5K => 16,
                DType::Q6K => 18,
                DType::BF16 => 32,
                DType::MXFP4 => 38,
                DType::NVFP4 => 39,
                _ => 0,
            },
        }
    }
}

/// A tensor in its place.
struct Placed {
    tensor: Tensor,
    dtype: DType,
    bytes: usize,
    offset: usize,
}

fn place(measures: &Measures, weights: Weights, alignment: usize) -> Result<Vec<Placed>> {
    let mut end = 0usize;
    let placed = measures
        .tensors(NameScheme::Gguf)
        .into_iter()
        .map(|tensor| {
            let dtype = weights.dtype(measures, &tensor);
            let elements = tensor.shape.iter().product();
            let bytes = dtype.row_bytes(elements).context("whole blocks")?;
            let offset = end.next_multiple_of(alignment);
            end = offset + bytes;
            Ok(Placed {
                tensor,
                dtype,
                bytes,
                offset,
            })
        });
    placed.collect()
}

/// What a model takes, without making it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Weights, in elements.
    pub parameters: u64,
    /// Weights, in bytes.
    pub bytes: u64,
    /// Bytes that a step reads for one token: all weights, of an embedding that is not the head one row.
    pub bytes_per_token: u64,
    /// Elements of the matrices that each token is multiplied with.
    pub body: u64,
    /// Elements of the output head, which only a token is multiplied with after which one is drawn.
    pub head: u64,
}

/// What a model takes, without making it.
///
/// # Errors
/// When its rows are no whole blocks.
pub fn size(measures: &Measures, weights: Weights) -> Result<Size> {
    let mut size = Size {
        parameters: 0,
        bytes: 0,
        bytes_per_token: 0,
        body: 0,
        head: 0,
    };
    for Placed { tensor, bytes, .. } in place(measures, weights, 1)? {
        let elements = tensor.shape.iter().product::<usize>() as u64;
        let bytes = bytes as u64;
        size.parameters += elements;
        size.bytes += bytes;
        let is_looked_up = tensor.part == Part::Embedding && !measures.tied;
        size.bytes_per_token += match is_looked_up {
            true => bytes / measures.vocab.max(1) as u64,
            false => bytes,
        };
        match tensor.part {
            Part::Norm => {}
            Part::Head => size.head += elements,
            Part::Embedding if measures.tied => size.head += elements,
            Part::Embedding => {}
            _ => size.body += elements,
        }
    }
    Ok(size)
}

/// Metadata and descriptions of tensors, whose data is elsewhere.
fn header(name: &str, measures: &Measures, weights: Weights, placed: &[Placed]) -> Writer {
    let vocabulary = Vocabulary::new(measures.vocab);
    let number = |n: usize| Value::U32(n as u32);
    let text = |text: &str| Value::Str(text.to_owned());
    let mut writer = Writer::default()
        .value("general.architecture", text("llama"))
        .value("general.name", text(name))
        .value("general.file_type", Value::U32(weights.file_type()))
        .value("general.quantization_version", Value::U32(2))
        .value("llama.vocab_size", number(measures.vocab))
        .value("llama.context_length", number(measures.context))
        .value("llama.embedding_length", number(measures.hidden))
        .value("llama.block_count", number(measures.layers))
        .value("llama.feed_forward_length", number(measures.inner))
        .value("llama.attention.head_count", number(measures.heads))
        .value("llama.attention.head_count_kv", number(measures.kv_heads))
        .value("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5))
        .value(
            "llama.rope.dimension_count",
            number(measures.hidden / measures.heads),
        )
        .value("llama.rope.freq_base", Value::F32(10_000.0))
        .value("tokenizer.ggml.model", text("gpt2"))
        .value("tokenizer.ggml.pre", text("gpt-2"))
        .value("tokenizer.ggml.tokens", Value::Strs(vocabulary.tokens))
        .value("tokenizer.ggml.token_type", Value::I32s(vocabulary.kinds))
        .value("tokenizer.ggml.merges", Value::Strs(vocabulary.merges))
        .value("tokenizer.ggml.bos_token_id", Value::U32(vocabulary.begin))
        .value("tokenizer.ggml.eos_token_id", Value::U32(vocabulary.end))
        .value("tokenizer.ggml.add_bos_token", Value::Bool(true));
    for Placed {
        tensor,
        dtype,
        offset,
        ..
    } in placed
    {
        writer.tensors.push(testing::Tensor {
            name: tensor.name.clone(),
            dims: tensor.shape.iter().rev().map(|n| *n as u64).collect(),
            n_dims: None,
            kind: dtype.gguf_id().unwrap_or(u32::MAX),
            data: Vec::new(),
            offset: Some(*offset as u64),
        });
    }
    writer
}

/// A model that is small enough to be held in memory, ready to be written, or to be changed first.
///
/// # Errors
/// As [`write`].
pub fn small(name: &str, measures: &Measures, weights: Weights) -> Result<Writer> {
    ensure_vocabulary(measures)?;
    let placed = place(measures, weights, Writer::default().alignment)?;
    let mut writer = header(name, measures, weights, &placed);
    for (key, (placed, tensor)) in placed.iter().zip(&mut writer.tensors).enumerate() {
        tensor.offset = None;
        tensor.data = piece(
            key,
            measures,
            placed,
            0,
            placed.tensor.shape.iter().product(),
        )?;
    }
    Ok(writer)
}

/// Some elements of a tensor, by its place among them.
fn piece(
    key: usize,
    measures: &Measures,
    placed: &Placed,
    first: usize,
    count: usize,
) -> Result<Vec<u8>> {
    let mut out = vec![0; placed.dtype.row_bytes(count).context("whole blocks")?];
    if placed.tensor.part == Part::Norm {
        out.copy_from_slice(&1f32.to_le_bytes().repeat(count));
    } else {
        let deviation = deviation(measures, &placed.tensor);
        let key = nth(SEED, key as u64);
        blocks::fill(placed.dtype, key, first as u64, deviation, &mut out);
    }
    Ok(out)
}

fn ensure_vocabulary(measures: &Measures) -> Result<()> {
    ensure!(
        measures.vocab >= 258,
        "a vocabulary has 258 tokens at least"
    );
    Ok(())
}

/// The weights' standard deviation. Of a row's products with a normed state that makes about 1, so that states stay
/// small and finite through all layers; logits, about 4, so that some tokens are likelier than others.
fn deviation(measures: &Measures, tensor: &Tensor) -> f32 {
    let row = tensor.shape.last().copied().unwrap_or(1) as f32;
    match tensor.part {
        Part::Embedding | Part::Head => 4.0 / (measures.hidden as f32).sqrt(),
        _ => 1.0 / row.sqrt(),
    }
}

/// Writes a model, and returns its size. The same measures and weights always give the same bytes.
///
/// # Errors
/// When it cannot be written, or its vocabulary is too small for the bytes.
pub fn write(path: &Path, name: &str, measures: &Measures, weights: Weights) -> Result<Size> {
    ensure_vocabulary(measures)?;
    let placed = place(measures, weights, Writer::default().alignment)?;
    let header = header(name, measures, weights, &placed).write();
    let data = header.len();
    let end = placed.last().map_or(0, |last| last.offset + last.bytes);
    let file = File::create(path).with_context(|| path.display().to_string())?;
    file.set_len((data + end) as u64)?;
    file.write_all_at(&header, 0)?;

    let mut pieces = Vec::new();
    for (key, placed) in placed.iter().enumerate() {
        let elements: usize = placed.tensor.shape.iter().product();
        let firsts = (0..elements).step_by(PIECE);
        pieces.extend(firsts.map(|first| (key, placed, first, PIECE.min(elements - first))));
    }
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((key, placed, first, count)) =
            pieces.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let out = piece(*key, measures, placed, *first, *count)?;
            let before = placed.dtype.row_bytes(*first).context("whole blocks")?;
            file.write_all_at(&out, (data + placed.offset + before) as u64)?;
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|thread| {
            let done = thread.join();
            done.map_err(|_| anyhow::anyhow!("a writer panicked"))?
        })
    })?;
    size(measures, weights)
}
