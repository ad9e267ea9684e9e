//! Mixtures of experts: what the two formats say about them.

use super::fields::{Checked, EXPERTS, Fields, Key};
use crate::format::limits;
use crate::weights::{NameScheme, Weights};

/// Experts of a token.
const USED: Key = Key("num_experts_per_tok", "expert_used_count");
/// Width of an expert.
const INTERMEDIATE: Key = Key("moe_intermediate_size", "expert_feed_forward_length");
/// Of how many layers the last one has experts.
const STEP: Key = Key("decoder_sparse_step", "");

/// A mixture of experts: the router takes some of each layer's experts for each token.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How many each layer has.
    pub count: usize,
    /// How many a token uses; at most `count`.
    pub used: usize,
    /// Width of an expert's feed-forward layer.
    pub intermediate: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// For each layer, whether it has experts; one that has none is dense.
    pub layers: Vec<bool>,
}

impl Experts {
    fn read(
        fields: Fields<'_>,
        count: &Key,
        normalised: bool,
        layers: Vec<bool>,
    ) -> Checked<Experts> {
        let used = fields.required(&USED, limits::EXPERTS)?;
        let (count, name) = (fields.required(count, limits::EXPERTS)?, fields.name(count));
        if used > count {
            let what = format!("{} ({used}) is above {name} ({count})", fields.name(&USED));
            return Err(fields.corrupt(what));
        }
        Ok(Experts {
            count,
            used,
            intermediate: fields.required(&INTERMEDIATE, limits::INTERMEDIATE)?,
            normalised,
            layers,
        })
    }

    /// Source: transformers `configuration_qwen3_moe.py` and `Qwen3MoeDecoderLayer`.
    pub(super) fn from_hugging_face(fields: Fields<'_>, layers: usize) -> Checked<Experts> {
        let step = fields.size(&STEP, usize::MAX)?.unwrap_or(1);
        let mut sparse: Vec<bool> = (1..=layers).map(|n| n.is_multiple_of(step)).collect();
        let dense = "mlp_only_layers";
        if let Some(list) = fields.json(dense) {
            let list = list
                .as_array()
                .ok_or_else(|| fields.corrupt(format!("{dense} is not a list")))?;
            for value in list {
                // One that is not there is no layer's number, as in transformers.
                if let Ok(layer) = usize::try_from(fields.whole(dense, value)?)
                    && let Some(sparse) = sparse.get_mut(layer)
                {
                    *sparse = false;
                }
            }
        }
        // transformers knows the number under two names, and writes either.
        let count = match fields.json(EXPERTS.0) {
            None => Key("num_local_experts", ""),
            Some(_) => EXPERTS,
        };
        if fields.json(count.0).is_none() {
            return Err(fields.missing(&EXPERTS));
        }
        Experts::read(fields, &count, fields.flag("norm_topk_prob")?, sparse)
    }

    /// Source: llama.cpp, which divides by the sum in `qwen3moe` whatever the file says; converters write nothing else.
    pub(super) fn from_gguf(
        fields: Fields<'_>,
        layers: usize,
        weights: &Weights,
    ) -> Checked<Experts> {
        // What other mixtures do, and 0 or 1 where a file says that this one does not.
        let scale = Key("", "expert_weights_scale");
        let mut said = vec![(fields.name(&scale), fields.float(&scale)?)];
        for name in [
            "expert_shared_count",
            "expert_group_count",
            "expert_gating_func",
        ] {
            let key = Key("", name);
            let value = fields.uint(&key)?.map(|value| value as f64);
            said.push((fields.name(&key), value));
        }
        for (name, value) in said {
            let most = if name.ends_with("shared_count") {
                0.0
            } else {
                1.0
            };
            if let Some(value) = value.filter(|&value| value != 0.0 && value != most) {
                return Err(fields.unsupported(format!("{name} {value} is not supported")));
            }
        }
        let names = NameScheme::Gguf;
        let has_router = |layer: usize| weights.contains(&names.router(layer));
        let sparse = (0..layers).map(has_router).collect();
        let normalised = fields.gguf_flag("expert_weights_norm")?.unwrap_or(true);
        Experts::read(fields, &EXPERTS, normalised, sparse)
    }
}
