//! A model's sizes and constants, from `config.json` or from GGUF metadata, in one form.
//!
//! Every number is checked against [`limits`] and the others here, so that later code may multiply them
//! without fear; whether the weights agree is checked tensor by tensor ([`Weights::expect`]).

mod experts;
#[cfg(test)]
mod family_tests;
mod fields;
mod floats8;
mod gemma3;
mod rope;
#[cfg(test)]
mod tests;
mod window;

use serde_json::{Map, Value};

use crate::format::gguf::{GgufError, Metadata};
use crate::format::{ModelError, limits, shown};
use crate::weights::{NameScheme, Weights};
pub use experts::Experts;
use fields::{
    CONTEXT, Checked, EXPERTS, Fields, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, Key,
    LAYERS, RMS_EPS, THETA, VOCAB, WINDOW, brief, token_id, token_ids,
};
pub use floats8::Floats8;
pub use rope::{Rope, RopeScaling};
use window::Window;

/// A family of models that share one forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3.3 and the many models of its form.
    Llama,
    /// Mistral 7B and its like; in GGUF files they are `llama`.
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Qwen 3, a mixture of experts.
    Qwen3Moe,
    /// Gemma 3, text.
    Gemma3,
}

/// What is known about an architecture.
#[derive(Debug)]
struct Row {
    architecture: Architecture,
    /// Its name in the list `architectures` of `config.json`.
    class: &'static str,
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// `general.architecture` in GGUF; `None` for one that GGUF does not tell from another.
    gguf: Option<&'static str>,
    /// Whether the query, key and value projections always have biases.
    qkv_bias: bool,
    /// Whether query and key heads are normed.
    qk_norm: bool,
    /// Whether GGUF converters permute the rows of the query and key projections (ggml rope type 0).
    gguf_interleaved: bool,
    /// Whether `attention_bias` of `config.json` is read.
    attention_bias: bool,
    /// `head_dim` where `config.json` gives none, if it is not `hidden / heads`.
    head_dim: Option<usize>,
    window: Window,
    /// The field of `config.json` that names the activation, and its names there.
    activation: (&'static str, &'static [&'static str]),
}

/// SiLU, as all but Gemma have it.
const SILU: (&str, &[&str]) = ("hidden_act", &["silu", "swish"]);

/// All architectures. Sources: transformers `configuration_*.py`, llama.cpp `llama-arch.cpp` and `llama_model_rope_type`.
const ARCHITECTURES: &[Row] = &[
    Row {
        architecture: Architecture::Llama,
        class: "LlamaForCausalLM",
        model_type: "llama",
        gguf: Some("llama"),
        qkv_bias: false,
        qk_norm: false,
        gguf_interleaved: true,
        attention_bias: true,
        head_dim: None,
        window: Window::Never,
        activation: SILU,
    },
    Row {
        architecture: Architecture::Mistral,
        class: "MistralForCausalLM",
        model_type: "mistral",
        gguf: None,
        qkv_bias: false,
        qk_norm: false,
        gguf_interleaved: true,
        attention_bias: false,
        head_dim: None,
        window: Window::Always,
        activation: SILU,
    },
    Row {
        architecture: Architecture::Qwen2,
        class: "Qwen2ForCausalLM",
        model_type: "qwen2",
        gguf: Some("qwen2"),
        qkv_bias: true,
        qk_norm: false,
        gguf_interleaved: false,
        attention_bias: false,
        head_dim: None,
        window: Window::IfAsked,
        activation: SILU,
    },
    Row {
        architecture: Architecture::Qwen3,
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        gguf: Some("qwen3"),
        qkv_bias: false,
        qk_norm: true,
        gguf_interleaved: false,
        attention_bias: true,
        head_dim: Some(128),
        window: Window::IfAsked,
        activation: SILU,
    },
    Row {
        architecture: Architecture::Qwen3Moe,
        class: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        gguf: Some("qwen3moe"),
        qkv_bias: false,
        qk_norm: true,
        gguf_interleaved: false,
        attention_bias: true,
        head_dim: None,
        window: Window::AllIfAsked,
        activation: SILU,
    },
    Row {
        architecture: Architecture::Gemma3,
        class: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        gguf: Some("gemma3"),
        qkv_bias: false,
        qk_norm: true,
        gguf_interleaved: false,
        attention_bias: true,
        head_dim: Some(256),
        window: Window::InPattern,
        activation: ("hidden_activation", &["gelu_pytorch_tanh"]),
    },
];

/// A model's sizes and constants.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its family.
    pub architecture: Architecture,
    /// Tokens in the vocabulary: rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Position embedding.
    pub rope: Rope,
    /// That of the layers that `windowed` marks, where they have another one.
    pub local_rope: Option<Rope>,
    /// What scores are multiplied by in attention.
    pub attention_scale: f64,
    /// What they are then bent to stay within, if at all: `cap · tanh(score / cap)`.
    pub attention_cap: Option<f64>,
    /// The same for logits.
    pub logit_cap: Option<f64>,
    /// Whether the weights of norms are stored less one.
    pub norms_less_one: bool,
    /// The mixture of experts, if it is one.
    pub experts: Option<Experts>,
    /// Positions the model was made for.
    pub context: usize,
    /// How many positions, its own included, a token attends to in the layers that `windowed` marks; smaller
    /// than `context`.
    pub sliding_window: Option<usize>,
    /// For each layer, whether the window holds, if there is one.
    pub windowed: Vec<bool>,
    /// Whether the output head is the token embedding.
    pub tied_embeddings: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    pub o_bias: bool,
    /// Whether query and key heads are normed.
    pub qk_norm: bool,
    /// What is said of weights in 8-bit floats, if that is what they are.
    pub floats8: Option<Floats8>,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// The tokens that end one, without repetition.
    pub eos: Vec<u32>,
}

fn no_architecture(fields: Fields<'_>, found: &str) -> ModelError {
    let gguf = matches!(fields, Fields::Gguf { .. });
    let name = |row: &Row| if gguf { row.gguf } else { Some(row.class) };
    let names: Vec<&str> = ARCHITECTURES.iter().filter_map(name).collect();
    fields.unsupported(format!(
        "architecture {} is not supported; supported are {}",
        shown(found),
        names.join(", ")
    ))
}

impl ModelConfig {
    /// Reads `config.json`, and the end tokens of `generation_config.json`, which precede its own.
    pub fn from_hugging_face(
        config: &Map<String, Value>,
        generation: Option<&Map<String, Value>>,
    ) -> Checked<ModelConfig> {
        let fields = Fields::HuggingFace {
            file: "config.json",
            map: config,
        };
        let row = hugging_face_row(fields)?;
        refuse_hugging_face(fields, row)?;
        let mut model = sizes(fields, row)?;
        model.floats8 = floats8::from_hugging_face(fields)?;
        if row.architecture == Architecture::Gemma3 {
            gemma3::from_hugging_face(fields, &mut model)?;
        } else {
            model.rope.scaling = rope::from_hugging_face(fields, &mut model.rope.theta)?;
            model.tied_embeddings = fields.flag("tie_word_embeddings")?;
        }
        let attention_bias = row.attention_bias && fields.flag("attention_bias")?;
        model.qkv_bias |= attention_bias;
        model.o_bias = attention_bias;
        window::from_hugging_face(fields, row.window, &mut model)?;
        if row.architecture == Architecture::Qwen3Moe {
            model.experts = Some(Experts::from_hugging_face(fields, model.layers)?);
        }
        let generation = generation.map(|map| Fields::HuggingFace {
            file: "generation_config.json",
            map,
        });
        let ids = |name: &str| match generation
            .map(|fields| token_ids(fields, name, model.vocab))
            .transpose()?
        {
            Some(ids) if !ids.is_empty() => Ok(ids),
            _ => token_ids(fields, name, model.vocab),
        };
        (model.bos, model.eos) = (ids("bos_token_id")?.first().copied(), ids("eos_token_id")?);
        Ok(model)
    }

