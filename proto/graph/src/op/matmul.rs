//! Matrix multiplication.

use hotcell_proto::limits;

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, dims_text, float, given, join, pair, shaped, swapped},
        ops,
        rules::{
            Specs, Values, apply_as, cast_to, common, dtype_error, one, plain, row_error, scalar,
            spec_of,
        },
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// `x @ wᵀ` (ggml's `mul_mat`): `x` `[…, m, k]`, `w` `[n, k]` of any float or block dtype, or `[…, n, k]` of a
    /// float dtype, where each axis of `w` before the last two divides that of `x` and a matrix of `w` serves so many
    /// successive ones of `x`. The result is f32 `[…, m, n]`. Where `x` is f32 `[m, k]`, each output is summed in an
    /// order fixed by the dtype of `w` alone.
    mul_mat(x, w;) -> one { shapes: "[…, m, k], [n, k] or […, n, k] → […, m, n]", dtypes: "x float; w float or a block type → f32", effect: Effect::None, infer: mul_mat_spec, decompose: Some(mul_mat_of_parts) }

    /// `np.matmul`: `[…, m, k] @ […, k, n]`, the axes before the last two broadcast; of one axis, `a` is `[1, k]` and
    /// `b` is `[k, 1]`, and that 1 is not in the result. Sums of f16 and bf16 are f32 and rounded once; an empty sum
    /// is 0.
    matmul(a, b;) -> one { shapes: "[…, m, k], […, k, n] → […, m, n]", dtypes: "float or c64 → promote(a, b)", effect: Effect::None, infer: matmul_spec, decompose: Some(matmul_of_matrices) }

    /// `x` times the experts that each token uses (ggml's `mul_mat_id`): `experts` `[e, n, k]` of any float or block
    /// dtype, `x` f32 `[t, u, k]`, or `[t, 1, k]` for all of a token's experts, and `ids` `[t, u]`.
    mul_mat_id(experts, x, ids = index;) -> one { shapes: "[e, n, k], [t, u or 1, k], [t, u] → [t, u, n]", dtypes: "experts float or a block type; x f32; ids integers → f32", effect: Effect::None, infer: mul_mat_id_spec, decompose: Some(mul_mat_id_in_f32) }

    /// `beta · c + alpha · (a @ b)` (MLX's `addmm`): `a @ b` as `matmul` has it, and `c` broadcasts to that.
    addmm(c, a, b; alpha: Float(-1e30, 1e30), beta: Float(-1e30, 1e30)) -> one { shapes: "c, […, m, k], […, k, n] → […, m, n]", dtypes: "float or c64 → promote(c, a, b)", effect: Effect::None, infer: addmm_spec, decompose: Some(addmm_of_parts) }

    /// `a[lhs] @ b[rhs]` (MLX's `gather_mm`): `lhs` and `rhs` name matrices among those of `a` `[…, m, k]` and `b`
    /// `[…, k, n]`, the axes before the last two as one; an absent one names each matrix where it stands. What they
    /// name broadcasts. `sorted` is a hint and changes nothing.
    gather_mm(a, b, lhs = optional_index, rhs = optional_index; sorted: Bool) -> one { shapes: "[…, m, k], […, k, n], lhs, rhs → [broadcast(lhs, rhs)…, m, n]", dtypes: "a, b float or c64 → promote(a, b); lhs, rhs integers", effect: Effect::None, infer: gather_mm_spec, decompose: Some(gather_mm_of_parts) }
}

/// How many successive matrices of `x` one of `w` serves along each axis before the last two, outermost first, for
/// the axes that `w` has.
fn groups(call: &Call<'_>, x: &Shape, w: &Shape) -> Result<Vec<usize>, GraphError> {
    let batch = |s: &Shape| {
        s.dims()
            .get(..s.rank().saturating_sub(2))
            .map(<[Dim]>::to_vec)
    };
    let (xs, ws) = (batch(x).unwrap_or_default(), batch(w).unwrap_or_default());
    let skip = xs.len().checked_sub(ws.len());
    let pairs = xs.iter().skip(skip.unwrap_or(0)).zip(&ws);
    let each = pairs.map(|(x, w)| match (*x, *w) {
        (x, w) if x == w => Some(1),
        (Dim::Rows, Dim::Fixed(1)) => Some(1),
        (Dim::Fixed(x), Dim::Fixed(w)) if w > 0 && x % w == 0 => Some(x / w),
        _ => None,
    });
    let each: Option<Vec<usize>> = each.collect();
    match (skip, each) {
        (Some(_), Some(each)) => Ok(each),
        _ => Err(call.error(format_args!(
            "the matrices of w {w} must divide those of x {x}"
        ))),
    }
}

