//! Random numbers from a key, without state: the same key gives the same numbers everywhere.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, join, shaped},
        ops,
        rules::{Specs, Values, axis_of, cast_to, one, one_of, real, row_error, scalar, size},
    },
    shape::{Dim, Shape},
};

/// The greatest bound; sums and differences of two are finite f32 numbers.
const MOST: f64 = 1e38;

ops! {
    /// Random bits by Threefry-2x32 with 20 rounds (Salmon et al. 2011), counted as MLX does. `hash(c0, c1)`, wrapping
    /// in u32: `s = [key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA]`, `a = c0 + s[0]`, `b = c1 + s[1]`; for `i` in
    /// `0..5`, for `r` in `[13, 15, 26, 6]` or, of odd `i`, `[17, 29, 16, 24]`: `a += b`, `b = rotl(b, r) ^ a`, and after
    /// the four `a += s[(i+1) % 3]`, `b += s[(i+2) % 3] + i + 1`. Of `n` elements in row-major order with `h = n / 2`
    /// and `odd = n % 2`, elements `i` and `h + odd + i`, for `i < h`, are the two words of `hash(i, h + odd + i)`; of
    /// odd `n`, element `h` is the first word of `hash(h, 0)`.
    random_bits(key; shape: Shape) -> one { shapes: "[2] → shape, without rows", dtypes: "u32 → u32", effect: Effect::None, infer: random_bits_spec, decompose: None }

    /// `count` new keys: `random_bits` of shape `[count, 2]`.
    random_split(key; count: Int(1, 1 << 20)) -> one { shapes: "[2] → [count, 2]", dtypes: "u32 → u32", effect: Effect::None, infer: random_split_spec, decompose: Some(random_split_of_parts) }

    /// Uniform numbers, as MLX makes them: `low + (high − low) · u`, where `u` is `random_bits` as f32 over 2³², at most
    /// the number before 1.
    random_uniform(key; shape: Shape, low: Float(-MOST, MOST), high: Float(-MOST, MOST)) -> one { shapes: "[2] → shape, without rows", dtypes: "u32 → f32", effect: Effect::None, infer: random_uniform_spec, decompose: Some(random_uniform_of_parts) }

    /// Normal numbers, as MLX makes them: `mean + √2 · deviation · erfinv(u)`, where `u` is `random_uniform` from the
    /// number after −1 up to 1.
    random_normal(key; shape: Shape, mean: Float(-MOST, MOST), deviation: Float(0.0, MOST)) -> one { shapes: "[2] → shape, without rows", dtypes: "u32 → f32", effect: Effect::None, infer: random_uniform_spec, decompose: Some(random_normal_of_parts) }

    /// True with probability `p`, as MLX has it: `random_bits` as f32 is less than `p · 4294967808`, the f32 number
    /// after 2³².
    random_bernoulli(key; shape: Shape, p: Float(0.0, 1.0)) -> one { shapes: "[2] → shape, without rows", dtypes: "u32 → bool", effect: Effect::None, infer: random_bernoulli_spec, decompose: Some(random_bernoulli_of_parts) }

    /// `count` draws from the distributions whose unnormalised logarithms lie along `axis` of `logits`, as MLX has them:
    /// `argmax(logits + g)` along `axis`, where `g` is `−log(−log(random_uniform))` with a new last axis of `count`.
    random_categorical(logits, key; axis: Int(-8, 7), count: Int(1, 1 << 20)) -> one { shapes: "logits without axis, count", dtypes: "logits real; key u32 → u32", effect: Effect::None, infer: random_categorical_spec, decompose: Some(random_categorical_of_parts) }

    /// A token of each row of `n` logits, as a sampler draws it that keeps nothing between draws. Where `temperature` is 0
    /// the largest, the first of equals; else by inverse CDF, the first token at which the sum of weights
    /// `exp((logit − largest) / temperature)` passes `u` times the sum of all, or by rounding the last one that weighs anything. `u` is in `[0, 1)`, the upper 53 of the 64
    /// bits `hash(noise[3], noise[2])` (`random_bits`, second word above the first) of key `noise[0..2]`: of `noise`, a
    /// seed's lower and upper half, a branch, and a position. −1 where a logit is NaN or +∞, or none weighs anything. Weights are
    /// f32, sums f64: of 256 weights at a time, in eight lanes by place and then lane by lane, and of these one by one.
    ///
    /// With `limits` it is drawn among the tokens that three numbers of each row leave: the `k` largest (0 or at least `n`: all); of these the fewest
    /// of the largest whose weights reach `p` times theirs (1: all); of these those that weigh `m` at least (0: all). What is no number is no limit, of equals
    /// the first come first, and `k` of 1 is temperature 0. −1 as well where more than 256 may be left, unless all are. Sums are over those that are left, in
    /// their order (that which `p` is a share of, over the `k` largest, or over all as above; what reaches it is added from the largest on).
    draw(logits, temperature, noise, limits = optional;) -> one { shapes: "[.., n], [..], [.., 4], [.., 3] → [..]", dtypes: "f32, f32, u32, f32 → i32", effect: Effect::None, infer: draw_spec, decompose: None }
}