    /// Reads GGUF metadata. Whether there are biases, an output head and rope factors is seen from the tensors.
    pub fn from_gguf(
        file: &str,
        metadata: Metadata<'_>,
        weights: &Weights,
    ) -> Checked<ModelConfig> {
        let fail = |error: GgufError| error.in_file(file);
        let architecture = metadata
            .get_str("general.architecture")
            .map_err(fail)?
            .unwrap_or_default();
        let fields = Fields::Gguf {
            file,
            metadata,
            architecture,
        };
        let row = ARCHITECTURES
            .iter()
            .find(|row| row.gguf == Some(architecture));
        let row = row.ok_or_else(|| no_architecture(fields, architecture))?;
        refuse_gguf(fields, row, metadata)?;

        let mut model = sizes(fields, row)?;
        model.rope.interleaved = row.gguf_interleaved;
        model.rope.scaling = rope::from_gguf(fields, metadata, weights, model.head_dim)?;
        let names = NameScheme::Gguf;
        match row.architecture {
            Architecture::Gemma3 => gemma3::from_gguf(fields, &mut model)?,
            _ => model.set_window(
                fields.uint(&WINDOW)?.filter(|&window| window > 0),
                fields,
                |_| true,
            )?,
        }
        if row.architecture == Architecture::Qwen3Moe {
            model.experts = Some(Experts::from_gguf(fields, model.layers, weights)?);
        }
        model.tied_embeddings = !weights.contains(names.output_head());
        model.qkv_bias |= weights.contains(&names.q_bias(0));
        model.o_bias = weights.contains(&names.o_bias(0));

        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let id = metadata.get_u32(&key).map_err(fail)?;
            id.map(|id| token_id(fields, &key, id.into(), model.vocab))
                .transpose()
        };
        model.bos = id("bos")?;
        for name in ["eos", "eot", "eom"] {
            if let Some(id) = id(name)?.filter(|id| !model.eos.contains(id)) {
                model.eos.push(id);
            }
        }
        Ok(model)
    }