fn mul_mat_spec(call: &Call<'_>) -> Specs {
    let (x, w) = (float(call, 0)?, call.tensor(1)?);
    if !(w.dtype.is_float() || (w.dtype.is_block() && w.shape.rank() == 2)) {
        return Err(call.error(format_args!("w {w} must be float or a block type [n, k]")));
    }
    match (x.shape.dims(), w.shape.dims()) {
        ([before @ .., m, Dim::Fixed(k)], [.., n @ Dim::Fixed(_), Dim::Fixed(k2)]) if k == k2 => {
            groups(call, &x.shape, &w.shape)?;
            one(call, DType::F32, join(before, &[*m, *n]))
        }
        _ => Err(call.error(format_args!(
            "x {} and w {} must be […, m, k] and [n, k]",
            x.shape, w.shape
        ))),
    }
}

/// A float or c64 input.
fn factor<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = plain(call, i)?;
    match t.dtype.kind() {
        Kind::Float | Kind::Complex => Ok(t),
        _ => Err(call.error(format_args!(
            "{} must be float or c64, not {}; cast it first",
            call.input_name(i),
            t.dtype
        ))),
    }
}

/// NumPy's rule for the shape of a product.
fn product(call: &Call<'_>, a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, GraphError> {
    let refused = || {
        call.error(format_args!(
            "a {} and b {} must be […, m, k] and […, k, n], with no row dimension as k",
            dims_text(a),
            dims_text(b)
        ))
    };
    let (before_a, m, k) = match a {
        [] => return Err(refused()),
        [k] => (&[][..], None, *k),
        [before @ .., m, k] => (before, Some(*m), *k),
    };
    let (before_b, n, k2) = match b {
        [] => return Err(refused()),
        [k] => (&[][..], None, *k),
        [before @ .., k, n] => (before, Some(*n), *k),
    };
    if k != k2 || k == Dim::Rows {
        return Err(refused());
    }
    let batch = |dims: &[Dim]| Shape::new(dims.iter().copied());
    let batch = batch(before_a)
        .and_then(|a| a.broadcast(&batch(before_b)?))
        .map_err(|e| call.error(e))?;
    let mut dims = batch.dims().to_vec();
    dims.extend(m);
    dims.extend(n);
    Ok(dims)
}

fn matmul_spec(call: &Call<'_>) -> Specs {
    let (a, b) = (factor(call, 0)?, factor(call, 1)?);
    let dims = product(call, a.shape.dims(), b.shape.dims())?;
    one(call, pair(call, a.dtype, b.dtype)?, dims)
}

fn mul_mat_id_spec(call: &Call<'_>) -> Specs {
    let (experts, x) = (call.tensor(0)?, call.tensor_of(1, DType::F32)?);
    let ids = call.tensor(2)?;
    if !(experts.dtype.is_block() || experts.dtype.is_float()) {
        return Err(call.error(format_args!("experts cannot be {}", experts.dtype)));
    }
    chosen(call, experts, x, ids)
}

/// What products of `x` with chosen experts give, if their shapes fit.
pub(super) fn chosen(
    call: &Call<'_>,
    experts: &TensorSpec,
    x: &TensorSpec,
    ids: &TensorSpec,
) -> Specs {
    match (experts.shape.dims(), x.shape.dims(), ids.shape.dims()) {
        (&[Dim::Fixed(_), n @ Dim::Fixed(_), k @ Dim::Fixed(_)], &[t, u, k2], &[t2, u2])
            if k == k2 && t == t2 && (u == u2 || u == Dim::Fixed(1)) =>
        {
            one(call, DType::F32, vec![t, u2, n])
        }
        _ => Err(call.error(format_args!(
            "experts {}, x {} and ids {} must be [e, n, k], [t, u or 1, k] and [t, u]",
            experts.shape, x.shape, ids.shape
        ))),
    }
}

/// Experts of f64 are rounded to f32 first, as the factor beside them is.
fn mul_mat_id_in_f32(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    _: &[Attribute],
) -> Result<Vec<Value>, GraphError> {
    let &[experts, x, ids] = inputs else {
        return Err(GraphError::NoResult);
    };
    let experts = graph.cast(experts, DType::F32)?;
    Ok(vec![graph.mul_mat_id(experts, x, ids)?])
}