/// Checks the key, input `i`.
fn key(call: &Call<'_>, i: usize) -> Result<(), GraphError> {
    let t = call.tensor_of(i, DType::U32)?;
    match t.shape.dims() {
        [Dim::Fixed(2)] => Ok(()),
        _ => Err(call.error(format_args!("key must be [2], not {}", t.shape))),
    }
}

/// A result of the shape that attribute 0 gives.
fn filled(call: &Call<'_>, dtype: DType) -> Specs {
    key(call, 0)?;
    let shape = call.shape(0)?;
    if shape.is_symbolic() {
        return Err(row_error(call, "filled with random numbers"));
    }
    one_of(call, dtype, shape.clone())
}

fn random_bits_spec(call: &Call<'_>) -> Specs {
    filled(call, DType::U32)
}

fn random_split_spec(call: &Call<'_>) -> Specs {
    key(call, 0)?;
    let count = size(call, call.int(0)?)?;
    one(call, DType::U32, [count.into(), Dim::Fixed(2)])
}

fn random_uniform_spec(call: &Call<'_>) -> Specs {
    filled(call, DType::F32)
}

fn random_bernoulli_spec(call: &Call<'_>) -> Specs {
    filled(call, DType::Bool)
}

fn random_categorical_spec(call: &Call<'_>) -> Specs {
    let logits = real(call, 0)?;
    key(call, 1)?;
    if logits.shape.is_symbolic() {
        return Err(row_error(call, "filled with random numbers"));
    }
    let mut dims = logits.shape.dims().to_vec();
    let axis = axis_of(call, call.int(0)?, dims.len())?;
    if dims.remove(axis) == Dim::Fixed(0) {
        return Err(call.error(format_args!(
            "axis {axis} of {} has no element",
            logits.shape
        )));
    }
    let count = Dim::Fixed(size(call, call.int(1)?)?);
    // The random numbers have this axis besides.
    Shape::new(join(logits.shape.dims(), &[count])).map_err(|e| call.error(e))?;
    dims.push(count);
    one(call, DType::U32, dims)
}

fn draw_spec(call: &Call<'_>) -> Specs {
    let logits = call.tensor_of(0, DType::F32)?;
    let temperature = call.tensor_of(1, DType::F32)?;
    let noise = call.tensor_of(2, DType::U32)?;
    let Some((Dim::Fixed(n), lead)) = logits.shape.dims().split_last() else {
        return Err(call.error(format_args!("{} has no logits in a row", logits.shape)));
    };
    if *n == 0 {
        return Err(call.error(format_args!("{} has no token", logits.shape)));
    }
    if i32::try_from(*n).is_err() {
        return Err(call.error(format_args!(
            "{} has more tokens than i32 numbers",
            logits.shape
        )));
    }
    let of_rows = noise.shape.dims().split_last() == Some((&Dim::Fixed(4), lead));
    if temperature.shape.dims() != lead || !of_rows {
        return Err(call.error(format_args!(
            "of logits {}, temperature {} and noise {} are not one number and four for each row",
            logits.shape, temperature.shape, noise.shape
        )));
    }
    if let Some(limits) = call.optional(3)? {
        call.tensor_of(3, DType::F32)?;
        if limits.shape.dims().split_last() != Some((&Dim::Fixed(3), lead)) {
            return Err(call.error(format_args!(
                "of logits {}, limits {} are not three for each row",
                logits.shape, limits.shape
            )));
        }
    }
    one(call, DType::I32, lead.iter().copied())
}

fn random_split_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&random_split, graph, inputs, attributes)?;
    let call = parts.call();
    let &[key] = inputs else {
        return Err(GraphError::NoResult);
    };
    let count = size(&call, call.int(0)?)?;
    Ok(vec![graph.random_bits(key, Shape::fixed(&[count, 2])?)?])
}

