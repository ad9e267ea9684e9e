//! Products with weights that have a scale for each rectangle of them, as checkpoints of 8-bit floats do, and llama.cpp's files of
//! NVFP4 for each matrix.
//!
//! Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2, whose rectangles are 128 × 128.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, join, shaped},
        matmul::chosen,
        ops,
        rules::{Specs, Values, one, size_of},
    },
    shape::{Dim, TensorSpec},
};

/// Sizes of a rectangle at most.
const MOST: i64 = 1 << 31;

ops! {
    /// `x @ (w · s)ᵀ` where `s` has the scale of each rectangle of `height` × `width` weights, the last ones of which may be cut
    /// off. Of block types a rectangle has whole rows. Each output is summed in an order fixed by the dtype and the rectangles
    /// alone.
    mul_mat_scaled(x, w, scales; height: Int(1, MOST), width: Int(1, MOST)) -> one { shapes: "[m, k], [n, k], [⌈n/height⌉, ⌈k/width⌉] → [m, n]", dtypes: "x, scales f32; w f32, f16, bf16, f8_e4m3 or a block type → f32", effect: Effect::None, infer: mul_mat_scaled_spec, decompose: Some(mul_mat_scaled_of_parts) }

    /// `mul_mat_id` with experts that have such scales.
    mul_mat_id_scaled(experts, x, ids = index, scales; height: Int(1, MOST), width: Int(1, MOST)) -> one { shapes: "[e, n, k], [t, u or 1, k], [t, u], [e, ⌈n/height⌉, ⌈k/width⌉] → [t, u, n]", dtypes: "experts f32, f16, bf16, f8_e4m3 or a block type; x, scales f32; ids integers → f32", effect: Effect::None, infer: mul_mat_id_scaled_spec, decompose: Some(mul_mat_id_scaled_of_parts) }
}

/// Whether a rectangle has whole rows of `k`.
fn is_one_across(call: &Call<'_>, k: Dim) -> Result<bool, GraphError> {
    let width = usize::try_from(call.int(1)?).map_err(|e| call.error(e))?;
    Ok(size_of(call, k, "an axis of weights")? <= width)
}

/// The weights, input `w`, if their scales, input `scales`, fit.
fn weights<'a>(call: &Call<'a>, w: usize, scales: usize) -> Result<&'a TensorSpec, GraphError> {
    let (w, scales) = (call.tensor(w)?, call.tensor_of(scales, DType::F32)?);
    let plain = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3];
    if !(plain.contains(&w.dtype) || w.dtype.is_block()) {
        return Err(call.error(format_args!("weights cannot be {}", w.dtype)));
    }
    let [before @ .., n, k] = w.shape.dims() else {
        return Err(call.error(format_args!("weights {} must have two axes", w.shape)));
    };
    if !plain.contains(&w.dtype) && !is_one_across(call, *k)? {
        return Err(call.error(format_args!(
            "weights {} must have scales of whole rows, for they are a block type",
            w.shape
        )));
    }
    let cut = |d: Dim, by: usize| {
        let size = size_of(call, d, "an axis of weights")?;
        let by = usize::try_from(call.int(by)?).map_err(|e| call.error(e))?;
        Ok::<Dim, GraphError>(Dim::Fixed(size.div_ceil(by.max(1))))
    };
    let mut each = before.to_vec();
    each.extend([cut(*n, 0)?, cut(*k, 1)?]);
    match scales.shape.dims() == each.as_slice() {
        true => Ok(w),
        false => Err(call.error(format_args!(
            "scales {} must be one for each {} × {} of weights {}",
            scales.shape,
            call.int(0)?,
            call.int(1)?,
            w.shape
        ))),
    }
}

fn mul_mat_scaled_spec(call: &Call<'_>) -> Specs {
    let (x, w) = (call.tensor_of(0, DType::F32)?, weights(call, 1, 2)?);
    match (x.shape.dims(), w.shape.dims()) {
        (&[m, k], &[n, k2]) if k == k2 => one(call, DType::F32, vec![m, n]),
        _ => Err(call.error(format_args!(
            "x {} and w {} must be [m, k] and [n, k]",
            x.shape, w.shape
        ))),
    }
}

fn mul_mat_id_scaled_spec(call: &Call<'_>) -> Specs {
    let (experts, x) = (weights(call, 0, 3)?, call.tensor_of(1, DType::F32)?);
    let ids = call.tensor(2)?;
    chosen(call, experts, x, ids)
}

