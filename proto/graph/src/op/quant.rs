//! MLX's quantised matrices and 8-bit floats: codes packed into u32, a scale (and a bias) for each group of a row.
//!
//! All are compositions of bit ops and products. Sources: MLX's `quantize` (affine), OCP Microscaling Formats
//! (MX) 1.0 for E2M1, E4M3 and E8M0.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, shaped, swapped},
        ops,
        rules::{Specs, Values, cast_to, one, one_of, scalar, size, size_of, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

const MODES: &[&str] = &["affine", "mxfp4", "mxfp8", "nvfp4"];

ops! {
    /// `w` as codes of `bits` (2, 3, 4, 5, 6 or 8) with a scale and a bias for each `group` (32, 64 or 128) along the last axis (MLX's
    /// `quantize`, affine): `code · scale + bias`. Codes lie one behind the other in u32, low bits first. The end of a
    /// group that is farther from 0 is kept exactly, and 0 is a code.
    quantize(w; group: Int(32, 128), bits: Int(2, 8)) -> many { shapes: "[…, n] → […, n · bits/32], […, n/group] twice", dtypes: "w float → u32, w, w", effect: Effect::None, infer: quantize_spec, decompose: Some(quantize_of_parts) }

    /// What quantised weights are as numbers (MLX's `dequantize`): `affine` codes times `scales` plus `biases`; codes of E2M1
    /// (`mxfp4`, groups of 32, and `nvfp4`, of 16) or E4M3 (`mxfp8`, of 32) times scales of E8M0, of nvfp4 E4M3.
    dequantize(w, scales, biases = optional; mode: Name(MODES), group: Int(16, 128), bits: Int(2, 8), dtype: DType) -> one { shapes: "[…, n · bits/32], […, n/group], [m, n/group] → […, n]", dtypes: "w u32; scales, biases float, but for affine scales u8 → dtype, a float", effect: Effect::None, infer: dequantize_spec, decompose: Some(dequantize_of_parts) }

    /// `x @ w`, or `x @ wᵀ` if `transpose`, of quantised weights as `dequantize` has them (MLX's `quantized_matmul`). Sums of
    /// f16 and bf16 are f32 and rounded once.
    quantized_matmul(x, w, scales, biases = optional; transpose: Bool, mode: Name(MODES), group: Int(16, 128), bits: Int(2, 8)) -> one { shapes: "[…, m, k], weights [n, k] (transpose) or [k, n] → […, m, n]", dtypes: "x float; weights as for dequantize → x", effect: Effect::None, infer: product_spec, decompose: Some(product_of_parts) }

    /// `gather_mm` of `x` and quantised weights (MLX's `gather_qmm`): `lhs` and `rhs` name matrices of the two.
    gather_qmm(x, w, scales, biases = optional, lhs = optional_index, rhs = optional_index; transpose: Bool, mode: Name(MODES), group: Int(16, 128), bits: Int(2, 8)) -> one { shapes: "[…, m, k], weights […, n, k] (transpose) or […, k, n], lhs, rhs → [broadcast(lhs, rhs)…, m, n]", dtypes: "x float; weights as for dequantize; lhs, rhs integers → x", effect: Effect::None, infer: gathered_spec, decompose: Some(gathered_of_parts) }

    /// The nearest E4M3 of each number, the even one of two, in a byte; beyond ±448 those, NaN 0x7f. f64 is rounded to f32 first.
    to_fp8(x;) -> one { shapes: "x", dtypes: "float → u8", effect: Effect::None, infer: to_fp8_spec, decompose: Some(to_fp8_of_parts) }

    /// The numbers that bytes are as E4M3; 0x7f and 0xff are NaN.
    from_fp8(x; dtype: DType) -> one { shapes: "x", dtypes: "x u8 → dtype, a float", effect: Effect::None, infer: from_fp8_spec, decompose: Some(from_fp8_of_parts) }
}

/// How a matrix is quantised.
struct Format {
    mode: String,
    group: usize,
    bits: usize,
}

impl Format {
    fn of(call: &Call<'_>, mode: &str, group: i64, bits: i64) -> Result<Self, GraphError> {
        let (group, bits) = (size(call, group)?, size(call, bits)?);
        let fits = match mode {
            "affine" => [32, 64, 128].contains(&group) && [2, 3, 4, 5, 6, 8].contains(&bits),
            "mxfp4" => (group, bits) == (32, 4),
            "mxfp8" => (group, bits) == (32, 8),
            _ => (group, bits) == (16, 4),
        };
        match fits {
            true => Ok(Self {
                mode: mode.to_owned(),
                group,
                bits,
            }),
            false => Err(call.error(format_args!(
                "{mode} has no groups of {group} and codes of {bits} bits"
            ))),
        }
    }

    /// Attributes `at..`: mode, group, bits.
    fn read(call: &Call<'_>, at: usize) -> Result<Self, GraphError> {
        Self::of(call, call.name(at)?, call.int(at + 1)?, call.int(at + 2)?)
    }

    /// Elements of a row of the weights, whose packed form is input `w` and scales and biases those behind it.
    fn shape(&self, call: &Call<'_>, w: usize) -> Result<Shape, GraphError> {
        let (packed, scales) = (call.tensor_of(w, DType::U32)?, call.tensor(w + 1)?);
        let (before, words) = fixed(call, packed)?;
        let bits = words
            .checked_mul(32)
            .filter(|n| n.is_multiple_of(self.bits));
        let n = bits.map(|n| n / self.bits);
        let n = n.filter(|n| n.is_multiple_of(self.group)).ok_or_else(|| {
            call.error(format_args!(
                "rows of {words} u32 are no whole groups of {}",
                self.group
            ))
        })?;
        let dims = |last: usize| {
            let before = before.iter().map(|&n| Dim::Fixed(n));
            Shape::new(before.chain([Dim::Fixed(last)])).map_err(|e| call.error(e))
        };
        let groups = dims(n / self.group)?;
        let biases = call.optional(w + 2)?;
        let fits = |t: &TensorSpec| t.shape == groups;
        if !fits(scales) || !biases.is_none_or(fits) {
            return Err(call.error(format_args!("scales and biases must be {groups}")));
        }
        let affine = self.mode == "affine";
        let right = match (affine, biases) {
            (true, Some(biases)) => scales.dtype.is_float() && biases.dtype == scales.dtype,
            (false, None) => scales.dtype == DType::U8,
            _ => false,
        };
        match right {
            true => dims(n),
            false => Err(call.error(match affine {
                true => "affine weights have scales and biases of one float dtype".to_owned(),
                false => format!("{} has scales of u8 and no biases", self.mode),
            })),
        }
    }
}

/// The sizes before the last one, which is at least one, and the last.
fn fixed(call: &Call<'_>, t: &TensorSpec) -> Result<(Vec<usize>, usize), GraphError> {
    let sizes = t.shape.dims().iter();
    let sizes = sizes.map(|d| size_of(call, *d, "an axis of weights"));
    let sizes = sizes.collect::<Result<Vec<_>, _>>()?;
    match sizes.split_last() {
        Some((last, before)) if !before.is_empty() => Ok((before.to_vec(), *last)),
        _ => Err(call.error(format_args!("{} must have two axes or more", t.shape))),
    }
}

fn quantize_spec(call: &Call<'_>) -> Specs {
    let w = float(call, 0)?;
    let format = Format::of(call, "affine", call.int(0)?, call.int(1)?)?;
    let (before, n) = fixed(call, w)?;
    if !n.is_multiple_of(format.group) {
        return Err(call.error(format_args!(
            "rows of {n} are no groups of {}",
            format.group
        )));
    }
    let spec = |dtype, last: usize| {
        let shape = Shape::fixed(&[&before[..], &[last]].concat());
        shape.and_then(|shape| TensorSpec::new(dtype, shape))
    };
    let groups = spec(w.dtype, n / format.group)?;
    Ok(vec![
        spec(DType::U32, n / 32 * format.bits)?,
        groups.clone(),
        groups,
    ])
}

/// A number of this dtype.
fn number(g: &mut GraphBuilder, value: f64, dtype: DType) -> Result<Value, GraphError> {
    scalar(g, value, dtype)
}

/// By how many bits each of eight codes in a u64 is shifted.
fn shifts(g: &mut GraphBuilder, bits: usize) -> Result<Value, GraphError> {
    g.arange(0.0, bits as f64, 8, DType::U64)
}

fn quantize_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&quantize, graph, inputs, attributes)?;
    let call = parts.call();
    let w = call.tensor(0)?;
    let format = Format::of(&call, "affine", call.int(0)?, call.int(1)?)?;
    let specs = quantize_spec(&call)?;
    let elements = w.shape.elements(0).unwrap_or(0);
    let (groups, work) = (elements / format.group, w.dtype.working());
    let g = graph;
    let x = cast_to(g, inputs[0], work)?;
    let x = shaped(g, x, [Dim::Fixed(groups), Dim::Fixed(format.group)])?;
    let low = g.reduce_min(x, &[1], true)?;
    let high = g.reduce_max(x, &[1], true)?;
    let (far_low, far_high) = (g.abs(low)?, g.abs(high)?);
    let lower = g.greater(far_low, far_high)?;
    let last = number(g, f64::from((1u32 << format.bits) - 1), work)?;
    let span = g.sub(high, low)?;
    let scale = g.div(span, last)?;
    let least = number(g, 1e-7, work)?;
    let scale = g.maximum(scale, least)?;
    let turned = g.neg(scale)?;
    let scale = g.where_(lower, scale, turned)?;
    let edge = g.where_(lower, low, high)?;
    let steps = g.div(edge, scale)?;
    let steps = g.round(steps)?;
    let zero = number(g, 0.0, work)?;
    let some = g.not_equal(steps, zero)?;
    let exact = g.div(edge, steps)?;
    let scale = g.where_(some, exact, scale)?;
    let bias = g.where_(some, edge, zero)?;
    let codes = g.sub(x, bias)?;
    let codes = g.div(codes, scale)?;
    let codes = g.round(codes)?;
    let codes = g.clamp(codes, Some(zero), Some(last))?;
    let codes = g.cast(codes, DType::U64)?;
    // Eight codes are `bits` bytes.
    let codes = shaped(g, codes, [Dim::Fixed(elements / 8), Dim::Fixed(8)])?;
    let by = shifts(g, format.bits)?;
    let codes = g.left_shift(codes, by)?;
    let codes = g.reduce_sum(codes, &[1], true)?;
    let bytes = g.bitcast(codes, DType::U8)?;
    let most = [i64::MAX, format.bits as i64];
    let bytes = g.slice(bytes, &[0, 0], &most, &[1, 1])?;
    let words = elements / 32 * format.bits;
    let bytes = shaped(g, bytes, [Dim::Fixed(words), Dim::Fixed(4)])?;
    let packed = g.bitcast(bytes, DType::U32)?;
    let shape = |i: usize| specs.get(i).map(|s| s.shape.clone()).unwrap_or_default();
    let packed = g.reshape(packed, shape(0))?;
    let mut results = vec![packed];
    for of in [scale, bias] {
        let of = cast_to(g, of, w.dtype)?;
        results.push(g.reshape(of, shape(1))?);
    }
    Ok(results)
}