/// `low + (high − low) · u`, all in f32.
fn uniform(
    graph: &mut GraphBuilder,
    key: Value,
    shape: &Shape,
    low: f32,
    high: f32,
) -> Result<Value, GraphError> {
    let bits = graph.random_bits(key, shape.clone())?;
    let bits = graph.cast(bits, DType::F32)?;
    // A power of two, so that this is MLX's division to the bit.
    let unit = scalar(graph, 2f64.powi(-32), DType::F32)?;
    let u = graph.mul(bits, unit)?;
    let below_one = scalar(graph, f64::from(1f32.next_down()), DType::F32)?;
    let u = graph.minimum(u, below_one)?;
    let range = scalar(graph, f64::from(high - low), DType::F32)?;
    let u = graph.mul(range, u)?;
    let low = scalar(graph, f64::from(low), DType::F32)?;
    graph.add(u, low)
}

fn random_uniform_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&random_uniform, graph, inputs, attributes)?;
    let call = parts.call();
    let &[key] = inputs else {
        return Err(GraphError::NoResult);
    };
    let (low, high) = (call.float(1)? as f32, call.float(2)? as f32);
    Ok(vec![uniform(graph, key, call.shape(0)?, low, high)?])
}

fn random_normal_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&random_normal, graph, inputs, attributes)?;
    let call = parts.call();
    let &[key] = inputs else {
        return Err(GraphError::NoResult);
    };
    let u = uniform(graph, key, call.shape(0)?, (-1f32).next_up(), 1.0)?;
    let x = graph.erfinv(u)?;
    let deviation = std::f32::consts::SQRT_2 * call.float(2)? as f32;
    let deviation = scalar(graph, f64::from(deviation), DType::F32)?;
    let x = graph.mul(deviation, x)?;
    let mean = scalar(graph, call.float(1)?, DType::F32)?;
    Ok(vec![graph.add(mean, x)?])
}

fn random_bernoulli_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&random_bernoulli, graph, inputs, attributes)?;
    let call = parts.call();
    let &[key] = inputs else {
        return Err(GraphError::NoResult);
    };
    let bits = graph.random_bits(key, call.shape(0)?.clone())?;
    let bits = graph.cast(bits, DType::F32)?;
    let bound = call.float(1)? as f32 * 2f32.powi(32).next_up();
    let bound = scalar(graph, f64::from(bound), DType::F32)?;
    Ok(vec![graph.less(bits, bound)?])
}

