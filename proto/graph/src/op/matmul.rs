//! Matrix multiplication.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, dims_text, float, given, indices_of, join, pair, shaped},
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
    mul_mat(x, w;) -> one { shapes: "[…, m, k], [n, k] or […, n, k] → […, m, n]", dtypes: "x float; w float or a block type → f32", effect: Effect::None, infer: mul_mat_spec, decompose: None }

    /// `np.matmul`: `[…, m, k] @ […, k, n]`, the axes before the last two broadcast; of one axis, `a` is `[1, k]` and
    /// `b` is `[k, 1]`, and that 1 is not in the result. Sums of f16 and bf16 are f32 and rounded once; an empty sum
    /// is 0.
    matmul(a, b;) -> one { shapes: "[…, m, k], […, k, n] → […, m, n]", dtypes: "float or c64 → promote(a, b)", effect: Effect::None, infer: matmul_spec, decompose: Some(matmul_of_matrices) }

    /// `x` times the experts that each token uses (ggml's `mul_mat_id`): `experts` `[e, n, k]` of any float or block
    /// dtype, `x` f32 `[t, u, k]`, or `[t, 1, k]` for all of a token's experts, and `ids` `[t, u]`.
    mul_mat_id(experts, x, ids;) -> one { shapes: "[e, n, k], [t, u or 1, k], [t, u] → [t, u, n]", dtypes: "experts float or a block type; x f32; ids integers → f32", effect: Effect::None, infer: mul_mat_id_spec, decompose: None }

    /// `beta · c + alpha · (a @ b)` (MLX's `addmm`): `a @ b` as `matmul` has it, and `c` broadcasts to that.
    addmm(c, a, b; alpha: Float(-1e30, 1e30), beta: Float(-1e30, 1e30)) -> one { shapes: "c, […, m, k], […, k, n] → […, m, n]", dtypes: "float or c64 → promote(c, a, b)", effect: Effect::None, infer: addmm_spec, decompose: Some(addmm_of_parts) }

    /// `a[lhs] @ b[rhs]` (MLX's `gather_mm`): `lhs` and `rhs` name matrices among those of `a` `[…, m, k]` and `b`
    /// `[…, k, n]`, the axes before the last two as one; an absent one names each matrix where it stands. What they
    /// name broadcasts. `sorted` is a hint and changes nothing.
    gather_mm(a, b, lhs = optional, rhs = optional; sorted: Bool) -> one { shapes: "[…, m, k], […, k, n], lhs, rhs → [broadcast(lhs, rhs)…, m, n]", dtypes: "a, b float or c64 → promote(a, b); lhs, rhs integers", effect: Effect::None, infer: gather_mm_spec, decompose: Some(gather_mm_of_parts) }
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
    let ids = indices_of(call, 2)?;
    if !(experts.dtype.is_block() || experts.dtype.is_float()) {
        return Err(call.error(format_args!("experts cannot be {}", experts.dtype)));
    }
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
    let indices = indices_of(call, index)?;
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