    /// The window of a layer, if it has one: how many positions, its own included, a token attends to.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.is_local(layer))
    }

    /// How far back each kind of layers looks that the model has: without a window first, if some have none.
    pub fn windows(&self) -> Vec<Option<usize>> {
        let mut all: Vec<_> = (0..self.layers).map(|layer| self.window(layer)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// How many kinds of layers there are: at least one.
    pub fn kinds(&self) -> usize {
        self.windows().len().max(1)
    }

    /// Which of [`ModelConfig::windows`] is a layer's.
    pub fn kind(&self, layer: usize) -> usize {
        usize::from(self.window(layer).is_some() && self.kinds() > 1)
    }

    /// Whether a layer is of those that look through the window, even if there is none.
    pub fn is_local(&self, layer: usize) -> bool {
        self.windowed.get(layer) == Some(&true)
    }

    /// A window as long as the context is none.
    fn set_window(
        &mut self,
        window: Option<u64>,
        fields: Fields<'_>,
        holds: impl Fn(usize) -> bool,
    ) -> Checked<()> {
        let Some(window) = window else { return Ok(()) };
        let window = fields.sized(&fields.name(&WINDOW), window, limits::CONTEXT)?;
        let windowed: Vec<bool> = (0..self.layers).map(holds).collect();
        if window < self.context && windowed.contains(&true) {
            (self.sliding_window, self.windowed) = (Some(window), windowed);
        }
        Ok(())
    }
}

/// What both formats say in the same way.
fn sizes(fields: Fields<'_>, row: &Row) -> Checked<ModelConfig> {
    let gguf = matches!(fields, Fields::Gguf { .. });
    let hidden = fields.required(&HIDDEN, limits::HIDDEN)?;
    let layers = fields.required(&LAYERS, limits::LAYERS)?;
    let heads = fields.required(&HEADS, limits::HEADS)?;
    // Without the field transformers takes `heads` for Llama and constants for the others.
    let kv_heads = match fields.size(&KV_HEADS, limits::HEADS)? {
        Some(kv_heads) => kv_heads,
        None if gguf || row.architecture == Architecture::Llama => heads,
        None => return Err(fields.missing(&KV_HEADS)),
    };
    if !heads.is_multiple_of(kv_heads) {
        let (heads_name, kv_name) = (fields.name(&HEADS), fields.name(&KV_HEADS));
        return Err(fields.corrupt(format!(
            "{heads_name} ({heads}) is not a multiple of {kv_name} ({kv_heads})"
        )));
    }
    let head_dim = match fields.size(&HEAD_DIM, limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None => match row.head_dim.filter(|_| !gguf) {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => {
                fields.sized("the head width", (hidden / heads) as u64, limits::HEAD_DIM)?
            }
            None => {
                let (hidden_name, heads_name) = (fields.name(&HIDDEN), fields.name(&HEADS));
                return Err(fields.corrupt(format!(
                    "{hidden_name} ({hidden}) is not a multiple of {heads_name} ({heads})"
                )));
            }
        },
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fields.corrupt(format!(
            "the head width {head_dim} is odd, so that it cannot be rotated"
        )));
    }
    let vocab = match fields {
        Fields::HuggingFace { .. } => fields.required(&VOCAB, limits::VOCAB)?,
        Fields::Gguf { file, metadata, .. } => {
            let tokens = metadata
                .get_array("tokenizer.ggml.tokens")
                .map_err(|error| error.in_file(file))?;
            match tokens {
                Some(tokens) => fields.sized(
                    "the length of tokenizer.ggml.tokens",
                    tokens.len() as u64,
                    limits::VOCAB,
                )?,
                None => fields.required(&VOCAB, limits::VOCAB)?,
            }
        }
    };
    let rms_eps = match fields.float_in(&RMS_EPS, 1e-12, 1.0)? {
        Some(eps) => eps,
        None if gguf => return Err(fields.missing(&RMS_EPS)),
        None => 1e-6,
    };
    let theta = fields.float_in(&THETA, 1.0, 1e12)?.unwrap_or(10_000.0);
    Ok(ModelConfig {
        architecture: row.architecture,
        vocab,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate: fields.required(&INTERMEDIATE, limits::INTERMEDIATE)?,
        rms_eps: rms_eps as f32,
        rope: Rope {
            theta,
            scaling: RopeScaling::None,
            interleaved: false,
        },
        local_rope: None,
        attention_scale: 1.0 / (head_dim as f64).sqrt(),
        attention_cap: None,
        logit_cap: None,
        norms_less_one: false,
        experts: None,
        context: fields.required(&CONTEXT, limits::CONTEXT)?,
        sliding_window: None,
        windowed: vec![false; layers],
        tied_embeddings: false,
        qkv_bias: row.qkv_bias,
        o_bias: false,
        qk_norm: row.qk_norm,
        floats8: None,
        bos: None,
        eos: Vec::new(),
    })
}

