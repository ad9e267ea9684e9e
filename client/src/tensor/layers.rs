//! Methods that layers of models are made of: norms, positions, attention, experts.

use hotcell_graph::op::Attribute;

use super::{
    array::Tensor,
    ops::{ints, name, one},
};

/// How attention looks at the keys. The default scales by 1 and sees all of them.
#[derive(Clone, Debug)]
pub struct AttentionOptions {
    /// What scores are multiplied by, mostly `1/√d`.
    pub scale: f64,
    /// Keys after a query are hidden. Queries stand at the end of the keys.
    pub causal: bool,
    /// With a number above 0, keys so many or more before a query are hidden.
    pub window: i64,
    /// With a number c above 0, a score becomes `c · tanh(score / c)`.
    pub soft_cap: f64,
    /// Which keys are seen (bool), or what is added to the scores; broadcast to `[B, Hq, T, S]`.
    pub mask: Option<Tensor>,
    /// One score per head, `[Hq]`, that takes part in the softmax and has no value.
    pub sinks: Option<Tensor>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self {
            scale: 1.0,
            causal: false,
            window: 0,
            soft_cap: 0.0,
            mask: None,
            sinks: None,
        }
    }
}

/// Which elements a rotary embedding turns together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RotaryForm {
    /// `(2i, 2i + 1)`.
    Norm,
    /// `(i, i + dims/2)`.
    #[default]
    Neox,
    /// As [`RotaryForm::Neox`], by four rows of positions in runs of pairs.
    Mrope,
    /// `(i, i + dims)`, by the first of four rows of positions.
    Vision,
    /// As [`RotaryForm::Mrope`], the rows taking turns.
    Imrope,
}

impl RotaryForm {
    fn name(self) -> &'static str {
        match self {
            RotaryForm::Norm => "norm",
            RotaryForm::Neox => "neox",
            RotaryForm::Mrope => "mrope",
            RotaryForm::Vision => "vision",
            RotaryForm::Imrope => "imrope",
        }
    }
}

/// How far a rotary embedding turns what. The default is that of most models, base 10,000, without scaling.
#[derive(Clone, Debug)]
pub struct RotaryOptions {
    /// Pairs.
    pub form: RotaryForm,
    /// Elements of a head that turn, from the first on; 0: all.
    pub dims: i64,
    /// Pair i turns by `base^(−2i/dims)`; 0: by `1 / freqs[i]`.
    pub base: f64,
    /// What positions are multiplied by.
    pub scale: f64,
    /// `[dims/2]` factors of the frequencies.
    pub freqs: Option<Tensor>,
    /// Whether frequencies are divided by `freqs` where there is a base.
    pub factors_divide: bool,
    /// YaRN: tokens of the context that the model was trained on.
    pub original_context: i64,
    /// YaRN, above 0: how much of it.
    pub extrapolation: f64,
    /// What sine and cosine are multiplied by.
    pub attention_factor: f64,
    /// YaRN: pairs that turn more often in the original context are not scaled.
    pub beta_fast: f64,
    /// YaRN: pairs that turn less often are scaled whole.
    pub beta_slow: f64,
    /// Pairs that each of four rows of positions turns, in the forms that have them.
    pub sections: Vec<i64>,
}

impl Default for RotaryOptions {
    fn default() -> Self {
        Self {
            form: RotaryForm::default(),
            dims: 0,
            base: 10_000.0,
            scale: 1.0,
            freqs: None,
            factors_divide: false,
            original_context: 0,
            extrapolation: 0.0,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            sections: vec![],
        }
    }
}

impl Tensor {
    /// `x·w / √(mean(x²) + eps)` over the innermost axis.
    pub fn rms_norm(&self, weight: Option<&Tensor>, eps: f64) -> Tensor {
        one(
            "rms_norm",
            &[Some(self), weight],
            vec![Attribute::Float(eps)],
        )
    }

