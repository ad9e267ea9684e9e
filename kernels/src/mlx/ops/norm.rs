//! Normalisations and softmax, by MLX's fused kernels, whose insides are f32.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, Dtype, error::Exception, fast, ops};

use super::{Entry, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "rms_norm",
        supports: single,
        needs: needs::copies,
        launch: rms_norm,
    },
    Entry {
        op: "layer_norm",
        supports: single,
        needs: needs::several,
        launch: layer_norm,
    },
    Entry {
        op: "softmax",
        supports: float,
        needs: needs::copies,
        launch: softmax,
    },
];

/// Up to f32: of f64 MLX's kernels would lose the lower half.
fn float(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| d.is_float() && d != DType::F64) && has_elements(call)
}

/// The same, for inputs of one dtype: what MLX gives is what they promote to.
fn single(call: &Call<'_>) -> bool {
    float(call)
        && (1..call.inputs.len()).all(|i| dtype(call, i).is_none_or(|d| Some(d) == dtype(call, 0)))
}

fn rms_norm(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (x, weight) = (cx.array(0)?, cx.optional(1)?);
    one(
        cx,
        fast::rms_norm(&*x, weight.as_deref(), cx.call().float(0)? as f32),
    )
}

/// MLX's kernel takes the variance from a sum of squares, in one pass: far from zero that is what rounding leaves of the
/// mean's square. So it gets what is left without the mean, which has the same variance and is near zero.
fn layer_norm(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (x, weight, bias) = (cx.array(0)?, cx.optional(1)?, cx.optional(2)?);
    let eps = cx.call().float(0)? as f32;
    let given = x.dtype();
    let single = |a: &Array| a.as_dtype(Dtype::Float32);
    let made = || -> Result<Array, Exception> {
        let weight = weight.as_deref().map(single).transpose()?;
        let bias = bias.as_deref().map(single).transpose()?;
        let x = single(&x)?;
        let centred = x.subtract(x.mean_axes(&[-1], true)?)?;
        fast::layer_norm(centred, weight.as_ref(), bias.as_ref(), eps)?.as_dtype(given)
    };
    one(cx, made())
}

fn softmax(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let axis = axis_of(cx.call().int(0)?, x.ndim()).ok_or_else(overflow)?;
    one(cx, ops::softmax_axis(&*x, axis, true))
}
