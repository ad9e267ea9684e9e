//! Normalisations. Their insides are f32, of f64 inputs f64, and the result is rounded once.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, given, inside, optional_vector, shaped},
        ops,
        rules::{Specs, Values, axis_of, cast_to, one_of, real, scalar, size, spec_of},
    },
    shape::{Dim, TensorSpec},
};

ops! {
    /// `x · weight / √(mean(x²) + eps)` over the innermost axis (Zhang & Sennrich 2019); `x` `[…, n]`, `weight` `[n]`,
    /// absent 1.
    rms_norm(x, weight = optional; eps: Float(0.0, 1.0)) -> one { shapes: "x", dtypes: "x, weight float → x", effect: Effect::None, infer: last_axis_spec, decompose: Some(rms_norm_of_parts) }

    /// `(x − mean) / √(variance + eps) · weight + bias` over the innermost axis (Ba et al. 2016); `x` `[…, n]`, `weight`
    /// `[n]`, absent 1, `bias` `[n]`, absent 0. The variance is the mean of the squared differences.
    layer_norm(x, weight = optional, bias = optional; eps: Float(0.0, 1.0)) -> one { shapes: "x", dtypes: "x, weight, bias float → x", effect: Effect::None, infer: last_axis_spec, decompose: Some(layer_norm_of_parts) }

    /// `x / max(√(sum(x²)), eps)` over the innermost axis (ggml's `l2_norm`).
    l2_norm(x; eps: Float(0.0, 1.0)) -> one { shapes: "x", dtypes: "float → x", effect: Effect::None, infer: last_axis_spec, decompose: Some(l2_norm_of_parts) }

    /// `exp(x − max) / sum(exp(x − max))` along `axis`; where all are −∞ the result is NaN.
    softmax(x; axis: Int(-8, 7)) -> one { shapes: "x", dtypes: "float: x; integers, bool: f32", effect: Effect::None, infer: softmax_spec, decompose: Some(softmax_of_parts) }

    /// The logarithm of `softmax`: `x − max − log(sum(exp(x − max)))` along `axis`.
    log_softmax(x; axis: Int(-8, 7)) -> one { shapes: "x", dtypes: "float: x; integers, bool: f32", effect: Effect::None, infer: softmax_spec, decompose: Some(log_softmax_of_parts) }

    /// `layer_norm` of `x` `[n, c, …]` over each of `groups` equal runs of channels with all that follows (Wu & He
    /// 2018), then `weight` and `bias` `[c]` per channel.
    group_norm(x, weight = optional, bias = optional; groups: Int(1, 1 << 30), eps: Float(0.0, 1.0)) -> one { shapes: "x", dtypes: "x, weight, bias float → x", effect: Effect::None, infer: group_norm_spec, decompose: Some(group_norm_of_parts) }
}

/// A float `x` with an innermost axis of at least one element, and vectors of that length.
fn last_axis_spec(call: &Call<'_>) -> Specs {
    let x = float(call, 0)?;
    let n = x.shape.inner().filter(|n| *n > 0 && x.shape.rank() > 0);
    let n = n.ok_or_else(|| {
        call.error(format_args!(
            "x must have an innermost axis of a fixed size, not {}",
            x.shape
        ))
    })?;
    for i in 1..call.inputs.len() {
        optional_vector(call, i, n)?;
    }
    Ok(vec![x.clone()])
}

fn softmax_spec(call: &Call<'_>) -> Specs {
    let x = real(call, 0)?;
    let axis = axis_of(call, call.int(0)?, x.shape.rank())?;
    if x.shape.dims().get(axis) == Some(&Dim::Fixed(0)) {
        return Err(call.error(format_args!("axis {axis} of {} has no element", x.shape)));
    }
    one_of(
        call,
        x.dtype.to_float().unwrap_or(DType::F32),
        x.shape.clone(),
    )
}

fn group_norm_spec(call: &Call<'_>) -> Specs {
    let x = float(call, 0)?;
    let groups = size(call, call.int(0)?)?;
    let channels = match *x.shape.dims() {
        [_, Dim::Fixed(c), ..] if c > 0 && groups > 0 && c.is_multiple_of(groups) => c,
        _ => {
            return Err(call.error(format_args!(
                "x must be [n, c, …] with {groups} groups of channels, not {}",
                x.shape
            )));
        }
    };
    optional_vector(call, 1, channels)?;
    optional_vector(call, 2, channels)?;
    Ok(vec![x.clone()])
}

/// `x` as the dtype of the insides, its spec and that dtype.
fn start(
    graph: &mut GraphBuilder,
    inputs: &[Value],
) -> Result<(Value, TensorSpec, DType), GraphError> {
    let &[x, ..] = inputs else {
        return Err(GraphError::NoResult);
    };
    let spec = spec_of(graph, x)?;
    let work = inside(spec.dtype);
    Ok((cast_to(graph, x, work)?, spec, work))
}

