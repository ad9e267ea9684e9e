//! Recurrences over time with a state of fixed size: what layers of linear attention and state-space models compute.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, OpRow, ops,
        rules::{Specs, Values, cast_to, dtype_error, size_of, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// The gated delta rule (Qwen3-Next's layers; ggml's and MLX's kernels of this name): with a state `s` for each head of `v`, at each time in
    /// turn `s ← g · s`, `s ← s + beta · (v − s · k) ⊗ k`, `y = s · q`. `g` and `beta` are used as they are. Head `h` of `hv` goes with head
    /// `h · hk / hv` of `q` and `k`. The state before the first time is `state`, 0 without it; the one after the last is the second result. f16
    /// and bf16 are computed in f32, in which the state stays.
    gated_delta(q, k, v, g, beta, state = optional;) -> two { shapes: "[b, t, hk, dk], the same, [b, t, hv, dv], [b, t, hv], the same, [b, hv, dv, dk] → [b, t, hv, dv], [b, hv, dv, dk]", dtypes: "floats → promote(q, k, v), f32 or f64", effect: Effect::None, infer: gated_delta_spec, decompose: Some(gated_delta_alike) }

    /// Mamba-2's recurrence (ggml's `ssm_scan`, MLX's kernel): with a state `s` for each head, at each time in turn
    /// `s ← exp(dt · a) · s + dt · x ⊗ b`, `y = s · c + d · x` (`d` is 0 if not given). `dt` is used as it is: softplus and bias come before, and `a` is
    /// the negative number, not its logarithm. Head `i` of `h` goes with group `i · g / h` of `b` and `c`. The state before the first time is `state`, 0
    /// without it; the one after the last is the second result. f16 and bf16 are computed in f32, in which the state stays.
    mamba2_scan(x, dt, a, b, c, d = optional, state = optional;) -> two { shapes: "[n, t, h, p], [n, t, h], [h], [n, t, g, s], the same, [h], [n, h, p, s] → [n, t, h, p], [n, h, p, s]", dtypes: "floats → promote(x, b, c), f32 or f64", effect: Effect::None, infer: mamba2_spec, decompose: Some(mamba2_alike) }
}

/// Multiplications at most.
const MOST_STEPS: usize = 1 << 48;

/// Input `i`, a float tensor of so many axes.
fn float<'a>(call: &Call<'a>, i: usize, rank: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    if t.dtype.is_block() || t.dtype.kind() != Kind::Float {
        return Err(dtype_error(call, t.dtype));
    }
    if t.shape.rank() != rank {
        return Err(call.error(format_args!(
            "{} {} must have {rank} axes",
            call.input_name(i),
            t.shape
        )));
    }
    Ok(t)
}

/// Input `i`, if it is given, must have these axes.
fn like(call: &Call<'_>, i: usize, dims: &[Dim]) -> Result<(), GraphError> {
    if call.optional(i)?.is_none() {
        return Ok(());
    }
    let t = float(call, i, dims.len())?;
    if t.shape.dims() == dims {
        return Ok(());
    }
    let wanted = Shape::new(dims.iter().copied())?;
    Err(call.error(format_args!(
        "{} {} must be {wanted}",
        call.input_name(i),
        t.shape
    )))
}

/// The heads of one that share one of the other.
fn shared(call: &Call<'_>, heads: usize, groups: usize) -> Result<(), GraphError> {
    match groups > 0 && heads.is_multiple_of(groups) {
        true => Ok(()),
        false => Err(call.error(format_args!("{heads} heads do not share {groups}"))),
    }
}

/// What both rows give: results as `out`, and the state.
fn results(call: &Call<'_>, of: [usize; 3], out: &[Dim], state: &[Dim], width: usize) -> Specs {
    let shape = Shape::new(out.iter().copied()).map_err(|e| call.error(e))?;
    let steps = out
        .iter()
        .map(|d| d.at(1))
        .fold(width, usize::saturating_mul);
    if steps > MOST_STEPS {
        return Err(call.error("takes too many steps; split its time"));
    }
    let mut dtype = call.tensor(of[0])?.dtype;
    for &i in &of[1..] {
        let next = call.tensor(i)?.dtype;
        dtype = dtype.promote(next).ok_or_else(|| dtype_error(call, next))?;
    }
    let held = Shape::new(state.iter().copied()).map_err(|e| call.error(e))?;
    Ok(vec![
        TensorSpec::new(dtype, shape)?,
        TensorSpec::new(working(call)?, held)?,
    ])
}

/// What the recurrence is computed in.
fn working(call: &Call<'_>) -> Result<DType, GraphError> {
    let mut work = DType::F32;
    for i in 0..call.inputs.len() {
        if call.optional(i)?.is_some_and(|t| t.dtype == DType::F64) {
            work = DType::F64;
        }
    }
    Ok(work)
}