/// Weights times their scales, as f32, of inputs `w` and `scales`.
fn multiplied(
    graph: &mut GraphBuilder,
    call: &Call<'_>,
    inputs: &[Value],
    [w, scales]: [usize; 2],
) -> Result<Value, GraphError> {
    let spec = weights(call, w, scales)?;
    let value = |i: usize| inputs.get(i).copied().ok_or(GraphError::NoResult);
    let (w, mut s) = (value(w)?, value(scales)?);
    let first = spec.shape.rank().saturating_sub(2);
    let mut most = vec![];
    for (i, d) in spec.shape.dims().iter().enumerate() {
        let size = size_of(call, *d, "an axis of weights")? as i64;
        if i >= first && size > 0 {
            s = graph.repeat(s, call.int(i - first)?.min(size), i as i64)?;
        }
        most.push(size);
    }
    let (zeros, ones) = (vec![0; most.len()], vec![1; most.len()]);
    let s = graph.slice(s, &zeros, &most, &ones)?;
    let w = graph.cast(w, DType::F32)?;
    graph.mul(w, s)
}

/// Where rectangles have whole rows and there are any: a scale for each output, or one for all, of weights `[…, n, k]` and
/// their scales `s`, as `[…, n]` or `[…, 1]`.
fn of_outputs(
    graph: &mut GraphBuilder,
    call: &Call<'_>,
    w: &TensorSpec,
    s: Value,
) -> Result<Option<Value>, GraphError> {
    let [before @ .., n, k] = w.shape.dims() else {
        return Ok(None);
    };
    let size = |d: Dim| size_of(call, d, "an axis of weights");
    let (n, height) = (size(*n)? as i64, call.int(0)?);
    if n == 0 || size(*k)? == 0 || !is_one_across(call, *k)? {
        return Ok(None);
    }
    let sizes = before.iter().map(|d| Ok(size(*d)? as i64));
    let mut dims = sizes.collect::<Result<Vec<i64>, GraphError>>()?;
    if height >= n {
        return Ok(Some(shaped(graph, s, join(before, &[Dim::Fixed(1)]))?));
    }
    let axis = dims.len();
    let s = graph.repeat(s, height, axis as i64)?;
    dims.extend([n, 1]);
    let (zeros, ones) = (vec![0; dims.len()], vec![1; dims.len()]);
    let s = graph.slice(s, &zeros, &dims, &ones)?;
    Ok(Some(shaped(
        graph,
        s,
        join(before, &[(n as usize).into()]),
    )?))
}

fn mul_mat_scaled_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&mul_mat_scaled, graph, inputs, attributes)?;
    let call = parts.call();
    let &[x, w, s] = inputs else {
        return Err(GraphError::NoResult);
    };
    let spec = weights(&call, 1, 2)?;
    if let Some(s) = of_outputs(graph, &call, spec, s)? {
        let y = graph.mul_mat(x, w)?;
        return Ok(vec![graph.mul(y, s)?]);
    }
    let w = multiplied(graph, &call, inputs, [1, 2])?;
    Ok(vec![graph.mul_mat(x, w)?])
}

