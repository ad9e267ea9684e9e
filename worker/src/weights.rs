//! A model's weights, in place in the files that were handed over, and the names they go by.
//!
//! [`ModelSource::open`] makes them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use hotcell_graph::DType;
use hotcell_graph::dtype::Kind;
use hotcell_ipc::memory::Mapping;
use hotcell_proto::limits;
use sha2::{Digest, Sha256};

pub use crate::format::ModelError;
pub use crate::format::open::{GgufFile, ModelSource, TextSource};
use crate::format::{StoredDType, StoredTensor, shown};
use crate::model::config::Floats8;

/// One file of a model, as it was handed to the worker: a name without folders, and its contents.
#[derive(Clone)]
pub struct ModelFile {
    /// The file's name in its folder, for example `config.json`.
    pub name: String,
    /// Its contents.
    pub mapping: Mapping,
}

impl fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.mapping.bytes().len())
    }
}

/// A tensor of a model, in place in its file.
#[derive(Clone)]
pub struct Weight {
    /// Its element type.
    pub dtype: DType,
    /// Its shape in NumPy order, outermost dimension first (GGUF's own order is the reverse).
    pub shape: Vec<usize>,
    /// The file it is in.
    pub mapping: Mapping,
    /// Where in the file: inside it, and as long as dtype and shape call for. It may be misaligned.
    pub range: Range<usize>,
}

impl Weight {
    /// Its bytes, little endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        self.mapping
            .bytes()
            .get(self.range.clone())
            .unwrap_or_default()
    }

    /// Some of its rows, along the outermost dimension, in place. `None`: it has not so many.
    pub fn rows(&self, rows: Range<usize>) -> Option<Weight> {
        let (&all, inner) = self.shape.split_first()?;
        if rows.start > rows.end || rows.end > all {
            return None;
        }
        let bytes = self.range.len().checked_div(all)?;
        let shape = [&[rows.len()], inner].concat();
        let start = self.range.start + rows.start * bytes;
        Some(Weight {
            dtype: self.dtype,
            shape,
            mapping: self.mapping.clone(),
            range: start..start + rows.len() * bytes,
        })
    }

    /// Some of its rows along the last dimension, counted through all dimensions around that, in place. `None`: it has not so
    /// many.
    pub fn flat_rows(&self, rows: Range<usize>) -> Option<Weight> {
        let (&row, outer) = self.shape.split_last()?;
        let all = outer.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let flat = Weight {
            shape: vec![all, row],
            ..self.clone()
        };
        flat.rows(rows)
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.shape
            .iter()
            .fold(1, |product, &dimension| product.saturating_mul(dimension))
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} at {:?}", self.dtype, self.shape, self.range)
    }
}

/// The scales of a weight's matrices `[n, k]`: one for each rectangle of so many rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scales {
    /// The name of the tensor.
    pub name: String,
    /// Rows of a rectangle, at least 1.
    pub height: usize,
    /// Columns of a rectangle, at least 1.
    pub width: usize,
}

impl Scales {
    /// The height where there is one scale for a matrix, whatever its size.
    pub const WHOLE: usize = 1 << 31;
}

/// The tensors of a model by name. Those of a dtype that Hotcell does not have are known, and an error when
/// they are asked for, so that one in a corner of a file does not spoil the rest.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Weight>,
    /// File and dtype.
    unsupported: BTreeMap<String, (String, String)>,
    files: Vec<ModelFile>,
}

impl Weights {
    /// The tensor of this name, of any dtype and shape.
    pub fn get(&self, name: &str) -> Result<&Weight, ModelError> {
        if let Some(weight) = self.tensors.get(name) {
            return Ok(weight);
        }
        Err(match self.unsupported.get(name) {
            Some((file, dtype)) => ModelError::Unsupported {
                file: file.clone(),
                what: unsupported(name, dtype),
            },
            None => ModelError::MissingTensor {
                tensor: name.to_owned(),
            },
        })
    }

