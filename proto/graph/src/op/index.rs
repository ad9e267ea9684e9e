//! Ops that read or write where an index tensor says. Indices are of any integer dtype and negative ones count from
//! the end; one that is out of range is an error of the execution.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, dims_text, join, pair},
        ops,
        rules::{Specs, Values, axis_of, one, plain, reshape_to, scalar, size},
    },
    shape::{Dim, Shape, TensorSpec},
};

/// How an update meets what is there.
const REDUCE: &[&str] = &["set", "add", "mul", "max", "min"];

ops! {
    /// Rows of `table` (`[n, k]`, any float or block dtype) at `indices` (i32 `[m]`, each in `[0, n)`),
    /// dequantised to f32 `[m, k]` (ggml's `get_rows`).
    get_rows(table, indices = index;) -> one { shapes: "[n, k], [m] → [m, k]", dtypes: "table f32, f16, bf16 or a block type; indices i32 → f32", effect: Effect::None, infer: get_rows_spec, decompose: None }

    /// Slices of `x` along `axis` at `indices` (`np.take`): the axis is replaced by the axes of `indices`. Of a block
    /// type, `x` is `[n, k]`, the axis 0 and the result f32.
    take(x, indices = index; axis: Int(-8, 7)) -> one { shapes: "x before axis, indices, x after axis", dtypes: "x any; indices integers → x, of a block type f32", effect: Effect::None, infer: take_spec, decompose: Some(take_rows) }

    /// One element of `x` per element of `indices`, which replaces its place along `axis` (`np.take_along_axis`);
    /// the other axes are equal.
    take_along_axis(x, indices = index; axis: Int(-8, 7)) -> one { shapes: "indices", dtypes: "x plain; indices integers → x", effect: Effect::None, infer: take_along_axis_spec, decompose: None }

    /// Slices of `x` (ONNX `GatherND`): each vector along the last axis of `indices` names a place along the axes of
    /// `x` after the first `batch_dims`, which the two share.
    gather_nd(x, indices = index; batch_dims: Int(0, 7)) -> one { shapes: "[b…, i…, l], x [b…, l axes, rest…] → [b…, i…, rest…]", dtypes: "x plain; indices integers → x", effect: Effect::None, infer: gather_nd_spec, decompose: None }

    /// `x` with `updates` at `indices` along `axis` (ONNX `ScatterElements`); `updates` has the shape of `indices`,
    /// which along the other axes may be smaller than `x`. Updates are applied in order, so that of several to one
    /// place `set` keeps the last; `add`, `mul`, `max` and `min` join them with what is there.
    scatter_along_axis(x, indices = index, updates; axis: Int(-8, 7), reduce: Name(REDUCE)) -> one { shapes: "x", dtypes: "x, updates equal, real (bool: set, max, min); indices integers → x", effect: Effect::None, infer: scatter_along_axis_spec, decompose: None }

    /// `x` with slices of `updates` where the vectors along the last axis of `indices` say (ONNX `ScatterND`), in
    /// order, joined as for `scatter_along_axis`.
    scatter_nd(x, indices = index, updates; reduce: Name(REDUCE)) -> one { shapes: "x [l axes, rest…], [i…, l], [i…, rest…] → x", dtypes: "x, updates equal, real (bool: set, max, min); indices integers → x", effect: Effect::None, infer: scatter_nd_spec, decompose: None }

    /// `a[t, u, :] + b[ids[t, u], :]` (ggml's `add_id`): the bias of the expert that a token uses.
    add_id(a, b, ids = index;) -> one { shapes: "[t, u, n], [e, n], [t, u] → [t, u, n]", dtypes: "a, b plain; ids integers → promote(a, b)", effect: Effect::None, infer: add_id_spec, decompose: Some(add_id_of_parts) }
}

fn get_rows_spec(call: &Call<'_>) -> Specs {
    let (table, indices) = (call.tensor(0)?, call.tensor_of(1, DType::I32)?);
    if !(table.dtype.is_block() || matches!(table.dtype, DType::F32 | DType::F16 | DType::BF16)) {
        return Err(call.error(format_args!("table cannot be {}", table.dtype)));
    }
    match (table.shape.dims(), indices.shape.dims()) {
        (&[_, k @ Dim::Fixed(_)], &[m]) => {
            Ok(vec![TensorSpec::new(DType::F32, Shape::new([m, k])?)?])
        }
        _ => Err(call.error(format_args!(
            "table {} must be [n, k] and indices {} must be [m]",
            table.shape, indices.shape
        ))),
    }
}