fn dequantize_spec(call: &Call<'_>) -> Specs {
    let shape = Format::read(call, 0)?.shape(call, 0)?;
    floats(call, 3, shape)
}

/// A result of the dtype that attribute `i` says, which must be a float.
fn floats(call: &Call<'_>, i: usize, shape: Shape) -> Specs {
    let dtype = call.dtype(i)?;
    match dtype.is_float() {
        true => one_of(call, dtype, shape),
        false => Err(call.error(format_args!("dtype must be a float, not {dtype}"))),
    }
}

/// Codes of a sign, an exponent and a mantissa as f32, by the f16 that has the same ones: the sign moves up to bit 15 from bit
/// `sign`, what is below it to `shift`, and the result is multiplied by the difference of the biases. (Not by a table: whoever
/// looks something up goes where an input says.)
fn small_floats(
    g: &mut GraphBuilder,
    codes: Value,
    (sign, shift, factor): (u32, u32, f64),
) -> Result<Value, GraphError> {
    let codes = cast_to(g, codes, DType::U16)?;
    let top = number(g, f64::from(1u32 << sign), DType::U16)?;
    let rest = number(g, f64::from((1u32 << sign) - 1), DType::U16)?;
    let up = number(g, f64::from(15 - sign), DType::U16)?;
    let by = number(g, f64::from(shift), DType::U16)?;
    let top = g.bitwise_and(codes, top)?;
    let top = g.left_shift(top, up)?;
    let rest = g.bitwise_and(codes, rest)?;
    let rest = g.left_shift(rest, by)?;
    let bits = g.bitwise_or(top, rest)?;
    let value = g.bitcast(bits, DType::F16)?;
    let value = g.cast(value, DType::F32)?;
    let factor = number(g, factor, DType::F32)?;
    g.mul(value, factor)
}