/// `x · weight + bias`, each if it is given, rounded to the result's dtype.
fn finish(
    graph: &mut GraphBuilder,
    x: Value,
    weight: Option<Value>,
    bias: Option<Value>,
    dtype: DType,
) -> Values {
    let mut y = x;
    if let Some(weight) = weight {
        y = graph.mul(y, weight)?;
    }
    if let Some(bias) = bias {
        y = graph.add(y, bias)?;
    }
    Ok(vec![cast_to(graph, y, dtype)?])
}

/// `x / √(mean(x²) + eps)` over the last axis.
fn scaled(graph: &mut GraphBuilder, x: Value, eps: f64) -> Result<Value, GraphError> {
    let dtype = spec_of(graph, x)?.dtype;
    let squares = graph.square(x)?;
    let mean = graph.mean(squares, &[-1], true)?;
    let eps = scalar(graph, eps, dtype)?;
    let mean = graph.add(mean, eps)?;
    let scale = graph.rsqrt(mean)?;
    graph.mul(x, scale)
}

/// `(x − mean) / √(variance + eps)` over the last axis.
fn standardised(graph: &mut GraphBuilder, x: Value, eps: f64) -> Result<Value, GraphError> {
    let mean = graph.mean(x, &[-1], true)?;
    let centred = graph.sub(x, mean)?;
    scaled(graph, centred, eps)
}

fn rms_norm_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&rms_norm, graph, inputs, attributes)?;
    let (x, spec, work) = start(graph, inputs)?;
    let weight = given(graph, inputs, 1, work)?;
    let y = scaled(graph, x, parts.call().float(0)?)?;
    finish(graph, y, weight, None, spec.dtype)
}

fn layer_norm_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&layer_norm, graph, inputs, attributes)?;
    let (x, spec, work) = start(graph, inputs)?;
    let weight = given(graph, inputs, 1, work)?;
    let bias = given(graph, inputs, 2, work)?;
    let y = standardised(graph, x, parts.call().float(0)?)?;
    finish(graph, y, weight, bias, spec.dtype)
}

fn l2_norm_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&l2_norm, graph, inputs, attributes)?;
    let (x, spec, work) = start(graph, inputs)?;
    let squares = graph.square(x)?;
    let sum = graph.reduce_sum(squares, &[-1], true)?;
    let norm = graph.sqrt(sum)?;
    let least = scalar(graph, parts.call().float(0)?, work)?;
    let norm = graph.maximum(norm, least)?;
    let y = graph.div(x, norm)?;
    finish(graph, y, None, None, spec.dtype)
}

/// `x − max` along an axis, and its exponentials' sum along that axis.
fn shifted(
    graph: &mut GraphBuilder,
    x: Value,
    axis: i64,
) -> Result<(Value, Value, Value), GraphError> {
    let most = graph.reduce_max(x, &[axis], true)?;
    let shifted = graph.sub(x, most)?;
    let powers = graph.exp(shifted)?;
    let sum = graph.reduce_sum(powers, &[axis], true)?;
    Ok((shifted, powers, sum))
}

fn softmax_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&softmax, graph, inputs, attributes)?;
    let (x, spec, _) = start(graph, inputs)?;
    let (_, powers, sum) = shifted(graph, x, parts.call().int(0)?)?;
    let y = graph.div(powers, sum)?;
    let dtype = spec.dtype.to_float().unwrap_or(DType::F32);
    finish(graph, y, None, None, dtype)
}

fn log_softmax_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&log_softmax, graph, inputs, attributes)?;
    let (x, spec, _) = start(graph, inputs)?;
    let (shifted, _, sum) = shifted(graph, x, parts.call().int(0)?)?;
    let sum = graph.log(sum)?;
    let y = graph.sub(shifted, sum)?;
    let dtype = spec.dtype.to_float().unwrap_or(DType::F32);
    finish(graph, y, None, None, dtype)
}