fn take_spec(call: &Call<'_>) -> Specs {
    let (x, indices) = (call.tensor(0)?, call.tensor(1)?);
    let axis = axis_of(call, call.int(0)?, x.shape.rank())?;
    let (before, after) = x.shape.dims().split_at(axis);
    let dims = [before, indices.shape.dims(), after.get(1..).unwrap_or(&[])];
    if !x.dtype.is_block() {
        return one(call, x.dtype, dims.concat());
    }
    // get_rows reads i32 indices [m], so the rows of x and the indices must fit these.
    let rows = match *x.shape.dims() {
        [Dim::Fixed(n), Dim::Fixed(_)] if axis == 0 => n,
        _ => {
            return Err(call.error(format_args!(
                "x of {} must be [n, k] and the axis 0, not {} and {axis}",
                x.dtype, x.shape
            )));
        }
    };
    if rows > i32::MAX as usize {
        return Err(call.error(format_args!("x of {} has {rows} rows, too many", x.dtype)));
    }
    if indices.shape.is_symbolic() && indices.shape.elements_per_row() != Some(1) {
        return Err(call.error(format_args!(
            "the row dimension of indices {} cannot be flattened to read {}",
            indices.shape, x.dtype
        )));
    }
    one(call, DType::F32, dims.concat())
}

/// Of a block type, by `get_rows`, whose indices are i32 `[m]` and not negative.
fn take_rows(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&take, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, indices) = (call.tensor(0)?, call.tensor(1)?);
    let (&[Dim::Fixed(n), k], &[table, at]) = (x.shape.dims(), inputs) else {
        return Err(call.error("takes a kernel for x of a plain dtype"));
    };
    if !x.dtype.is_block() {
        return Err(call.error("takes a kernel for x of a plain dtype"));
    }
    // Narrowing must not bring an index that is out of range back into it.
    let at = if indices.dtype.kind() == Kind::Signed {
        let wide = graph.cast(at, DType::I64)?;
        let zero = scalar(graph, 0.0, DType::I64)?;
        let size = scalar(graph, n as f64, DType::I64)?;
        let negative = graph.less(wide, zero)?;
        let turned = graph.add(wide, size)?;
        let at = graph.where_(negative, turned, wide)?;
        let least = scalar(graph, -1.0, DType::I64)?;
        let at = graph.maximum(at, least)?;
        graph.minimum(at, size)?
    } else {
        let wide = graph.cast(at, DType::U64)?;
        let size = scalar(graph, n as f64, DType::U64)?;
        graph.minimum(wide, size)?
    };
    let at = graph.cast(at, DType::I32)?;
    let flat = match indices.shape.dims() {
        [first @ Dim::Rows, ..] => Shape::new([*first])?,
        _ => Shape::fixed(&[indices.shape.elements(0).unwrap_or(0)])?,
    };
    let at = reshape_to(graph, at, flat)?;
    let rows = graph.get_rows(table, at)?;
    let shape = Shape::new(join(indices.shape.dims(), &[k]))?;
    Ok(vec![reshape_to(graph, rows, shape)?])
}

fn take_along_axis_spec(call: &Call<'_>) -> Specs {
    let (x, indices) = (plain(call, 0)?, call.tensor(1)?);
    let axis = axis_of(call, call.int(0)?, x.shape.rank())?;
    let (dims, wanted) = (x.shape.dims(), indices.shape.dims());
    let fits = dims.len() == wanted.len()
        && (dims.iter().zip(wanted).enumerate()).all(|(i, (a, b))| i == axis || a == b);
    if !fits {
        return Err(call.error(format_args!(
            "x {} and indices {} may differ along axis {axis} alone",
            x.shape, indices.shape
        )));
    }
    one(call, x.dtype, wanted.to_vec())
}

/// The axes before the last one of an index tensor, and how many axes of `x` its vectors name.
fn vectors<'a>(
    call: &Call<'_>,
    indices: &'a TensorSpec,
    most: usize,
) -> Result<(&'a [Dim], usize), GraphError> {
    match indices.shape.dims().split_last() {
        Some((Dim::Fixed(n), before)) if (1..=most).contains(n) => Ok((before, *n)),
        _ => Err(call.error(format_args!(
            "the last axis of indices {} must be between 1 and {most}",
            indices.shape
        ))),
    }
}

