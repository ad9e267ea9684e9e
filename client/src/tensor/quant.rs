//! Methods for quantised matrices in MLX's forms, and for 8-bit floats.

use hotcell_graph::{DType, op::Attribute};

use super::{
    array::{Tensor, invalid},
    ops::{name, one},
};

/// How a matrix is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantMode {
    /// Codes times a scale plus a bias.
    Affine {
        /// Elements that share a scale and a bias: 32, 64 or 128.
        group: i64,
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: i64,
    },
    /// E2M1 times a power of 2, groups of 32.
    Mxfp4,
    /// E4M3 times a power of 2, groups of 32.
    Mxfp8,
    /// E2M1 times an E4M3, groups of 16.
    Nvfp4,
}

impl QuantMode {
    fn attributes(self) -> Vec<Attribute> {
        let (mode, group, bits) = match self {
            QuantMode::Affine { group, bits } => ("affine", group, bits),
            QuantMode::Mxfp4 => ("mxfp4", 32, 4),
            QuantMode::Mxfp8 => ("mxfp8", 32, 8),
            QuantMode::Nvfp4 => ("nvfp4", 16, 4),
        };
        vec![name(mode), Attribute::Int(group), Attribute::Int(bits)]
    }
}

/// A quantised matrix.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Codes, u32 `[…, n, k · bits/32]`.
    pub packed: Tensor,
    /// A scale for each group, `[…, n, k/group]`.
    pub scales: Tensor,
    /// A bias for each group, of affine ones.
    pub biases: Option<Tensor>,
    /// What they mean.
    pub mode: QuantMode,
}

impl Quantized {
    fn inputs<'a>(&'a self, x: Option<&'a Tensor>) -> Vec<Option<&'a Tensor>> {
        let own = [Some(&self.packed), Some(&self.scales), self.biases.as_ref()];
        x.map(Some).into_iter().chain(own).collect()
    }

    /// As numbers of a float dtype.
    pub fn dequantize(&self, dtype: DType) -> Tensor {
        let mut attributes = self.mode.attributes();
        attributes.push(Attribute::DType(dtype));
        one("dequantize", &self.inputs(None), attributes)
    }
}

impl Tensor {
    /// As affine codes of `bits` with a scale and a bias for each `group` along the last axis.
    pub fn quantize(&self, group: i64, bits: i64) -> Quantized {
        let attributes = vec![Attribute::Int(group), Attribute::Int(bits)];
        let made = Tensor::apply("quantize", &[Some(self)], attributes);
        let (packed, scales, biases) = match made.as_slice() {
            [packed, scales, biases] => (packed.clone(), scales.clone(), biases.clone()),
            [wrong, ..] => (wrong.clone(), wrong.clone(), wrong.clone()),
            [] => {
                let wrong = Tensor::wrong(None, invalid("quantize has no result"));
                (wrong.clone(), wrong.clone(), wrong)
            }
        };
        Quantized {
            packed,
            scales,
            biases: Some(biases),
            mode: QuantMode::Affine { group, bits },
        }
    }

    /// In any of the modes; of small floats each group has the scale that its greatest number asks for.
    pub fn quantize_as(&self, mode: QuantMode) -> Quantized {
        let mode_name = match mode {
            QuantMode::Affine { group, bits } => return self.quantize(group, bits),
            QuantMode::Mxfp4 => "mxfp4",
            QuantMode::Mxfp8 => "mxfp8",
            QuantMode::Nvfp4 => "nvfp4",
        };
        let made = Tensor::apply("quantize_float", &[Some(self)], vec![name(mode_name)]);
        let (packed, scales) = match made.as_slice() {
            [packed, scales] => (packed.clone(), scales.clone()),
            [wrong, ..] => (wrong.clone(), wrong.clone()),
            [] => {
                let wrong = Tensor::wrong(None, invalid("quantize_float has no result"));
                (wrong.clone(), wrong)
            }
        };
        Quantized {
            packed,
            scales,
            biases: None,
            mode,
        }
    }

    /// `self @ weights`, or `self @ weightsᵀ` if `transpose`.
    pub fn quantized_matmul(&self, weights: &Quantized, transpose: bool) -> Tensor {
        let mut attributes = vec![Attribute::Bool(transpose)];
        attributes.extend(weights.mode.attributes());
        one("quantized_matmul", &weights.inputs(Some(self)), attributes)
    }

    /// `self[lhs] @ weights[rhs]`, of matrices that `lhs` and `rhs` name; none: each where it stands.
    pub fn gather_qmm(
        &self,
        weights: &Quantized,
        lhs: Option<&Tensor>,
        rhs: Option<&Tensor>,
        transpose: bool,
    ) -> Tensor {
        let mut inputs = weights.inputs(Some(self));
        inputs.extend([lhs, rhs]);
        let mut attributes = vec![Attribute::Bool(transpose)];
        attributes.extend(weights.mode.attributes());
        one("gather_qmm", &inputs, attributes)
    }

    /// The nearest E4M3 of each number, in a byte.
    pub fn to_fp8(&self) -> Tensor {
        one("to_fp8", &[Some(self)], vec![])
    }

    /// The numbers that bytes are as E4M3.
    pub fn from_fp8(&self, dtype: DType) -> Tensor {
        one("from_fp8", &[Some(self)], vec![Attribute::DType(dtype)])
    }
}