/// Codes of E2M1.
fn e2m1(g: &mut GraphBuilder, codes: Value) -> Result<Value, GraphError> {
    small_floats(g, codes, (3, 9, 16384.0))
}

/// Bytes as E4M3.
fn e4m3(g: &mut GraphBuilder, codes: Value) -> Result<Value, GraphError> {
    let values = small_floats(g, codes, (7, 7, 256.0))?;
    let codes = cast_to(g, codes, DType::U16)?;
    let rest = number(g, 127.0, DType::U16)?;
    let size = g.bitwise_and(codes, rest)?;
    let none = g.equal(size, rest)?;
    let nan = number(g, f64::NAN, DType::F32)?;
    g.where_(none, nan, values)
}

/// Bytes as E8M0: the power of 2 that is `code − 127`.
fn e8m0(g: &mut GraphBuilder, codes: Value) -> Result<Value, GraphError> {
    let codes = cast_to(g, codes, DType::U32)?;
    let by = number(g, 23.0, DType::U32)?;
    let bits = g.left_shift(codes, by)?;
    // The first is below the smallest normal number.
    let (zero, half) = (
        number(g, 0.0, DType::U32)?,
        number(g, 4194304.0, DType::U32)?,
    );
    let first = g.equal(codes, zero)?;
    let bits = g.where_(first, half, bits)?;
    let values = g.bitcast(bits, DType::F32)?;
    let last = number(g, 255.0, DType::U32)?;
    let none = g.equal(codes, last)?;
    let nan = number(g, f64::NAN, DType::F32)?;
    g.where_(none, nan, values)
}