fn gather_nd_spec(call: &Call<'_>) -> Specs {
    let (x, indices) = (plain(call, 0)?, call.tensor(1)?);
    let dims = x.shape.dims();
    let batch = size(call, call.int(0)?)?;
    let shared = (
        dims.get(..batch),
        indices.shape.dims().get(..batch),
        indices.shape.rank() > batch && dims.len() > batch,
    );
    if !matches!(shared, (Some(a), Some(b), true) if a == b) {
        return Err(call.error(format_args!(
            "x {} and indices {} must share {batch} axes and have more",
            x.shape, indices.shape
        )));
    }
    let (before, named) = vectors(call, indices, dims.len() - batch)?;
    let rest = dims.get(batch + named..).unwrap_or(&[]);
    one(call, x.dtype, join(before, rest))
}

/// The dtype that `x` and `updates` share and that `reduce` can join.
fn scattered<'a>(call: &Call<'a>, reduce: usize) -> Result<&'a TensorSpec, GraphError> {
    let (x, updates) = (plain(call, 0)?, plain(call, 2)?);
    if x.dtype != updates.dtype {
        return Err(call.error(format_args!(
            "updates must be {} as x, not {}; cast them first",
            x.dtype, updates.dtype
        )));
    }
    let reduce = call.name(reduce)?;
    let fits = match x.dtype.kind() {
        Kind::Complex => false,
        Kind::Bool => !matches!(reduce, "add" | "mul"),
        _ => true,
    };
    if !fits {
        return Err(call.error(format_args!("{} cannot be scattered by {reduce}", x.dtype)));
    }
    Ok(x)
}

fn scatter_along_axis_spec(call: &Call<'_>) -> Specs {
    let (x, indices) = (scattered(call, 1)?, call.tensor(1)?);
    let updates = call.tensor(2)?;
    let axis = axis_of(call, call.int(0)?, x.shape.rank())?;
    if updates.shape != indices.shape {
        return Err(call.error(format_args!(
            "updates {} must have the shape of indices, {}",
            updates.shape, indices.shape
        )));
    }
    let within = |(i, (a, b)): (usize, (&Dim, &Dim))| match (a, b) {
        _ if i == axis => true,
        (Dim::Fixed(a), Dim::Fixed(b)) => b <= a,
        (a, b) => a == b,
    };
    let pairs = x.shape.dims().iter().zip(indices.shape.dims());
    if x.shape.rank() != indices.shape.rank() || !pairs.enumerate().all(within) {
        return Err(call.error(format_args!(
            "indices {} must have the axes of x {}, none but axis {axis} larger",
            indices.shape, x.shape
        )));
    }
    Ok(vec![x.clone()])
}

fn scatter_nd_spec(call: &Call<'_>) -> Specs {
    let (x, indices) = (scattered(call, 0)?, call.tensor(1)?);
    let updates = call.tensor(2)?;
    let (before, named) = vectors(call, indices, x.shape.rank())?;
    let wanted = join(before, x.shape.dims().get(named..).unwrap_or(&[]));
    if updates.shape.dims() != wanted {
        return Err(call.error(format_args!(
            "updates must be {}, not {}",
            dims_text(&wanted),
            updates.shape
        )));
    }
    Ok(vec![x.clone()])
}

fn add_id_spec(call: &Call<'_>) -> Specs {
    let (a, b, ids) = (plain(call, 0)?, plain(call, 1)?, call.tensor(2)?);
    match (a.shape.dims(), b.shape.dims(), ids.shape.dims()) {
        (&[t, u, n], &[Dim::Fixed(_), n2], &[t2, u2]) if (t, u, n) == (t2, u2, n2) => {}
        _ => {
            return Err(call.error(format_args!(
                "a {}, b {} and ids {} must be [t, u, n], [e, n] and [t, u]",
                a.shape, b.shape, ids.shape
            )));
        }
    }
    let dtype = pair(call, a.dtype, b.dtype)?;
    if dtype == DType::Bool {
        return Err(call.error("a and b cannot both be bool; cast one first"));
    }
    one(call, dtype, a.shape.dims().to_vec())
}