fn addmm_spec(call: &Call<'_>) -> Specs {
    let (c, a, b) = (factor(call, 0)?, factor(call, 1)?, factor(call, 2)?);
    let dims = product(call, a.shape.dims(), b.shape.dims())?;
    let shape = Shape::new(dims).map_err(|e| call.error(e))?;
    let both = c.shape.broadcast(&shape).map_err(|e| call.error(e))?;
    if both != shape {
        return Err(call.error(format_args!("c {} must broadcast to {shape}", c.shape)));
    }
    let dtype = pair(call, c.dtype, pair(call, a.dtype, b.dtype)?)?;
    one(call, dtype, shape.dims().to_vec())
}

/// The axes that stand before the last two once `index` has named matrices of input `i`, and those two.
fn gathered(call: &Call<'_>, i: usize, index: usize) -> Result<(TensorSpec, Vec<Dim>), GraphError> {
    let t = factor(call, i)?;
    let (before, matrix) = t.shape.dims().split_at(t.shape.rank().saturating_sub(2));
    if matrix.len() != 2 {
        return Err(call.error(format_args!(
            "{} must have two axes or more, not {}",
            call.input_name(i),
            t.shape
        )));
    }
    if call.optional(index)?.is_none() {
        return Ok((t.clone(), t.shape.dims().to_vec()));
    }
    let indices = call.tensor(index)?;
    let one_axis = before.len() == 1;
    if t.shape.is_symbolic() && !one_axis {
        return Err(row_error(call, "named together with other axes"));
    }
    Ok((t.clone(), join(indices.shape.dims(), matrix)))
}

fn gather_mm_spec(call: &Call<'_>) -> Specs {
    let ((a, a_dims), (b, b_dims)) = (gathered(call, 0, 2)?, gathered(call, 1, 3)?);
    for dims in [&a_dims, &b_dims] {
        Shape::new(dims.iter().copied()).map_err(|e| call.error(e))?;
    }
    let dims = product(call, &a_dims, &b_dims)?;
    one(call, pair(call, a.dtype, b.dtype)?, dims)
}

fn mul_mat_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&mul_mat, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, w) = (call.tensor(0)?, call.tensor(1)?);
    let &[x_value, w_value] = inputs else {
        return Err(GraphError::NoResult);
    };
    if x.dtype != DType::F32 || w.dtype == DType::F64 {
        let x = cast_to(graph, x_value, DType::F32)?;
        let w = match w.dtype {
            DType::F64 => graph.cast(w_value, DType::F32)?,
            _ => w_value,
        };
        return Ok(vec![graph.mul_mat(x, w)?]);
    }
    // As one matrix, so that the kernel of two axes serves more.
    if let ([before @ .., _, k], [n, _]) = (x.shape.dims(), w.shape.dims())
        && !before.is_empty()
        && !x.shape.is_symbolic()
    {
        let rows = x
            .shape
            .dims()
            .split_last()
            .map_or(&[][..], |(_, rows)| rows);
        let count = rows.iter().map(|d| d.at(0)).product::<usize>();
        let flat = shaped(graph, x_value, [count.into(), *k])?;
        let y = graph.mul_mat(flat, w_value)?;
        return Ok(vec![shaped(graph, y, join(rows, &[*n]))?]);
    }
    // Blocks that no kernel multiplies as they are.
    if w.dtype.is_block() && x.shape.rank() == 2 {
        let w = graph.cast(w_value, DType::F32)?;
        return Ok(vec![graph.mul_mat(x_value, w)?]);
    }
    let groups = groups(&call, &x.shape, &w.shape)?;
    let (mut w_value, mut w_dims) = (cast_to(graph, w_value, DType::F32)?, vec![]);
    let skip = x.shape.rank() - 2 - groups.len();
    let mut x_dims = x.shape.dims()[..skip].to_vec();
    let mut spare = limits::MAX_RANK - x.shape.rank();
    let pairs = x.shape.dims().iter().skip(skip).zip(w.shape.dims());
    for (i, ((&x, &w), &group)) in pairs.zip(&groups).enumerate() {
        let splits = group > 1 && w != Dim::Fixed(1);
        if splits && spare > 0 {
            spare -= 1;
            x_dims.extend([w, group.into()]);
            w_dims.extend([w, Dim::Fixed(1)]);
        } else {
            if splits {
                w_value = graph.repeat(w_value, group as i64, i as i64)?;
            }
            x_dims.push(x);
            w_dims.push(if splits { x } else { w });
        }
    }
    let matrix = |s: &Shape| s.dims()[s.rank() - 2..].to_vec();
    let x_value = shaped(graph, x_value, join(&x_dims, &matrix(&x.shape)))?;
    let w_value = shaped(graph, w_value, join(&w_dims, &matrix(&w.shape)))?;
    let turned = swapped(graph, w_value)?;
    let y = graph.matmul(x_value, turned)?;
    let [result] = mul_mat_spec(&call)?
        .try_into()
        .map_err(|_| GraphError::NoResult)?;
    let TensorSpec { shape, .. } = result;
    Ok(vec![shaped(graph, y, shape.dims().iter().copied())?])
}