fn gated_delta_spec(call: &Call<'_>) -> Specs {
    let (q, v) = (float(call, 0, 4)?, float(call, 2, 4)?);
    let (&[b, t, hk, dk], &[_, _, hv, dv]) = (q.shape.dims(), v.shape.dims()) else {
        return Err(call.error("q and v must have four axes"));
    };
    let size = |d: Dim| size_of(call, d, "one of time or of a head");
    let (keys, heads) = (size(hk)?, size(hv)?);
    let width = size(dk)?;
    size(t)?;
    size(dv)?;
    shared(call, heads, keys)?;
    like(call, 1, &[b, t, hk, dk])?;
    like(call, 2, &[b, t, hv, dv])?;
    like(call, 3, &[b, t, hv])?;
    like(call, 4, &[b, t, hv])?;
    let state = [b, hv, dv, dk];
    like(call, 5, &state)?;
    results(call, [0, 1, 2], &[b, t, hv, dv], &state, width)
}

fn mamba2_spec(call: &Call<'_>) -> Specs {
    let (x, b) = (float(call, 0, 4)?, float(call, 3, 4)?);
    let (&[n, t, h, p], &[_, _, g, s]) = (x.shape.dims(), b.shape.dims()) else {
        return Err(call.error("x and b must have four axes"));
    };
    let size = |d: Dim| size_of(call, d, "one of time or of a head");
    let (heads, groups) = (size(h)?, size(g)?);
    let width = size(s)?;
    size(t)?;
    size(p)?;
    shared(call, heads, groups)?;
    like(call, 1, &[n, t, h])?;
    like(call, 2, &[h])?;
    like(call, 3, &[n, t, g, s])?;
    like(call, 4, &[n, t, g, s])?;
    like(call, 5, &[h])?;
    let state = [n, h, p, s];
    like(call, 6, &state)?;
    results(call, [0, 3, 4], &[n, t, h, p], &state, width)
}

fn gated_delta_alike(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    alike(&gated_delta, graph, inputs, [0, 1, 2])
}

fn mamba2_alike(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    alike(&mamba2_scan, graph, inputs, [0, 3, 4])
}

/// The row itself of inputs in the dtype in which it is computed, and its first result in the one that it has.
fn alike(
    row: &'static OpRow,
    graph: &mut GraphBuilder,
    inputs: &[Value],
    of: [usize; 3],
) -> Values {
    let mut dtype = None;
    for i in of {
        let value = inputs.get(i).copied().ok_or(GraphError::NoResult)?;
        let next = spec_of(graph, value)?.dtype;
        dtype = Some(
            next.promote(dtype.unwrap_or(next))
                .ok_or(GraphError::NoResult)?,
        );
    }
    let mut work = DType::F32;
    for &value in inputs.iter().filter(|v| **v != Value::Absent) {
        if spec_of(graph, value)?.dtype == DType::F64 {
            work = DType::F64;
        }
    }
    let mut same = Vec::new();
    for &value in inputs {
        same.push(cast_to(graph, value, work)?);
    }
    // Alike already, it has no other meaning.
    if same == inputs {
        return Err(GraphError::NoResult);
    }
    let mut results = graph.apply(row, same, vec![])?;
    if let Some(first) = results.first_mut() {
        *first = cast_to(graph, *first, dtype.ok_or(GraphError::NoResult)?)?;
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, table};

    #[test]
    fn recurrences_give_what_they_saw_and_their_state() {
        let inputs = [
            "f32[rows, 5, 2, 3]",
            "f32[rows, 5, 2, 3]",
            "f32[rows, 5, 4, 7]",
            "f32[rows, 5, 4]",
            "f32[rows, 5, 4]",
        ];
        let with = |state| [&inputs[..], &[state]].concat();
        table(
            &gated_delta,
            &[
                (&with("-"), &[], "f32[rows, 5, 4, 7] f32[rows, 4, 7, 3]"),
                (
                    &with("f64[rows, 4, 7, 3]"),
                    &[],
                    "f32[rows, 5, 4, 7] f64[rows, 4, 7, 3]",
                ),
                (&with("f32[rows, 4, 3, 7]"), &[], "!state"),
            ],
        );
        let halves = [
            "f16[1, 5, 2, 3]",
            "f16[1, 5, 2, 3]",
            "f16[1, 5, 4, 7]",
            "f32[1, 5, 4]",
            "f16[1, 5, 4]",
            "-",
        ];
        table(
            &gated_delta,
            &[(&halves, &[], "f16[1, 5, 4, 7] f32[1, 4, 7, 3]")],
        );
        decomposes(&gated_delta, &halves, &[]);
        let scan = [
            "bf16[2, 5, 4, 3]",
            "f32[2, 5, 4]",
            "f32[4]",
            "bf16[2, 5, 2, 8]",
            "bf16[2, 5, 2, 8]",
            "f32[4]",
            "-",
        ];
        table(
            &mamba2_scan,
            &[(&scan, &[], "bf16[2, 5, 4, 3] f32[2, 4, 3, 8]")],
        );
        decomposes(&mamba2_scan, &scan, &[]);
        let mut other = scan;
        other[3] = "bf16[2, 5, 3, 8]";
        table(&mamba2_scan, &[(&other, &[], "!share")]);
        other = scan;
        other[2] = "i32[4]";
        table(&mamba2_scan, &[(&other, &[], "!i32")]);
    }
}