fn add_id_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let &[a, b, ids] = inputs else {
        return Err(GraphError::NoResult);
    };
    let biases = graph.take(b, ids, 0)?;
    Ok(vec![graph.add(a, biases)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, name, table};

    #[test]
    fn reads_have_the_shapes_of_numpy_and_onnx() {
        table(
            &take,
            &[
                (&["f16[5, 4]", "i64[2, 3]"], &[int(0)], "f16[2, 3, 4]"),
                (&["c64[5, 4]", "u8[]"], &[int(-1)], "c64[5]"),
                (&["bool[rows, 4]", "i32[3]"], &[int(1)], "bool[rows, 3]"),
                (&["f32[5, 4]", "i32[rows]"], &[int(0)], "f32[rows, 4]"),
                (&["f32[rows, 4]", "i32[3]"], &[int(0)], "f32[3, 4]"),
                (&["f32[5, 4]", "i32[rows]"], &[int(1)], "!row dimension"),
                (&["q4_0[5, 64]", "i32[rows]"], &[int(-2)], "f32[rows, 64]"),
                (&["q4_0[5, 64]", "u64[2, 3]"], &[int(0)], "f32[2, 3, 64]"),
                (
                    &["q4_0[5, 64]", "i32[rows, 1]"],
                    &[int(0)],
                    "f32[rows, 1, 64]",
                ),
                (
                    &["q4_0[5, 64]", "i32[rows, 2]"],
                    &[int(0)],
                    "!row dimension",
                ),
                (&["q4_0[5, 64]", "i32[3]"], &[int(1)], "!axis 0"),
                (&["q4_0[2, 5, 64]", "i32[3]"], &[int(0)], "![n, k]"),
                (&["f32[5]", "f32[3]"], &[int(0)], "!integer"),
                (&["f32[5]", "bool[3]"], &[int(0)], "!integer"),
                (&["f32[5]", "i32[3]"], &[int(1)], "!no axis 1"),
                (&["f32[]", "i32[3]"], &[int(0)], "!no axis"),
                (
                    &["f32[1, 1, 1, 1, 1]", "i32[1, 1, 1, 1, 1]"],
                    &[int(0)],
                    "!axes",
                ),
                (
                    &["f32[1048576, 1048576]", "i32[2]"],
                    &[int(0)],
                    "f32[2, 1048576]",
                ),
                (
                    &["f32[2, 1048576]", "i32[1048576, 2]"],
                    &[int(0)],
                    "!elements",
                ),
            ],
        );
        table(
            &take_along_axis,
            &[
                (&["i8[5, 4]", "i32[5, 9]"], &[int(1)], "i8[5, 9]"),
                (&["i8[rows, 4]", "i32[rows, 9]"], &[int(1)], "i8[rows, 9]"),
                (&["i8[rows, 4]", "i32[3, 4]"], &[int(0)], "i8[3, 4]"),
                (&["i8[5, 4]", "i32[1, 9]"], &[int(1)], "!axis 1 alone"),
                (&["i8[5, 4]", "i32[9]"], &[int(1)], "!axis 1 alone"),
                (&["q4_0[5, 32]", "i32[5, 1]"], &[int(1)], "!q4_0"),
            ],
        );
        table(
            &gather_nd,
            &[
                (&["f32[2, 3, 4]", "i32[5, 2]"], &[int(0)], "f32[5, 4]"),
                (&["f32[2, 3, 4]", "i32[5, 3]"], &[int(0)], "f32[5]"),
                (&["f32[2, 3, 4]", "i32[3]"], &[int(0)], "f32[]"),
                (&["f32[2, 3, 4]", "i32[2, 7, 1]"], &[int(1)], "f32[2, 7, 4]"),
                (
                    &["f32[rows, 3, 4]", "i32[rows, 1]"],
                    &[int(1)],
                    "f32[rows, 4]",
                ),
                (&["f32[2, 3, 4]", "i32[rows, 3]"], &[int(0)], "f32[rows]"),
                (
                    &["f32[2, 3, 4]", "i32[5, 4]"],
                    &[int(0)],
                    "!between 1 and 3",
                ),
                (
                    &["f32[2, 3, 4]", "i32[5, 0]"],
                    &[int(0)],
                    "!between 1 and 3",
                ),
                (
                    &["f32[2, 3, 4]", "i32[2, 3]"],
                    &[int(1)],
                    "!between 1 and 2",
                ),
                (
                    &["f32[2, 3, 4]", "i32[rows]"],
                    &[int(0)],
                    "!between 1 and 3",
                ),
                (&["f32[2, 3]", "i32[3, 1]"], &[int(1)], "!share 1"),
                (&["f32[2, 3]", "i32[2]"], &[int(7)], "!share 7"),
                (&["f32[2]", "i32[2]"], &[int(1)], "!share 1"),
            ],
        );
    }

    #[test]
    fn writes_keep_the_shape() {
        let set = [int(1), name("set")];
        table(
            &scatter_along_axis,
            &[
                (&["f32[5, 4]", "i32[3, 9]", "f32[3, 9]"], &set, "f32[5, 4]"),
                (
                    &["f32[rows, 4]", "i32[rows, 2]", "f32[rows, 2]"],
                    &set,
                    "f32[rows, 4]",
                ),
                (
                    &["f32[5, 4]", "i32[6, 2]", "f32[6, 2]"],
                    &set,
                    "!none but axis 1",
                ),
                (
                    &["f32[5, 4]", "i32[rows, 2]", "f32[rows, 2]"],
                    &set,
                    "!none but axis 1",
                ),
                (
                    &["f32[rows, 4]", "i32[2, 2]", "f32[2, 2]"],
                    &set,
                    "!none but axis 1",
                ),
                (&["f32[5, 4]", "i32[4]", "f32[4]"], &set, "!none but axis 1"),
                (
                    &["f32[5, 4]", "i32[3, 2]", "f32[2, 3]"],
                    &set,
                    "!shape of indices",
                ),
                (&["f32[5, 4]", "i32[3, 2]", "f16[3, 2]"], &set, "!cast"),
                (&["c64[5, 4]", "i32[3, 2]", "c64[3, 2]"], &set, "!c64"),
                (
                    &["bool[5, 4]", "i32[3, 2]", "bool[3, 2]"],
                    &set,
                    "bool[5, 4]",
                ),
                (
                    &["bool[5, 4]", "i32[3, 2]", "bool[3, 2]"],
                    &[int(1), name("add")],
                    "!bool",
                ),
                (
                    &["u8[5, 4]", "i32[3, 2]", "u8[3, 2]"],
                    &[int(1), name("max")],
                    "u8[5, 4]",
                ),
                (
                    &["u8[5, 4]", "i32[3, 2]", "u8[3, 2]"],
                    &[int(1), name("min ")],
                    "!one of",
                ),
            ],
        );
        let add = [name("add")];
        table(
            &scatter_nd,
            &[
                (&["f32[5, 4]", "i32[3, 1]", "f32[3, 4]"], &add, "f32[5, 4]"),
                (
                    &["f32[5, 4]", "i32[2, 3, 2]", "f32[2, 3]"],
                    &add,
                    "f32[5, 4]",
                ),
                (
                    &["f32[rows, 4]", "i32[2, 1]", "f32[2, 4]"],
                    &add,
                    "f32[rows, 4]",
                ),
                (
                    &["f32[5, 4]", "i32[rows, 1]", "f32[rows, 4]"],
                    &add,
                    "f32[5, 4]",
                ),
                (&["f32[5, 4]", "i32[3, 1]", "f32[3, 5]"], &add, "![3, 4]"),
                (
                    &["f32[5, 4]", "i32[3, 3]", "f32[3]"],
                    &add,
                    "!between 1 and 2",
                ),
                (&["f32[]", "i32[0]", "f32[]"], &add, "!between 1 and 0"),
            ],
        );
    }

    #[test]
    fn composites_have_their_specs() {
        for indices in [
            "i8[2, 3]",
            "i32[rows]",
            "i64[]",
            "u8[3]",
            "u64[rows, 1]",
            "i32[0]",
        ] {
            for x in ["q4_0[5, 64]", "q6_k[5, 256]", "q8_0[0, 32]"] {
                decomposes(&take, &[x, indices], &[int(0)]);
            }
        }
        for (a, b) in [("f16", "f32"), ("i8", "bf16"), ("c64", "f32"), ("u8", "i8")] {
            let (a, b) = (format!("{a}[rows, 2, 6]"), format!("{b}[4, 6]"));
            decomposes(&add_id, &[&a, &b, "i32[rows, 2]"], &[]);
        }
        table(
            &add_id,
            &[
                (
                    &["f16[7, 2, 6]", "bf16[4, 6]", "u8[7, 2]"],
                    &[],
                    "f32[7, 2, 6]",
                ),
                (&["f16[7, 2, 6]", "f16[4, 5]", "u8[7, 2]"], &[], "![e, n]"),
                (&["f16[7, 2, 6]", "f16[4, 6]", "u8[7, 1]"], &[], "![t, u]"),
                (&["bool[7, 2, 6]", "bool[4, 6]", "u8[7, 2]"], &[], "!bool"),
            ],
        );
    }
}