    /// The tensor of this name if it has this shape (outermost dimension first) and a dtype to compute with:
    /// `f32`, `f16`, `bf16`, or quantised blocks. One that another tensor scales is refused.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<&Weight, ModelError> {
        let weight = self.stored(name, shape)?;
        match self.scale_of(name) {
            None => Ok(weight),
            Some(scale) => Err(self.is_scaled(name, weight, &scale)),
        }
    }

    /// [`Weights::expect`] of matrices `[…, n, k]`, which may be scaled as checkpoints of 8-bit floats and llama.cpp's files of
    /// NVFP4 are: each as a whole, or its rows, or the rectangles that the configuration says. Where it says something, 8-bit
    /// floats without scales are incomplete.
    pub fn expect_scaled(
        &self,
        name: &str,
        shape: &[usize],
        said: Option<Floats8>,
    ) -> Result<(&Weight, Option<Scales>), ModelError> {
        let weight = self.stored(name, shape)?;
        let rectangle = said.and_then(|said| said.rectangle);
        let Some(scale) = self.scale_of(name) else {
            return match said {
                Some(_) if weight.dtype == DType::F8E4M3 => Err(ModelError::MissingTensor {
                    tensor: format!("{name}_scale{}", rectangle.map_or("", |_| "_inv")),
                }),
                _ => Ok((weight, None)),
            };
        };
        let found = self.get(&scale)?;
        let float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        // Blocks have scales of whole rows only.
        let is_block = weight.dtype.kind() == Kind::Block && weight.dtype != DType::F8E4M3;
        let (true, [before @ .., n, k]) = (float(found.dtype), shape) else {
            return Err(self.is_scaled(name, weight, &scale));
        };
        // Axes of 1 at the end make no difference.
        let of = |own: &[usize]| {
            let expected = [before, own].concat();
            let rest = found.shape.strip_prefix(expected.as_slice());
            rest.is_some_and(|rest| rest.iter().all(|n| *n == 1))
        };
        let cut = rectangle.map(|[height, width]| [n.div_ceil(height), k.div_ceil(width)]);
        let [height, width] = match (rectangle, cut) {
            _ if of(&[]) => [Scales::WHOLE, *k],
            (Some(rectangle), Some(cut)) if of(&cut) && !is_block => rectangle,
            _ if of(&[*n]) => [1, *k],
            _ => {
                return Err(ModelError::ShapeMismatch {
                    tensor: scale,
                    expected: [before, &cut.unwrap_or([*n, 1])].concat(),
                    found: found.shape.clone(),
                });
            }
        };
        Ok((
            weight,
            Some(Scales {
                name: scale,
                height: height.max(1),
                width: width.max(1),
            }),
        ))
    }

    /// The tensor of this name, scaled or not, if it has this shape and a dtype to compute with.
    fn stored(&self, name: &str, shape: &[usize]) -> Result<&Weight, ModelError> {
        let weight = self.get(name)?;
        if weight.shape != shape {
            let (expected, found) = (shape.to_vec(), weight.shape.clone());
            return Err(ModelError::ShapeMismatch {
                tensor: name.to_owned(),
                expected,
                found,
            });
        }
        let float = matches!(weight.dtype, DType::F32 | DType::F16 | DType::BF16);
        match float || weight.dtype.kind() == Kind::Block {
            true => Ok(weight),
            false => Err(self.refused(weight, unsupported(name, weight.dtype.name()))),
        }
    }

    fn is_scaled(&self, name: &str, weight: &Weight, scale: &str) -> ModelError {
        let what = format!(
            "tensor {} is to be multiplied with tensor {}, which is not supported; use a file without such scales",
            shown(name),
            shown(scale)
        );
        self.refused(weight, what)
    }

    fn refused(&self, weight: &Weight, what: String) -> ModelError {
        let holds = |file: &&ModelFile| std::ptr::eq(file.mapping.bytes(), weight.mapping.bytes());
        let file = self.files.iter().find(holds);
        ModelError::Unsupported {
            file: file.map_or_else(String::new, |file| file.name.clone()),
            what,
        }
    }

    /// The tensor that scales this one, if there is one. DeepSeek's and transformers' files have `NAME_scale_inv` (which is the
    /// scale itself), others `NAME_scale`; llama.cpp's of NVFP4 have `NAME.scale` beside `NAME.weight`.
    fn scale_of(&self, name: &str) -> Option<String> {
        let of_llama = name.strip_suffix(".weight");
        let of_llama = of_llama.map(|name| format!("{name}.scale"));
        let mut all = ["_scale_inv", "_scale"]
            .map(|end| format!("{name}{end}"))
            .into_iter()
            .chain(of_llama);
        all.find(|scale| self.contains(scale))
    }

    /// Whether there is a tensor of this name, supported or not.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.unsupported.contains_key(name)
    }

    /// The supported tensors, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Weight)> {
        self.tensors
            .iter()
            .map(|(name, weight)| (name.as_str(), weight))
    }

    /// How many supported tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The sum of the supported tensors' sizes in bytes.
    pub fn size(&self) -> usize {
        self.tensors.values().map(|weight| weight.range.len()).sum()
    }

    /// The files that hold tensors.
    pub fn files(&self) -> &[ModelFile] {
        &self.files
    }

    /// The first file that was changed since it was handed out, if any: the answer is then `MODEL_CHANGED`.
    pub fn changed_file(&self) -> Option<&str> {
        self.files
            .iter()
            .find(|file| !file.mapping.unchanged())
            .map(|file| file.name.as_str())
    }

    /// A hash that tells models apart: 128-bit FNV-1a over the sizes of the files (in the order of their
    /// names) and, for each supported tensor in alphabetical order, its name, dtype, shape, and bytes, of
    /// which only the first and last 4 KiB are read where there are more than 8 KiB. Variable parts are
    /// preceded by their lengths.
    ///
    /// It is **not cryptographic**: whoever wants two models with one fingerprint can make them, and a change
    /// in the middle of a tensor goes unseen. It catches another quantisation, fine-tune or revision.
    pub fn fingerprint(&self) -> u128 {
        const SAMPLE: usize = 4096;
        let mut hash = Fnv::new();
        hash.number(self.files.len());
        self.files
            .iter()
            .for_each(|file| hash.number(file.mapping.bytes().len()));
        for (name, weight) in &self.tensors {
            hash.field(name.as_bytes());
            hash.field(weight.dtype.name().as_bytes());
            hash.number(weight.shape.len());
            weight
                .shape
                .iter()
                .for_each(|&dimension| hash.number(dimension));
            let bytes = weight.bytes();
            hash.number(bytes.len());
            match (bytes.first_chunk::<SAMPLE>(), bytes.last_chunk::<SAMPLE>()) {
                (Some(first), Some(last)) if bytes.len() > 2 * SAMPLE => {
                    hash.bytes(first);
                    hash.bytes(last);
                }
                _ => hash.bytes(bytes),
            }
        }
        hash.0
    }

    /// How many parts [`Weights::part`] hashes.
    pub fn parts(&self) -> u32 {
        let parts = self.files.iter().map(|file| file.mapping.len());
        let parts: usize = parts
            .map(|bytes| bytes.div_ceil(limits::WEIGHTS_PART))
            .sum();
        u32::try_from(parts).unwrap_or(u32::MAX)
    }

    /// Where a part is.
    fn place(&self, index: u32) -> Option<(&Mapping, Range<usize>)> {
        let mut index = index as usize;
        for file in &self.files {
            let bytes = file.mapping.len();
            let parts = bytes.div_ceil(limits::WEIGHTS_PART);
            if index < parts {
                let start = index * limits::WEIGHTS_PART;
                return Some((
                    &file.mapping,
                    start..bytes.min(start + limits::WEIGHTS_PART),
                ));
            }
            index -= parts;
        }
        None
    }

    /// SHA-256 of a part of the files that hold tensors, [`limits::WEIGHTS_PART`] bytes of one of them, or what is left
    /// of it; none if there are fewer parts.
    pub fn part(&self, index: u32) -> Option<[u8; 32]> {
        let (mapping, range) = self.place(index)?;
        Some(Sha256::digest(mapping.bytes().get(range)?).into())
    }

    /// Lets go of the pages in which a part lies.
    pub fn forget_part(&self, index: u32) {
        if let Some((mapping, range)) = self.place(index) {
            // What stays takes room, nothing else.
            let _ = mapping.forget(range);
        }
    }

    /// Adds a file's tensors.
    pub(crate) fn add(
        &mut self,
        file: &ModelFile,
        stored: Vec<StoredTensor>,
    ) -> Result<(), ModelError> {
        for StoredTensor {
            name,
            dtype,
            shape,
            range,
        } in stored
        {
            if self.contains(&name) {
                let what = format!(
                    "tensor {} is also in another file of the model",
                    shown(&name)
                );
                return Err(ModelError::Corrupt {
                    file: file.name.clone(),
                    what,
                });
            }
            match dtype {
                StoredDType::Known(dtype) => {
                    let mapping = file.mapping.clone();
                    self.tensors.insert(
                        name,
                        Weight {
                            dtype,
                            shape,
                            mapping,
                            range,
                        },
                    );
                }
                StoredDType::Other(dtype) => {
                    self.unsupported.insert(name, (file.name.clone(), dtype));
                }
            }
        }
        self.files.push(file.clone());
        Ok(())
    }
}

