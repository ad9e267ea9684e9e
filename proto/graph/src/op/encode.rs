//! Weights as MLX's modes of small floats have them: what `dequantize` reads.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, shaped},
        ops,
        rules::{Specs, Values, cast_to, scalar, size_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

const MODES: &[&str] = &["mxfp4", "mxfp8", "nvfp4"];

ops! {
    /// `w` as codes of a mode that `dequantize` has and a scale for each group along the last axis (MLX's `quantize`): of 32 E2M1 (`mxfp4`)
    /// or E4M3 (`mxfp8`) with the power of 2 that is not below the greatest size through 6 or 448, as E8M0 (127 where all are 0); of 16 E2M1
    /// (`nvfp4`) with the nearest E4M3 to that through 6. Each code is the nearest number, of E2M1 the lower of two, of E4M3 the even one; what is
    /// beyond takes the greatest. Codes lie one behind the other in u32, low bits first. f64 is rounded to f32 first.
    quantize_float(w; mode: Name(MODES)) -> two { shapes: "[…, n] → […, n · bits/32], […, n/group]", dtypes: "w float → u32, u8", effect: Effect::None, infer: spec, decompose: Some(of_parts) }
}

/// Elements of a group, bits of a code, and the greatest number that one says.
fn format(mode: &str) -> (usize, usize, f64) {
    match mode {
        "mxfp4" => (32, 4, 6.0),
        "mxfp8" => (32, 8, 448.0),
        _ => (16, 4, 6.0),
    }
}

fn spec(call: &Call<'_>) -> Specs {
    let w = float(call, 0)?;
    let (group, bits, _) = format(call.name(0)?);
    let Some((last, before)) = w.shape.dims().split_last().filter(|(_, b)| !b.is_empty()) else {
        return Err(call.error(format_args!("{} must have two axes or more", w.shape)));
    };
    let n = size_of(call, *last, "an axis of weights")?;
    for dim in before {
        size_of(call, *dim, "an axis of weights")?;
    }
    if !n.is_multiple_of(32) {
        return Err(call.error(format_args!("rows of {n} are no groups of 32")));
    }
    let of = |dtype, last: usize| {
        let dims = before.iter().copied().chain([Dim::Fixed(last)]);
        Shape::new(dims).and_then(|shape| TensorSpec::new(dtype, shape))
    };
    Ok(vec![
        of(DType::U32, n / 32 * bits)?,
        of(DType::U8, n / group)?,
    ])
}

fn number(g: &mut GraphBuilder, value: f64) -> Result<Value, GraphError> {
    scalar(g, value, DType::F32)
}

/// Codes of E2M1: how many of the places between two numbers each size is beyond, and the sign of those that are not 0.
fn e2m1(g: &mut GraphBuilder, x: Value) -> Result<Value, GraphError> {
    let size = g.abs(x)?;
    let mut code = scalar(g, 0.0, DType::U32)?;
    for between in [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] {
        let between = number(g, between)?;
        let beyond = g.greater(size, between)?;
        let beyond = g.cast(beyond, DType::U32)?;
        code = g.add(code, beyond)?;
    }
    let (none, sign) = (scalar(g, 0.0, DType::U32)?, scalar(g, 8.0, DType::U32)?);
    let zero = number(g, 0.0)?;
    let below = g.less(x, zero)?;
    let some = g.not_equal(code, none)?;
    let below = g.logical_and(below, some)?;
    let sign = g.where_(below, sign, none)?;
    g.bitwise_or(code, sign)
}

/// The byte of the power of 2 that is not below, and what that is.
fn e8m0(g: &mut GraphBuilder, scale: Value) -> Result<(Value, Value), GraphError> {
    let u32_of = |g: &mut GraphBuilder, v: f64| scalar(g, v, DType::U32);
    let bits = g.bitcast(scale, DType::U32)?;
    let (up, mantissa) = (u32_of(g, 8_388_607.0)?, u32_of(g, 23.0)?);
    let above = g.add(bits, up)?;
    let above = g.right_shift(above, mantissa)?;
    let (least, most) = (u32_of(g, 1.0)?, u32_of(g, 254.0)?);
    let byte = g.clamp(above, Some(least), Some(most))?;
    let (zero, one) = (number(g, 0.0)?, u32_of(g, 127.0)?);
    let none = g.equal(scale, zero)?;
    let byte = g.where_(none, one, byte)?;
    let power = g.left_shift(byte, mantissa)?;
    let power = g.bitcast(power, DType::F32)?;
    Ok((g.cast(byte, DType::U8)?, power))
}

fn of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&quantize_float, graph, inputs, attributes)?;
    let call = parts.call();
    let (group, bits, most) = format(call.name(0)?);
    let specs = spec(&call)?;
    let elements = call.tensor(0)?.shape.elements(0).unwrap_or(0);
    let g = graph;
    let x = cast_to(g, inputs[0], DType::F32)?;
    let x = shaped(g, x, [Dim::Fixed(elements / group), Dim::Fixed(group)])?;
    let size = g.abs(x)?;
    let size = g.reduce_max(size, &[1], true)?;
    let most = number(g, most)?;
    let scale = g.div(size, most)?;
    let (scales, values) = if bits == 4 && group == 16 {
        let byte = g.to_fp8(scale)?;
        let scale = g.from_fp8(byte, DType::F32)?;
        let zero = number(g, 0.0)?;
        let none = g.equal(scale, zero)?;
        let values = g.div(x, scale)?;
        (byte, g.where_(none, zero, values)?)
    } else {
        let (byte, scale) = e8m0(g, scale)?;
        (byte, g.div(x, scale)?)
    };
    // Words of four bytes, or of eight codes.
    let packed = if bits == 8 {
        let codes = g.to_fp8(values)?;
        let codes = shaped(g, codes, [Dim::Fixed(elements / 4), Dim::Fixed(4)])?;
        g.bitcast(codes, DType::U32)?
    } else {
        let codes = e2m1(g, values)?;
        let codes = shaped(g, codes, [Dim::Fixed(elements / 8), Dim::Fixed(8)])?;
        let by = g.arange(0.0, 4.0, 8, DType::U32)?;
        let codes = g.left_shift(codes, by)?;
        let words = g.reduce_sum(codes, &[1], true)?;
        g.cast(words, DType::U32)?
    };
    let shape = |i: usize| specs.get(i).map(|s| s.shape.clone()).unwrap_or_default();
    Ok(vec![
        g.reshape(packed, shape(0))?,
        g.reshape(scales, shape(1))?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, name, table};

    #[test]
    fn codes_and_scales_have_the_sizes_of_their_mode() {
        for (mode, want) in [
            ("mxfp4", "u32[3, 8] u8[3, 2]"),
            ("mxfp8", "u32[3, 16] u8[3, 2]"),
            ("nvfp4", "u32[3, 8] u8[3, 4]"),
        ] {
            for w in ["bf16[3, 64]", "f64[3, 64]", "f32[3, 64]"] {
                table(&quantize_float, &[(&[w], &[name(mode)], want)]);
                decomposes(&quantize_float, &[w], &[name(mode)]);
            }
            for (w, why) in [
                ("f32[64]", "!two axes"),
                ("f32[3, 48]", "!groups"),
                ("f32[rows, 64]", "!row dimension"),
                ("i32[3, 64]", "!i32"),
            ] {
                table(&quantize_float, &[(&[w], &[name(mode)], why)]);
            }
        }
    }
}