fn random_categorical_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&random_categorical, graph, inputs, attributes)?;
    let call = parts.call();
    let &[logits, key] = inputs else {
        return Err(GraphError::NoResult);
    };
    let shape = call.tensor(0)?.shape.dims();
    let axis = axis_of(&call, call.int(0)?, shape.len())?;
    let count = Dim::Fixed(size(&call, call.int(1)?)?);
    let u = uniform(graph, key, &Shape::new(join(shape, &[count]))?, 0.0, 1.0)?;
    let mut gumbel = u;
    for _ in 0..2 {
        gumbel = graph.log(gumbel)?;
        gumbel = graph.neg(gumbel)?;
    }
    let logits = cast_to(graph, logits, DType::F32)?;
    let logits = shaped(graph, logits, join(shape, &[Dim::Fixed(1)]))?;
    let noisy = graph.add(gumbel, logits)?;
    Ok(vec![graph.argmax(noisy, axis as i64, false)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, number, shape, table};

    #[test]
    fn a_key_fills_a_shape() {
        let dims = [shape(&[2, 0, 3])];
        let rows = [Attribute::Shape(Shape::rows(&[2]).unwrap())];
        table(
            &random_bits,
            &[
                (&["u32[2]"], &dims, "u32[2, 0, 3]"),
                (&["u32[2]"], &[shape(&[])], "u32[]"),
                (&["u32[2]"], &rows, "!row dimension"),
                (&["u32[3]"], &dims, "!key must be [2]"),
                (&["u32[1, 2]"], &dims, "!key must be [2]"),
                (&["u32[rows]"], &dims, "!key must be [2]"),
                (&["i32[2]"], &dims, "!u32"),
            ],
        );
        table(
            &random_split,
            &[
                (&["u32[2]"], &[int(3)], "u32[3, 2]"),
                (&["u32[2]"], &[int(0)], "!integer in"),
            ],
        );
        let bounds = |low, high| [shape(&[5]), number(low), number(high)];
        table(
            &random_uniform,
            &[
                (&["u32[2]"], &bounds(-1.0, 1.0), "f32[5]"),
                (&["u32[2]"], &bounds(f64::NAN, 1.0), "!low"),
                (&["u32[2]"], &bounds(-1e39, 1.0), "!low"),
            ],
        );
        table(
            &random_normal,
            &[
                (&["u32[2]"], &bounds(0.0, 1.0), "f32[5]"),
                (&["u32[2]"], &bounds(0.0, -1.0), "!deviation"),
            ],
        );
        table(
            &random_bernoulli,
            &[
                (&["u32[2]"], &[shape(&[5]), number(1.0)], "bool[5]"),
                (&["u32[2]"], &[shape(&[5]), number(1.1)], "!p must be"),
            ],
        );
        table(
            &draw,
            &[
                (
                    &["f32[rows, 7]", "f32[rows]", "u32[rows, 4]", "-"],
                    &[],
                    "i32[rows]",
                ),
                (
                    &["f32[2, 3, 7]", "f32[2, 3]", "u32[2, 3, 4]", "-"],
                    &[],
                    "i32[2, 3]",
                ),
                (&["f32[7]", "f32[]", "u32[4]", "-"], &[], "i32[]"),
                (
                    &["f32[rows, 7]", "f32[rows]", "u32[rows, 4]", "f32[rows, 3]"],
                    &[],
                    "i32[rows]",
                ),
                (&["f32[7]", "f32[]", "u32[4]", "f32[3]"], &[], "i32[]"),
                (&["f32[7]", "f32[]", "u32[4]", "-"], &[], "i32[]"),
                (
                    &["f32[2, 7]", "f32[2]", "u32[2, 4]", "f32[2, 4]"],
                    &[],
                    "!three for each row",
                ),
                (
                    &["f32[2, 7]", "f32[2]", "u32[2, 4]", "f32[3]"],
                    &[],
                    "!three for each row",
                ),
                (
                    &["f32[2, 7]", "f32[2]", "u32[2, 4]", "f16[2, 3]"],
                    &[],
                    "!f32",
                ),
                (&["f32[0, 7]", "f32[0]", "u32[0, 4]", "-"], &[], "i32[0]"),
                (
                    &["f32[rows, 0]", "f32[rows]", "u32[rows, 4]", "-"],
                    &[],
                    "!no token",
                ),
                (&["f32[]", "f32[]", "u32[4]", "-"], &[], "!no logits"),
                (&["f32[rows]", "f32[]", "u32[4]", "-"], &[], "!no logits"),
                (
                    &["f32[2, 7]", "f32[3]", "u32[2, 4]", "-"],
                    &[],
                    "!for each row",
                ),
                (
                    &["f32[2, 7]", "f32[2]", "u32[2, 3]", "-"],
                    &[],
                    "!for each row",
                ),
                (
                    &["f32[2, 7]", "f32[2]", "u32[4]", "-"],
                    &[],
                    "!for each row",
                ),
                (&["f16[2, 7]", "f32[2]", "u32[2, 4]", "-"], &[], "!f32"),
                (&["f32[2, 7]", "f32[2]", "i32[2, 4]", "-"], &[], "!u32"),
            ],
        );
        table(
            &random_categorical,
            &[
                (&["f16[4, 7]", "u32[2]"], &[int(-1), int(3)], "u32[4, 3]"),
                (&["i32[4, 7]", "u32[2]"], &[int(0), int(1)], "u32[7, 1]"),
                (&["f32[4, 0]", "u32[2]"], &[int(1), int(1)], "!no element"),
                (
                    &["f32[rows, 7]", "u32[2]"],
                    &[int(1), int(1)],
                    "!row dimension",
                ),
                (&["c64[4, 7]", "u32[2]"], &[int(1), int(1)], "!c64"),
                (&["f32[]", "u32[2]"], &[int(0), int(1)], "!no axis"),
                (
                    &["f32[1, 1, 1, 1, 1, 1, 1, 2]", "u32[2]"],
                    &[int(-1), int(1)],
                    "!axes",
                ),
            ],
        );
    }

    #[test]
    fn composites_have_their_specs() {
        decomposes(&random_split, &["u32[2]"], &[int(5)]);
        for dims in [&[][..], &[3], &[2, 0], &[2, 3, 4]] {
            decomposes(
                &random_uniform,
                &["u32[2]"],
                &[shape(dims), number(-1e38), number(1e38)],
            );
            decomposes(
                &random_normal,
                &["u32[2]"],
                &[shape(dims), number(1.0), number(2.0)],
            );
            decomposes(&random_bernoulli, &["u32[2]"], &[shape(dims), number(0.25)]);
        }
        for logits in ["f32[4, 7]", "bf16[7]", "f64[2, 1, 5]", "u8[3]"] {
            for axis in [0, -1] {
                decomposes(
                    &random_categorical,
                    &[logits, "u32[2]"],
                    &[int(axis), int(6)],
                );
            }
        }
    }
}