fn unsupported(tensor: &str, dtype: &str) -> String {
    format!(
        "tensor {} is stored as {dtype}, which is not supported; use a model in f32, f16, bf16, f8_e4m3, q8_0, q4_0 or q4_k",
        shown(tensor)
    )
}

/// 128-bit FNV-1a (Fowler, Noll, Vo; draft-eastlake-fnv).
pub(crate) struct Fnv(pub(crate) u128);

impl Fnv {
    fn new() -> Fnv {
        Fnv(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 =
                (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    fn number(&mut self, number: usize) {
        self.bytes(&(number as u64).to_le_bytes());
    }

    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.bytes(bytes);
    }
}

/// How a model's files name its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameScheme {
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
    /// `blk.0.attn_q.weight`
    Gguf,
}

macro_rules! layer_names {
    ($($(#[$doc:meta])* $function:ident $hf:literal $gguf:literal;)*) => {
        $($(#[$doc])* pub fn $function(self, layer: usize) -> String {
            match self {
                NameScheme::HuggingFace => format!(concat!("model.layers.{}.", $hf), layer),
                NameScheme::Gguf => format!(concat!("blk.{}.", $gguf), layer),
            }
        })*
    };
}

macro_rules! expert_names {
    ($($(#[$doc:meta])* $function:ident $hf:literal $gguf:literal;)*) => {
        $($(#[$doc])* pub fn $function(self, layer: usize, expert: usize) -> String {
            match self {
                NameScheme::HuggingFace => {
                    format!(concat!("model.layers.{}.mlp.experts.{}.", $hf, ".weight"), layer, expert)
                }
                NameScheme::Gguf => format!(concat!("blk.{}.", $gguf, ".{}.weight"), layer, expert),
            }
        })*
    };
}

impl NameScheme {
    /// The token embedding, `[vocab, hidden]`.
    pub fn token_embedding(self) -> &'static str {
        match self {
            NameScheme::HuggingFace => "model.embed_tokens.weight",
            NameScheme::Gguf => "token_embd.weight",
        }
    }

    /// The norm after the last layer, `[hidden]`.
    pub fn final_norm(self) -> &'static str {
        match self {
            NameScheme::HuggingFace => "model.norm.weight",
            NameScheme::Gguf => "output_norm.weight",
        }
    }

    /// The output head, `[vocab, hidden]`; absent where embeddings are tied.
    pub fn output_head(self) -> &'static str {
        match self {
            NameScheme::HuggingFace => "lm_head.weight",
            NameScheme::Gguf => "output.weight",
        }
    }

    layer_names! {
        /// The norm before attention, `[hidden]`.
        attn_norm "input_layernorm.weight" "attn_norm.weight";
        /// The query projection, `[heads × head_dim, hidden]`.
        q "self_attn.q_proj.weight" "attn_q.weight";
        /// The query projection's bias, `[heads × head_dim]`.
        q_bias "self_attn.q_proj.bias" "attn_q.bias";
        /// The key projection, `[kv_heads × head_dim, hidden]`.
        k "self_attn.k_proj.weight" "attn_k.weight";
        /// The key projection's bias, `[kv_heads × head_dim]`.
        k_bias "self_attn.k_proj.bias" "attn_k.bias";
        /// The value projection, `[kv_heads × head_dim, hidden]`.
        v "self_attn.v_proj.weight" "attn_v.weight";
        /// The value projection's bias, `[kv_heads × head_dim]`.
        v_bias "self_attn.v_proj.bias" "attn_v.bias";
        /// The projection of attention's result, `[hidden, heads × head_dim]`.
        o "self_attn.o_proj.weight" "attn_output.weight";
        /// Its bias, `[hidden]`.
        o_bias "self_attn.o_proj.bias" "attn_output.bias";
        /// The norm of each query head, `[head_dim]`.
        q_norm "self_attn.q_norm.weight" "attn_q_norm.weight";
        /// The norm of each key head, `[head_dim]`.
        k_norm "self_attn.k_norm.weight" "attn_k_norm.weight";
        /// The norm before the feed-forward layer, `[hidden]`.
        ffn_norm "post_attention_layernorm.weight" "ffn_norm.weight";
        /// The feed-forward gate, `[intermediate, hidden]`.
        gate "mlp.gate_proj.weight" "ffn_gate.weight";
        /// The feed-forward up projection, `[intermediate, hidden]`.
        up "mlp.up_proj.weight" "ffn_up.weight";
        /// The feed-forward down projection, `[hidden, intermediate]`.
        down "mlp.down_proj.weight" "ffn_down.weight";
        /// Gemma's norm of what attention gives, `[hidden]`.
        attn_post_norm "post_attention_layernorm.weight" "post_attention_norm.weight";
        /// Gemma's norm before the feed-forward layer, `[hidden]`.
        ffn_pre_norm "pre_feedforward_layernorm.weight" "ffn_norm.weight";
        /// Gemma's norm of what the feed-forward layer gives, `[hidden]`.
        ffn_post_norm "post_feedforward_layernorm.weight" "post_ffw_norm.weight";
        /// What scores the experts, `[experts, hidden]`.
        router "mlp.gate.weight" "ffn_gate_inp.weight";
        /// The gates of all experts, `[experts, intermediate, hidden]`.
        gate_experts "mlp.experts.gate_proj" "ffn_gate_exps.weight";
        /// The up projections of all experts, `[experts, intermediate, hidden]`.
        up_experts "mlp.experts.up_proj" "ffn_up_exps.weight";
        /// Both, the gate of an expert above its up projection, `[experts, 2 × intermediate, hidden]`.
        gate_up_experts "mlp.experts.gate_up_proj" "ffn_gate_up_exps.weight";
        /// The down projections of all experts, `[experts, hidden, intermediate]`.
        down_experts "mlp.experts.down_proj" "ffn_down_exps.weight";
    }

    expert_names! {
        /// An expert's gate, `[intermediate, hidden]`, where experts are not stacked.
        expert_gate "gate_proj" "ffn_gate";
        /// An expert's up projection, `[intermediate, hidden]`.
        expert_up "up_proj" "ffn_up";
        /// An expert's down projection, `[hidden, intermediate]`.
        expert_down "down_proj" "ffn_down";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        // Vectors of draft-eastlake-fnv.
        assert_eq!(Fnv::new().0, 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        let mut hash = Fnv::new();
        hash.bytes(b"a");
        assert_eq!(hash.0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn names_follow_their_scheme() {
        let (hf, gguf) = (NameScheme::HuggingFace, NameScheme::Gguf);
        assert_eq!(hf.q(3), "model.layers.3.self_attn.q_proj.weight");
        assert_eq!(gguf.q(3), "blk.3.attn_q.weight");
        assert_eq!(
            hf.ffn_norm(0),
            "model.layers.0.post_attention_layernorm.weight"
        );
        assert_eq!(gguf.o(10), "blk.10.attn_output.weight");
        assert_eq!(
            hf.expert_up(3, 17),
            "model.layers.3.mlp.experts.17.up_proj.weight"
        );
        assert_eq!(gguf.expert_down(3, 17), "blk.3.ffn_down.17.weight");
        assert_eq!(
            (hf.output_head(), gguf.output_head()),
            ("lm_head.weight", "output.weight")
        );
    }
}