    /// `(x − mean)/√(variance + eps)·w + b` over the innermost axis.
    pub fn layer_norm(&self, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Tensor {
        one(
            "layer_norm",
            &[Some(self), weight, bias],
            vec![Attribute::Float(eps)],
        )
    }

    /// `x / max(√Σx², eps)` over the innermost axis.
    pub fn l2_norm(&self, eps: f64) -> Tensor {
        one("l2_norm", &[Some(self)], vec![Attribute::Float(eps)])
    }

    /// [`Tensor::layer_norm`] of `[n, c, …]` over each of `groups` runs of channels, then `weight` and `bias` `[c]`.
    pub fn group_norm(
        &self,
        groups: i64,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Tensor {
        let attributes = vec![Attribute::Int(groups), Attribute::Float(eps)];
        one("group_norm", &[Some(self), weight, bias], attributes)
    }

    /// `g · σ(alpha · g) · (u + 1)`, `g = min(self, limit)` and `u = up` held within ±`limit` (gpt-oss).
    pub fn swiglu_limit(&self, up: &Tensor, alpha: f64, limit: f64) -> Tensor {
        let attributes = vec![Attribute::Float(alpha), Attribute::Float(limit)];
        one("swiglu_limit", &[Some(self), Some(up)], attributes)
    }

    /// Attention of queries `[B, Hq, T, D]` over keys `[B, Hkv, S, D]` and values `[B, Hkv, S, Dv]`.
    pub fn attention(&self, keys: &Tensor, values: &Tensor, options: &AttentionOptions) -> Tensor {
        let attributes = vec![
            Attribute::Float(options.scale),
            Attribute::Bool(options.causal),
            Attribute::Int(options.window),
            Attribute::Float(options.soft_cap),
        ];
        let (mask, sinks) = (options.mask.as_ref(), options.sinks.as_ref());
        let inputs = [Some(self), Some(keys), Some(values), mask, sinks];
        one("scaled_dot_product_attention", &inputs, attributes)
    }

    /// Rotary embedding of `[…, t, d]` at `positions`, which broadcast to `[…, t]` (`[4, t]` in the forms with sections).
    pub fn rotary_embedding(&self, positions: &Tensor, options: &RotaryOptions) -> Tensor {
        let attributes = vec![
            name(options.form.name()),
            Attribute::Int(options.dims),
            Attribute::Float(options.base),
            Attribute::Float(options.scale),
            Attribute::Bool(options.factors_divide),
            Attribute::Int(options.original_context),
            Attribute::Float(options.extrapolation),
            Attribute::Float(options.attention_factor),
            Attribute::Float(options.beta_fast),
            Attribute::Float(options.beta_slow),
            ints(&options.sections),
        ];
        let inputs = [Some(self), Some(positions), options.freqs.as_ref()];
        one("rotary_embedding", &inputs, attributes)
    }

    /// Rotary embedding of f32 `[m, heads, d]` at `positions` i32 `[m]`, with a frequency per pair, f32 `[d/2]`.
    pub fn rope(&self, positions: &Tensor, frequencies: &Tensor, interleaved: bool) -> Tensor {
        let inputs = [Some(self), Some(positions), Some(frequencies)];
        one("rope", &inputs, vec![Attribute::Bool(interleaved)])
    }

    /// Each token's f32 `[t, u, k]` (or `[t, 1, k]`) times its experts: `self` is `[e, n, k]`, of which `ids` `[t, u]` chooses.
    pub fn mul_mat_id(&self, x: &Tensor, ids: &Tensor) -> Tensor {
        one("mul_mat_id", &[Some(self), Some(x), Some(ids)], vec![])
    }

    /// `self` f32 `[m, k]` times weights `[n, k]` with a scale, f32, for each `height` × `width` of them: `[m, n]`.
    pub fn mul_mat_scaled(
        &self,
        w: &Tensor,
        scales: &Tensor,
        [height, width]: [usize; 2],
    ) -> Tensor {
        let attributes = vec![Attribute::Int(height as i64), Attribute::Int(width as i64)];
        let inputs = [Some(self), Some(w), Some(scales)];
        one("mul_mat_scaled", &inputs, attributes)
    }

    /// [`Tensor::mul_mat_id`] with experts that have a scale, f32, for each `height` × `width` of their weights.
    pub fn mul_mat_id_scaled(
        &self,
        x: &Tensor,
        ids: &Tensor,
        scales: &Tensor,
        [height, width]: [usize; 2],
    ) -> Tensor {
        let attributes = vec![Attribute::Int(height as i64), Attribute::Int(width as i64)];
        let inputs = [Some(self), Some(x), Some(ids), Some(scales)];
        one("mul_mat_id_scaled", &inputs, attributes)
    }

    /// `self[lhs] @ other[rhs]`, of matrices that `lhs` and `rhs` name among all; none: each where it stands.
    pub fn gather_mm(&self, other: &Tensor, lhs: Option<&Tensor>, rhs: Option<&Tensor>) -> Tensor {
        // Whether they are sorted is a hint that changes nothing.
        let attributes = vec![Attribute::Bool(false)];
        one(
            "gather_mm",
            &[Some(self), Some(other), lhs, rhs],
            attributes,
        )
    }

    /// `self[t, u, :] + biases[ids[t, u], :]`: the bias of the expert that a token uses.
    pub fn add_id(&self, biases: &Tensor, ids: &Tensor) -> Tensor {
        one("add_id", &[Some(self), Some(biases), Some(ids)], vec![])
    }
}