/// The weights in f32, or the dtype of affine scales that is wider.
fn weights(
    g: &mut GraphBuilder,
    format: &Format,
    shape: &Shape,
    [w, scales, biases]: [Value; 3],
) -> Result<Value, GraphError> {
    let elements = shape.elements(0).unwrap_or(0);
    let bytes = elements / 8 * format.bits;
    let flat = shaped(g, w, [Dim::Fixed(bytes / 4), Dim::Fixed(1)])?;
    let codes = g.bitcast(flat, DType::U8)?;
    let codes = if format.bits == 8 {
        shaped(g, codes, [Dim::Fixed(elements)])?
    } else {
        let eight = [Dim::Fixed(elements / 8), Dim::Fixed(format.bits)];
        let eight = shaped(g, codes, eight)?;
        let more = 8 - format.bits as i64;
        let eight = g.pad(eight, None, &[0, 0], &[0, more], "constant")?;
        let eight = g.bitcast(eight, DType::U64)?;
        let by = shifts(g, format.bits)?;
        let codes = g.right_shift(eight, by)?;
        let mask = number(g, f64::from((1u32 << format.bits) - 1), DType::U64)?;
        g.bitwise_and(codes, mask)?
    };
    let groups = [elements / format.group, format.group].map(Dim::Fixed);
    let codes = shaped(g, codes, groups)?;
    let each = [groups[0], Dim::Fixed(1)];
    let scales = shaped(g, scales, each)?;
    let values = match format.mode.as_str() {
        "affine" => {
            let work = spec_of(g, scales)?.dtype.working();
            let codes = cast_to(g, codes, work)?;
            let scales = cast_to(g, scales, work)?;
            let biases = cast_to(g, biases, work)?;
            let biases = shaped(g, biases, each)?;
            let scaled = g.mul(codes, scales)?;
            g.add(scaled, biases)?
        }
        mode => {
            let values = match mode {
                "mxfp8" => e4m3(g, codes)?,
                _ => e2m1(g, codes)?,
            };
            let scales = match mode {
                "nvfp4" => e4m3(g, scales)?,
                _ => e8m0(g, scales)?,
            };
            g.mul(values, scales)?
        }
    };
    g.reshape(values, shape.clone())
}