/// Of one dtype and at least two axes each.
fn matmul_of_matrices(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&matmul, graph, inputs, attributes)?;
    let call = parts.call();
    let (a, b) = (call.tensor(0)?, call.tensor(1)?);
    if a.dtype != b.dtype {
        let dtype = pair(&call, a.dtype, b.dtype)?;
        return apply_as(graph, &matmul, inputs, attributes, 0, dtype);
    }
    let &[mut left, mut right] = inputs else {
        return Err(GraphError::NoResult);
    };
    if let &[k] = a.shape.dims() {
        left = shaped(graph, left, [Dim::Fixed(1), k])?;
    }
    if let &[k] = b.shape.dims() {
        right = shaped(graph, right, [k, Dim::Fixed(1)])?;
    }
    if (left, right) == (inputs[0], inputs[1]) {
        return Err(dtype_error(&call, a.dtype));
    }
    let y = graph.matmul(left, right)?;
    let dims = product(&call, a.shape.dims(), b.shape.dims())?;
    Ok(vec![shaped(graph, y, dims)?])
}

fn addmm_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&addmm, graph, inputs, attributes)?;
    let call = parts.call();
    let dtype = common(graph, inputs)?;
    let mut work = [Value::Absent; 3];
    for (i, v) in work.iter_mut().enumerate() {
        *v = given(graph, inputs, i, dtype.working())?.ok_or(GraphError::NoResult)?;
    }
    let [c, a, b] = work;
    let y = graph.matmul(a, b)?;
    let y = times(graph, y, call.float(0)?)?;
    let c = times(graph, c, call.float(1)?)?;
    let y = graph.add(c, y)?;
    Ok(vec![cast_to(graph, y, dtype)?])
}

/// `x · factor`.
fn times(graph: &mut GraphBuilder, x: Value, factor: f64) -> Result<Value, GraphError> {
    if factor == 1.0 {
        return Ok(x);
    }
    let dtype = spec_of(graph, x)?.dtype;
    let factor = scalar(graph, factor, dtype)?;
    graph.mul(x, factor)
}