fn group_norm_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&group_norm, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, spec, work) = start(graph, inputs)?;
    let dims = spec.shape.dims();
    let &[first, channels, ..] = dims else {
        return Err(GraphError::NoResult);
    };
    let groups = size(&call, call.int(0)?)?;
    let each = spec.shape.elements_per_row().unwrap_or(0) / groups.max(1);
    let runs = shaped(graph, x, [first, groups.into(), each.into()])?;
    let y = standardised(graph, runs, call.float(1)?)?;
    let y = shaped(graph, y, dims.iter().copied())?;
    // [c, 1, …, 1] stands under the channels of [n, c, …].
    let mut vectors = [None, None];
    for (i, vector) in vectors.iter_mut().enumerate() {
        if let Some(v) = given(graph, inputs, i + 1, work)? {
            let ones = dims.iter().skip(2).map(|_| Dim::Fixed(1));
            *vector = Some(shaped(graph, v, std::iter::once(channels).chain(ones))?);
        }
    }
    let [weight, bias] = vectors;
    finish(graph, y, weight, bias, spec.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, number, table};

    const FLOATS: [&str; 4] = ["f16", "bf16", "f32", "f64"];

    #[test]
    fn norms_keep_the_spec_and_check_their_vectors() {
        let eps = [number(1e-5)];
        table(
            &rms_norm,
            &[
                (&["f32[rows, 64]", "f32[64]"], &eps, "f32[rows, 64]"),
                (&["f16[2, 3, 64]", "f64[64]"], &eps, "f16[2, 3, 64]"),
                (&["bf16[64]", "-"], &eps, "bf16[64]"),
                (&["f32[2, 64]", "f32[63]"], &eps, "!weight must be [64]"),
                (&["f32[2, 64]", "f32[1, 64]"], &eps, "!weight must be [64]"),
                (&["f32[2, 64]", "i32[64]"], &eps, "!float"),
                (&["i32[2, 64]", "f32[64]"], &eps, "!float"),
                (&["q4_0[2, 64]", "-"], &eps, "!float"),
                (&["f32[2, 0]", "f32[0]"], &eps, "!innermost"),
                (&["f32[rows]", "-"], &eps, "!innermost"),
                (&["f32[]", "-"], &eps, "!innermost"),
                (&["f32[2, 64]", "-"], &[number(-1.0)], "!eps"),
            ],
        );
        table(
            &layer_norm,
            &[
                (&["bf16[rows, 8]", "f32[8]", "-"], &eps, "bf16[rows, 8]"),
                (&["bf16[rows, 8]", "-", "f32[7]"], &eps, "!bias must be [8]"),
            ],
        );
        table(
            &l2_norm,
            &[
                (&["f64[3, 8]"], &eps, "f64[3, 8]"),
                (&["c64[3, 8]"], &eps, "!float"),
            ],
        );
        let groups = |n| [int(n), number(1e-5)];
        table(
            &group_norm,
            &[
                (
                    &["f16[rows, 6, 4, 4]", "f32[6]", "f32[6]"],
                    &groups(3),
                    "f16[rows, 6, 4, 4]",
                ),
                (&["f32[2, 6]", "-", "-"], &groups(6), "f32[2, 6]"),
                (&["f32[2, 6]", "-", "-"], &groups(4), "!groups"),
                (&["f32[2, 6]", "-", "-"], &groups(0), "!groups"),
                (&["f32[6]", "-", "-"], &groups(3), "!groups"),
                (&["f32[2, 0]", "-", "-"], &groups(3), "!groups"),
                (
                    &["f32[2, 6, 4]", "f32[4]", "-"],
                    &groups(3),
                    "!weight must be [6]",
                ),
            ],
        );
        table(
            &softmax,
            &[
                (&["f16[rows, 6]"], &[int(-1)], "f16[rows, 6]"),
                (&["f16[rows, 6]"], &[int(0)], "f16[rows, 6]"),
                (&["bool[6]"], &[int(0)], "f32[6]"),
                (&["f32[0, 6]"], &[int(1)], "f32[0, 6]"),
                (&["f32[0, 6]"], &[int(0)], "!no element"),
                (&["f32[6]"], &[int(1)], "!no axis 1"),
                (&["c64[6]"], &[int(0)], "!c64"),
            ],
        );
    }

    #[test]
    fn composites_have_their_specs() {
        let eps = [number(1e-6)];
        for x in FLOATS {
            for dims in ["[rows, 8]", "[2, 3, 8]", "[8]", "[0, 8]"] {
                let x = format!("{x}{dims}");
                for vector in ["-", "f16[8]", "f32[8]", "f64[8]"] {
                    decomposes(&rms_norm, &[&x, vector], &eps);
                    decomposes(&layer_norm, &[&x, vector, "-"], &eps);
                    decomposes(&layer_norm, &[&x, "-", vector], &eps);
                }
                decomposes(&l2_norm, &[&x], &eps);
            }
            for dims in ["[rows, 6, 4, 5]", "[2, 6]", "[2, 6, 0]"] {
                let x = format!("{x}{dims}");
                decomposes(&group_norm, &[&x, "f32[6]", "-"], &[int(3), number(1e-5)]);
                decomposes(&group_norm, &[&x, "-", "bf16[6]"], &[int(1), number(1e-5)]);
            }
        }
        for x in ["f16", "bf16", "f32", "f64", "u8", "i64", "bool"] {
            for axis in [0, 1, -1] {
                let x = format!("{x}[rows, 3, 4]");
                decomposes(&softmax, &[&x], &[int(axis)]);
                decomposes(&log_softmax, &[&x], &[int(axis)]);
            }
        }
    }
}