/// Inputs `at..at + 3`.
fn three(inputs: &[Value], at: usize) -> Result<[Value; 3], GraphError> {
    let three = inputs.get(at..at + 3).and_then(|v| v.try_into().ok());
    three.ok_or(GraphError::NoResult)
}

fn dequantize_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&dequantize, graph, inputs, attributes)?;
    let call = parts.call();
    let format = Format::read(&call, 0)?;
    let shape = format.shape(&call, 0)?;
    let values = weights(graph, &format, &shape, three(inputs, 0)?)?;
    Ok(vec![cast_to(graph, values, call.dtype(3)?)?])
}

/// The format and shape of the weights that a product is of, and whether they are transposed.
fn factor(call: &Call<'_>) -> Result<(Format, Shape, bool), GraphError> {
    let format = Format::read(call, 1)?;
    let shape = format.shape(call, 1)?;
    Ok((format, shape, call.bool(0)?))
}

/// What the same product is of weights that are not quantised, asked of the op that it is made of.
fn of_plain(
    call: &Call<'_>,
    body: impl FnOnce(&mut GraphBuilder, Value, Value) -> Result<Value, GraphError>,
) -> Specs {
    let x = float(call, 0)?;
    let (_, shape, transpose) = factor(call)?;
    let mut dims = shape.dims().to_vec();
    if let (true, [.., a, b]) = (transpose, dims.as_mut_slice()) {
        std::mem::swap(a, b);
    }
    let mut graph = GraphBuilder::new(1);
    let a = graph.tensor("x", x.clone())?;
    let b = TensorSpec::new(x.dtype, Shape::new(dims)?)?;
    let b = graph.tensor("w", b)?;
    let product = body(&mut graph, a, b).map_err(|e| call.error(e))?;
    let spec = spec_of(&graph, product)?;
    one(call, x.dtype, spec.shape.dims().to_vec())
}

fn product_spec(call: &Call<'_>) -> Specs {
    of_plain(call, |g, a, b| g.matmul(a, b))
}

/// The weights as a product takes them.
fn turned(
    graph: &mut GraphBuilder,
    call: &Call<'_>,
    inputs: &[Value],
) -> Result<(Value, Value), GraphError> {
    let (format, shape, transpose) = factor(call)?;
    let x = inputs.first().copied().ok_or(GraphError::NoResult)?;
    let x = cast_to(graph, x, call.tensor(0)?.dtype.working())?;
    let w = weights(graph, &format, &shape, three(inputs, 1)?)?;
    match transpose {
        true => Ok((x, swapped(graph, w)?)),
        false => Ok((x, w)),
    }
}

fn product_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&quantized_matmul, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, w) = turned(graph, &call, inputs)?;
    let product = graph.matmul(x, w)?;
    Ok(vec![cast_to(graph, product, call.tensor(0)?.dtype)?])
}

fn gathered_spec(call: &Call<'_>) -> Specs {
    let index = |i: usize| call.optional(i).map(Option::<&TensorSpec>::cloned);
    let (lhs, rhs) = (index(4)?, index(5)?);
    of_plain(call, |g, a, b| {
        let lhs = lhs.map(|t| g.tensor("lhs", t)).transpose()?;
        let rhs = rhs.map(|t| g.tensor("rhs", t)).transpose()?;
        g.gather_mm(a, b, lhs, rhs, false)
    })
}

fn gathered_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&gather_qmm, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, w) = turned(graph, &call, inputs)?;
    let index = |i: usize| inputs.get(i).copied().filter(|v| *v != Value::Absent);
    let product = graph.gather_mm(x, w, index(4), index(5), false)?;
    Ok(vec![cast_to(graph, product, call.tensor(0)?.dtype)?])
}

fn to_fp8_spec(call: &Call<'_>) -> Specs {
    one_of(call, DType::U8, float(call, 0)?.shape.clone())
}