fn gather_mm_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let mut factors = [Value::Absent; 2];
    for (i, factor) in factors.iter_mut().enumerate() {
        let (Some(&matrices), Some(&index)) = (inputs.get(i), inputs.get(i + 2)) else {
            return Err(GraphError::NoResult);
        };
        *factor = matrices;
        if index != Value::Absent {
            let shape = spec_of(graph, matrices)?.shape;
            let (before, matrix) = shape.dims().split_at(shape.rank().saturating_sub(2));
            let count = match before {
                [one] => *one,
                _ => before.iter().map(|d| d.at(0)).product::<usize>().into(),
            };
            let flat = shaped(graph, matrices, join(&[count], matrix))?;
            *factor = graph.take(flat, index, 0)?;
        }
    }
    let [a, b] = factors;
    Ok(vec![graph.matmul(a, b)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, number, table, yes};

    #[test]
    fn products_have_the_shapes_of_numpy() {
        table(
            &matmul,
            &[
                (&["f32[3, 4]", "f32[4, 5]"], &[], "f32[3, 5]"),
                (
                    &["f16[2, 1, 3, 4]", "bf16[7, 4, 5]"],
                    &[],
                    "f32[2, 7, 3, 5]",
                ),
                (&["c64[4]", "f64[4]"], &[], "c64[]"),
                (&["f32[4]", "f32[2, 4, 5]"], &[], "f32[2, 5]"),
                (&["f32[2, 3, 4]", "f32[4]"], &[], "f32[2, 3]"),
                (&["f32[3, 0]", "f32[0, 5]"], &[], "f32[3, 5]"),
                (&["f32[rows, 4]", "f32[4, 5]"], &[], "f32[rows, 5]"),
                (&["f32[rows, 4]", "f32[4]"], &[], "f32[rows]"),
                (&["f32[4]", "f32[rows, 4, 5]"], &[], "f32[rows, 5]"),
                (
                    &["f32[rows, 3, 4]", "f32[rows, 4, 5]"],
                    &[],
                    "f32[rows, 3, 5]",
                ),
                (&["f32[rows]", "f32[rows, 5]"], &[], "!row dimension"),
                (&["f32[rows, 4]", "f32[2, 4, 5]"], &[], "!outermost"),
                (&["f32[3, 4]", "f32[5, 4]"], &[], "!k"),
                (&["f32[2, 3, 4]", "f32[3, 4, 5]"], &[], "!broadcast"),
                (&["f32[]", "f32[4]"], &[], "!k"),
                (&["i32[3, 4]", "f32[4, 5]"], &[], "!cast it first"),
                (&["q4_0[3, 32]", "f32[32, 5]"], &[], "!q4_0"),
                (&["f32[1048576, 1]", "f32[1, 2097152]"], &[], "!elements"),
            ],
        );
        table(
            &addmm,
            &[
                (
                    &["f16[5]", "f16[3, 4]", "f16[4, 5]"],
                    &[number(1.0), number(0.5)],
                    "f16[3, 5]",
                ),
                (
                    &["f32[]", "bf16[rows, 4]", "f16[4, 5]"],
                    &[number(2.0), number(1.0)],
                    "f32[rows, 5]",
                ),
                (
                    &["f16[2, 3, 5]", "f16[3, 4]", "f16[4, 5]"],
                    &[number(1.0), number(1.0)],
                    "!c [2, 3, 5]",
                ),
                (
                    &["f16[4]", "f16[3, 4]", "f16[4, 5]"],
                    &[number(1.0), number(1.0)],
                    "!broadcast",
                ),
                (
                    &["i32[5]", "f16[3, 4]", "f16[4, 5]"],
                    &[number(1.0), number(1.0)],
                    "!cast it first",
                ),
            ],
        );
        let hint = [yes(true)];
        table(
            &gather_mm,
            &[
                (
                    &["f32[6, 1, 4]", "f16[8, 4, 5]", "-", "u32[6]"],
                    &hint,
                    "f32[6, 1, 5]",
                ),
                (
                    &["f32[2, 3, 1, 4]", "f32[8, 4, 5]", "i32[7, 1]", "u32[9]"],
                    &hint,
                    "f32[7, 9, 1, 5]",
                ),
                (
                    &["f32[3, 4]", "f32[8, 4, 5]", "-", "i32[rows]"],
                    &hint,
                    "f32[rows, 3, 5]",
                ),
                (
                    &["f32[rows, 3, 4]", "f32[8, 4, 5]", "i32[6]", "i32[6]"],
                    &hint,
                    "f32[6, 3, 5]",
                ),
                (
                    &["f32[rows, 4]", "f32[8, 4, 5]", "i32[6]", "i32[6]"],
                    &hint,
                    "!row dimension",
                ),
                (
                    &["f32[rows, 2, 3, 4]", "f32[8, 4, 5]", "i32[6]", "-"],
                    &hint,
                    "!row dimension",
                ),
                (&["f32[4]", "f32[8, 4, 5]", "-", "-"], &hint, "!two axes"),
                (
                    &["f32[3, 4]", "f32[8, 4, 5]", "-", "f32[2]"],
                    &hint,
                    "!integer",
                ),
                (
                    &["f32[3, 4]", "f32[8, 4, 5]", "i32[1, 1, 1, 1, 1, 1, 1]", "-"],
                    &hint,
                    "!axes",
                ),
            ],
        );
    }

    #[test]
    fn weights_have_one_matrix_or_serve_groups() {
        table(
            &mul_mat,
            &[
                (&["f32[rows, 64]", "q4_0[10, 64]"], &[], "f32[rows, 10]"),
                (&["f16[2, 3, 64]", "q4_0[10, 64]"], &[], "f32[2, 3, 10]"),
                (
                    &["f64[rows, 3, 64]", "f64[10, 64]"],
                    &[],
                    "f32[rows, 3, 10]",
                ),
                (
                    &["f32[2, 8, 3, 64]", "bf16[4, 10, 64]"],
                    &[],
                    "f32[2, 8, 3, 10]",
                ),
                (&["f32[8, 3, 64]", "bf16[3, 10, 64]"], &[], "!divide"),
                (&["f32[3, 64]", "bf16[1, 10, 64]"], &[], "!divide"),
                (&["f32[8, 3, 64]", "q4_0[4, 10, 64]"], &[], "!block type"),
                (
                    &["f32[rows, 3, 64]", "f32[rows, 10, 64]"],
                    &[],
                    "f32[rows, 3, 10]",
                ),
                (&["f32[0, 3, 64]", "f32[0, 10, 64]"], &[], "f32[0, 3, 10]"),
                (&["f32[4, 3, 64]", "f32[0, 10, 64]"], &[], "!divide"),
                (&["f32[3, 64]", "f32[rows, 64]"], &[], "![…, m, k]"),
                (&["f32[64]", "f32[10, 64]"], &[], "![…, m, k]"),
                (&["f32[3, 32]", "f32[10, 64]"], &[], "![…, m, k]"),
                (&["i32[3, 64]", "f32[10, 64]"], &[], "!float"),
                (&["f32[3, 64]", "i8[10, 64]"], &[], "!float or a block"),
            ],
        );
        table(
            &mul_mat_id,
            &[
                (
                    &["q4_0[8, 5, 32]", "f32[rows, 1, 32]", "i32[rows, 2]"],
                    &[],
                    "f32[rows, 2, 5]",
                ),
                (
                    &["f64[8, 5, 7]", "f32[3, 2, 7]", "u8[3, 2]"],
                    &[],
                    "f32[3, 2, 5]",
                ),
                (
                    &["f32[8, 5, 7]", "f32[3, 3, 7]", "u8[3, 2]"],
                    &[],
                    "![t, u or 1, k]",
                ),
                (
                    &["f32[8, 5, 7]", "f32[4, 2, 7]", "u8[3, 2]"],
                    &[],
                    "![t, u or 1, k]",
                ),
                (
                    &["f32[8, 5, 7]", "f32[3, 2, 6]", "u8[3, 2]"],
                    &[],
                    "![t, u or 1, k]",
                ),
                (&["i32[8, 5, 7]", "f32[3, 2, 7]", "u8[3, 2]"], &[], "!i32"),
                (&["f32[8, 5, 7]", "f16[3, 2, 7]", "u8[3, 2]"], &[], "!f32"),
            ],
        );
    }

    #[test]
    fn decompositions_have_the_specs_of_the_rows() {
        for (x, w) in [
            ("f16[3, 64]", "q4_0[10, 64]"),
            ("f32[rows, 64]", "f64[10, 64]"),
            ("f32[rows, 64]", "bf16[10, 64]"),
            ("f32[rows, 64]", "q8_0[10, 64]"),
            ("f64[2, 0, 64]", "f16[10, 64]"),
            ("bf16[rows, 3, 256]", "q6_k[10, 256]"),
            ("bf16[rows, 3, 64]", "q8_0[10, 64]"),
            ("f32[2, 8, 3, 64]", "bf16[4, 10, 64]"),
            ("f16[rows, 8, 3, 64]", "f32[1, 4, 10, 64]"),
            ("f32[4, 4, 4, 4, 4, 4, 3, 2]", "f32[2, 2, 2, 1, 4, 2, 5, 2]"),
            ("f32[0, 3, 64]", "f32[0, 10, 64]"),
        ] {
            decomposes(&mul_mat, &[x, w], &[]);
        }
        for (a, b) in [
            ("f16[3, 4]", "f32[4, 5]"),
            ("f64[4]", "c64[4]"),
            ("f32[4]", "f32[rows, 4, 5]"),
            ("f32[rows, 4]", "f32[4]"),
        ] {
            decomposes(&matmul, &[a, b], &[]);
        }
        for dtype in ["f16", "bf16", "f32", "f64", "c64"] {
            let of = |dims| format!("{dtype}{dims}");
            for factors in [[1.0, 1.0], [0.5, 2.0], [0.0, -3.0]].map(|f| f.map(number)) {
                let [c, a, b] = ["[5]", "[rows, 4]", "[4, 5]"].map(of);
                decomposes(&addmm, &[&c, &a, &b], &factors);
            }
            let [a, b] = ["[2, 3, 1, 4]", "[8, 4, 5]"].map(of);
            for indices in [
                ["u8[7, 1]", "i64[9]"],
                ["-", "i32[3]"],
                ["i32[rows, 8]", "-"],
                ["i8[]", "i8[]"],
            ] {
                decomposes(&gather_mm, &[&a, &b, indices[0], indices[1]], &[yes(false)]);
            }
        }
    }
}