fn mul_mat_id_scaled_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&mul_mat_id_scaled, graph, inputs, attributes)?;
    let call = parts.call();
    let &[w, x, ids, s] = inputs else {
        return Err(GraphError::NoResult);
    };
    let spec = weights(&call, 0, 3)?;
    if let Some(s) = of_outputs(graph, &call, spec, s)? {
        let y = graph.mul_mat_id(w, x, ids)?;
        let s = graph.take(s, ids, 0)?;
        return Ok(vec![graph.mul(y, s)?]);
    }
    let w = multiplied(graph, &call, inputs, [0, 3])?;
    Ok(vec![graph.mul_mat_id(w, x, ids)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, table};

    #[test]
    fn scales_are_one_for_each_rectangle() {
        let by = |rows, columns| [int(rows), int(columns)];
        table(
            &mul_mat_scaled,
            &[
                (
                    &["f32[rows, 64]", "f8_e4m3[10, 64]", "f32[3, 2]"],
                    &by(4, 32),
                    "f32[rows, 10]",
                ),
                (
                    &["f32[3, 7]", "bf16[10, 7]", "f32[1, 1]"],
                    &by(1 << 31, 7),
                    "f32[3, 10]",
                ),
                (
                    &["f32[3, 0]", "f16[10, 0]", "f32[10, 0]"],
                    &by(1, 7),
                    "f32[3, 10]",
                ),
                (
                    &["f32[3, 64]", "f8_e4m3[10, 64]", "f32[2, 3]"],
                    &by(4, 32),
                    "!for each 4 × 32",
                ),
                (
                    &["f32[3, 64]", "f8_e4m3[10, 64]", "f16[3, 2]"],
                    &by(4, 32),
                    "!f32",
                ),
                (
                    &["f32[3, 64]", "q8_0[10, 64]", "f32[3, 2]"],
                    &by(4, 32),
                    "!whole rows",
                ),
                (
                    &["f32[rows, 64]", "nvfp4[10, 64]", "f32[3, 1]"],
                    &by(4, 64),
                    "f32[rows, 10]",
                ),
                (
                    &["f32[3, 64]", "f64[10, 64]", "f32[3, 2]"],
                    &by(4, 32),
                    "!f64",
                ),
                (
                    &["f32[3, 63]", "f32[10, 64]", "f32[3, 2]"],
                    &by(4, 32),
                    "![n, k]",
                ),
                (&["f32[64]", "f32[64]", "f32[2]"], &by(4, 32), "!two axes"),
                (
                    &["f32[3, 64]", "f32[rows, 64]", "f32[3, 2]"],
                    &by(4, 32),
                    "!row",
                ),
            ],
        );
        table(
            &mul_mat_id_scaled,
            &[
                (
                    &[
                        "f8_e4m3[8, 5, 32]",
                        "f32[rows, 1, 32]",
                        "i32[rows, 2]",
                        "f32[8, 2, 4]",
                    ],
                    &by(4, 8),
                    "f32[rows, 2, 5]",
                ),
                (
                    &[
                        "f8_e4m3[8, 5, 32]",
                        "f32[3, 1, 32]",
                        "i32[3, 2]",
                        "f32[7, 2, 4]",
                    ],
                    &by(4, 8),
                    "!for each 4 × 8",
                ),
                (
                    &[
                        "f8_e4m3[rows, 5, 32]",
                        "f32[3, 1, 32]",
                        "i32[3, 2]",
                        "f32[rows, 2, 4]",
                    ],
                    &by(4, 8),
                    "![e, n, k]",
                ),
                (
                    &[
                        "f8_e4m3[8, 5, 32]",
                        "f32[3, 3, 32]",
                        "i32[3, 2]",
                        "f32[8, 2, 4]",
                    ],
                    &by(4, 8),
                    "![t, u or 1, k]",
                ),
            ],
        );
    }

    #[test]
    fn parts_have_the_specs() {
        for (rows, columns, scales) in [
            (4, 32, "f32[3, 3]"),
            (1, 65, "f32[10, 1]"),
            (1 << 31, 1, "f32[1, 65]"),
        ] {
            let by = [int(rows), int(columns)];
            for w in ["f8_e4m3[10, 65]", "bf16[10, 65]"] {
                decomposes(&mul_mat_scaled, &["f32[rows, 65]", w, scales], &by);
            }
        }
        for (height, scales) in [(4, "f32[3, 1]"), (1 << 31, "f32[1, 1]")] {
            let by = [int(height), int(64)];
            let all = ["f32[rows, 64]", "nvfp4[10, 64]", scales];
            decomposes(&mul_mat_scaled, &all, &by);
            let scales = scales.replace('[', "[8, ");
            let experts = [
                "nvfp4[8, 10, 64]",
                "f32[rows, 1, 64]",
                "i32[rows, 2]",
                &scales,
            ];
            decomposes(&mul_mat_id_scaled, &experts, &by);
        }
        let by = [int(4), int(8)];
        let experts = [
            "f8_e4m3[8, 5, 31]",
            "f32[rows, 1, 31]",
            "i32[rows, 2]",
            "f32[8, 2, 4]",
        ];
        decomposes(&mul_mat_id_scaled, &experts, &by);
        let none = ["f32[2, 0, 5]", "f32[3, 1, 5]", "i64[3, 2]", "f32[2, 0, 1]"];
        decomposes(&mul_mat_id_scaled, &none, &by);
    }
}