fn to_fp8_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    let g = graph;
    let u32_of = |g: &mut GraphBuilder, v: u32| number(g, f64::from(v), DType::U32);
    let x = cast_to(g, x, DType::F32)?;
    let (size, most) = (g.abs(x)?, number(g, 448.0, DType::F32)?);
    let size = g.minimum(size, most)?;
    let bits = g.bitcast(size, DType::U32)?;
    // The exponent, of numbers below the smallest normal one theirs; steps are an eighth of its power.
    let (mantissa, least) = (u32_of(g, 23)?, u32_of(g, 121)?);
    let exponent = g.right_shift(bits, mantissa)?;
    let exponent = g.maximum(exponent, least)?;
    let three = u32_of(g, 3)?;
    let step = g.sub(exponent, three)?;
    let step = g.left_shift(step, mantissa)?;
    let step = g.bitcast(step, DType::F32)?;
    let steps = g.div(size, step)?;
    let steps = g.round(steps)?;
    let steps = g.cast(steps, DType::U32)?;
    let code = g.sub(exponent, least)?;
    let code = g.left_shift(code, three)?;
    let code = g.add(code, steps)?;
    let (all, seven) = (u32_of(g, 31)?, u32_of(g, 7)?);
    let sign = g.bitcast(x, DType::U32)?;
    let sign = g.right_shift(sign, all)?;
    let sign = g.left_shift(sign, seven)?;
    let code = g.add(code, sign)?;
    let (nan, none) = (g.is_nan(x)?, u32_of(g, 0x7f)?);
    let code = g.where_(nan, none, code)?;
    Ok(vec![g.cast(code, DType::U8)?])
}

fn from_fp8_spec(call: &Call<'_>) -> Specs {
    let x = call.tensor_of(0, DType::U8)?;
    floats(call, 0, x.shape.clone())
}

fn from_fp8_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let (&[x], &[Attribute::DType(dtype)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let values = e4m3(graph, x)?;
    Ok(vec![cast_to(graph, values, dtype)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, name, table, yes};

    fn format(mode: &str, group: i64, bits: i64) -> Vec<Attribute> {
        vec![name(mode), int(group), int(bits)]
    }

    #[test]
    fn parts_have_the_specs_and_no_input_says_where_to_read() {
        for bits in [2, 3, 4, 5, 6, 8] {
            decomposes(&quantize, &["bf16[3, 64]"], &[int(32), int(bits)]);
            let packed = format!("u32[3, {}]", 2 * bits);
            let inputs = [packed.as_str(), "f16[3, 2]", "f16[3, 2]"];
            let mut attributes = format("affine", 32, bits);
            attributes.push(Attribute::DType(DType::BF16));
            decomposes(&dequantize, &inputs, &attributes);
        }
        for (mode, group, bits) in [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)] {
            let (packed, scales) = (
                format!("u32[5, 3, {}]", 2 * bits),
                format!("u8[5, 3, {}]", 64 / group),
            );
            let mut attributes = vec![yes(true)];
            attributes.extend(format(mode, group, bits));
            let weights = ["f16[2, 1, 7, 64]", packed.as_str(), &scales, "-"];
            decomposes(&quantized_matmul, &weights, &attributes);
            let weights = ["f16[4, 7, 64]", packed.as_str(), &scales, "-", "u8[2]", "-"];
            let [x, w, s, b, l, _] = weights;
            decomposes(&gather_qmm, &[x, w, s, b, l, "i32[2]"], &attributes);
        }
        decomposes(&to_fp8, &["f64[rows]"], &[]);
        decomposes(&from_fp8, &["u8[rows, 2]"], &[Attribute::DType(DType::F16)]);
    }

    #[test]
    fn formats_that_are_none_are_refused() {
        table(
            &quantize,
            &[
                (
                    &["f32[3, 64]"],
                    &[int(64), int(3)],
                    "u32[3, 6] f32[3, 1] f32[3, 1]",
                ),
                (&["f32[3, 64]"], &[int(64), int(7)], "!codes of 7 bits"),
                (&["f32[3, 48]"], &[int(32), int(4)], "!no groups of 32"),
                (&["f32[64]"], &[int(32), int(4)], "!two axes"),
            ],
        );
    }
}