fn hugging_face_row(fields: Fields<'_>) -> Checked<&'static Row> {
    let class = fields
        .json("architectures")
        .and_then(|list| list.get(0))
        .and_then(Value::as_str);
    let model_type = fields.json("model_type").and_then(Value::as_str);
    let row = ARCHITECTURES.iter().find(|row| match class {
        Some(class) => row.class == class,
        None => Some(row.model_type) == model_type,
    });
    row.ok_or_else(|| no_architecture(fields, class.or(model_type).unwrap_or("(none given)")))
}

/// Refuses what would change the computation and is not computed.
fn refuse_hugging_face(fields: Fields<'_>, row: &Row) -> Checked<()> {
    let (field, names) = row.activation;
    let known = |act: &&Value| act.as_str().is_some_and(|act| names.contains(&act));
    if let Some(act) = fields.json(field).filter(|act| !known(act)) {
        return Err(fields.unsupported(format!(
            "{field} {} is not supported, only '{}' is",
            brief(act),
            names.first().unwrap_or(&"none")
        )));
    }
    if fields.flag("mlp_bias")? {
        return Err(fields.unsupported(
            "mlp_bias is not supported; use a model without biases in its feed-forward layers"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Refuses what would change the computation and is not computed.
fn refuse_gguf(fields: Fields<'_>, row: &Row, metadata: Metadata<'_>) -> Checked<()> {
    let fail = |error: GgufError| error.in_file(&fields.file());
    if let Some(kind) = metadata
        .get_str("general.type")
        .map_err(fail)?
        .filter(|&kind| kind != "model")
    {
        return Err(fields.unsupported(format!(
            "it holds a {} rather than a model; name the model's file",
            shown(kind)
        )));
    }
    if metadata
        .get_u32("split.count")
        .map_err(fail)?
        .is_some_and(|count| count > 1)
    {
        let what = "it is one part of a split model, which is not supported; join the parts with llama-gguf-split --merge";
        return Err(fields.unsupported(what.to_owned()));
    }
    if fields.gguf_flag("attention.causal")? == Some(false) {
        let causal = fields.name(&Key("", "attention.causal"));
        let what = format!("{causal} is false: models that embed text are not supported");
        return Err(fields.unsupported(what));
    }
    if row.architecture != Architecture::Qwen3Moe
        && fields.uint(&EXPERTS)?.is_some_and(|count| count > 0)
    {
        let what = format!(
            "{} is not 0: mixtures of experts are supported in qwen3moe only",
            fields.name(&EXPERTS)
        );
        return Err(fields.unsupported(what));
    }
    Ok(())
}
