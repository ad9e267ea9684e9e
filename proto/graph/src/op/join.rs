//! Ops that put tensors together or take them apart.

use hotcell_proto::limits;

use crate::{
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, ops,
        rules::{self, Specs, Values},
    },
    shape::{Dim, TensorSpec},
};

ops! {
    /// The tensors one after another along `axis`, equal along the others.
    concat(tensors = many; axis: Int(-8, 7)) -> one
    { shapes: "the sum along axis, which is not the row dimension", dtypes: "promote(tensors): any but a block type", effect: Effect::None, infer: concat_spec,
      decompose: Some(|g, x, a| rules::promoting(g, &concat, x, a, 0)) }

    /// Tensors of one shape along a new axis, which is the result's `axis`.
    stack(tensors = many; axis: Int(-8, 7)) -> one
    { shapes: "the number of tensors at axis; not in front of the row dimension", dtypes: "promote(tensors): any but a block type", effect: Effect::None, infer: stack_spec, decompose: Some(stack_of_parts) }

    /// `x` cut along `axis` into parts of these sizes, which are all of it.
    split(x; sizes: Ints(0, 1 << 40), axis: Int(-8, 7)) -> many
    { shapes: "sizes[i] at axis, which is not the row dimension", dtypes: "all but block types", effect: Effect::None, infer: split_spec, decompose: Some(split_of_parts) }

    /// What the members of a communicator have as `x`, one after another along its last axis, in the order of their ranks (the
    /// all-gather of MPI and NCCL). All of them execute it at the same place of their graphs, with as many rows. A device
    /// refuses it that is not one of so many members, and in graphs of clients; with one member it is `x`.
    all_gather(x; members: Int(1, limits::MAX_MEMBERS as i64)) -> one
    { shapes: "x, members times as long along the last axis, which is not the row dimension", dtypes: "all but block types", effect: Effect::None, infer: all_gather_spec, decompose: Some(all_gather_of_one) }
}

fn tensors<'a>(call: &Call<'a>) -> Result<Vec<&'a TensorSpec>, GraphError> {
    (0..call.inputs.len()).map(|i| call.tensor(i)).collect()
}

fn concat_spec(call: &Call<'_>) -> Specs {
    let dtype = rules::promoted(call, 0)?;
    let all = tensors(call)?;
    let first = all
        .first()
        .ok_or_else(|| call.error("there is no tensor"))?;
    let rank = first.shape.rank();
    let axis = rules::axis_of(call, call.int(0)?, rank)?;
    let mut sum = 0usize;
    for t in &all {
        let dims = t.shape.dims();
        let apart = |(i, (a, b)): (usize, (&Dim, &Dim))| i != axis && a != b;
        if dims.len() != rank || first.shape.dims().iter().zip(dims).enumerate().any(apart) {
            return Err(call.error(format_args!(
                "{} and {} must be equal but for axis {axis}",
                first.shape, t.shape
            )));
        }
        let dim = dims.get(axis).copied().unwrap_or(Dim::Fixed(0));
        let n = rules::size_of(call, dim, "joined")?;
        sum = sum
            .checked_add(n)
            .ok_or_else(|| call.error("its result is too large"))?;
    }
    let dims = first.shape.dims().iter().enumerate();
    let dims = dims.map(|(i, d)| if i == axis { Dim::Fixed(sum) } else { *d });
    rules::one(call, dtype, dims)
}

fn stack_spec(call: &Call<'_>) -> Specs {
    let dtype = rules::promoted(call, 0)?;
    let all = tensors(call)?;
    let first = all
        .first()
        .ok_or_else(|| call.error("there is no tensor"))?;
    let axis = rules::axis_of(call, call.int(0)?, first.shape.rank() + 1)?;
    if let Some(t) = all.iter().find(|t| t.shape != first.shape) {
        return Err(call.error(format_args!(
            "shapes {} and {} must be equal",
            first.shape, t.shape
        )));
    }
    if axis == 0 && first.shape.is_symbolic() {
        return Err(rules::row_error(call, "moved"));
    }
    let mut dims = first.shape.dims().to_vec();
    dims.insert(axis.min(dims.len()), Dim::Fixed(all.len()));
    rules::one(call, dtype, dims)
}

fn split_spec(call: &Call<'_>) -> Specs {
    let (x, sizes) = (rules::plain(call, 0)?, call.ints(0)?);
    let axis = rules::axis_of(call, call.int(1)?, x.shape.rank())?;
    let dim = x.shape.dims().get(axis).copied().unwrap_or(Dim::Fixed(0));
    let whole = rules::size_of(call, dim, "split")?;
    let sizes = sizes.iter().map(|&n| rules::size(call, n));
    let sizes = sizes.collect::<Result<Vec<_>, _>>()?;
    let sum = sizes.iter().try_fold(0usize, |n, m| n.checked_add(*m));
    if sizes.is_empty() || sum != Some(whole) {
        return Err(call.error(format_args!(
            "sizes must be given and add up to axis {axis} of {}",
            x.shape
        )));
    }
    let mut parts = Vec::with_capacity(sizes.len());
    for size in sizes {
        let dims = x.shape.dims().iter().enumerate();
        let dims = dims.map(|(i, d)| if i == axis { Dim::Fixed(size) } else { *d });
        parts.extend(rules::one(call, x.dtype, dims)?);
    }
    Ok(parts)
}

fn all_gather_spec(call: &Call<'_>) -> Specs {
    let (x, members) = (rules::plain(call, 0)?, rules::size(call, call.int(0)?)?);
    let mut dims = x.shape.dims().to_vec();
    let Some(last) = dims.last_mut() else {
        return Err(call.error("x must have an axis"));
    };
    let part = rules::size_of(call, *last, "gathered")?;
    let whole = part.checked_mul(members);
    *last = Dim::Fixed(whole.ok_or_else(|| call.error("its result is too large"))?);
    rules::one(call, x.dtype, dims)
}

fn all_gather_of_one(_: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    match (inputs, attributes) {
        (&[x], &[Attribute::Int(1)]) => Ok(vec![x]),
        _ => Err(GraphError::Op {
            op: all_gather.name,
            what: "this device is in no communicator".to_owned(),
        }),
    }
}

fn stack_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let &[Attribute::Int(axis)] = attributes else {
        return Err(GraphError::NoResult);
    };
    let dtype = rules::common(graph, inputs)?;
    let mut wide = inputs.to_vec();
    for x in &mut wide {
        let same = rules::cast_to(graph, *x, dtype)?;
        *x = graph.expand_dims(same, &[axis])?;
    }
    Ok(vec![graph.concat(&wide, axis)?])
}

fn split_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (&[x], [Attribute::Ints(sizes), Attribute::Int(axis)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let rank = rules::spec_of(graph, x)?.shape.rank();
    let axis = rules::normal_axis(*axis, rank).ok_or(GraphError::NoResult)?;
    let (mut starts, mut stops, steps) = (vec![0; rank], vec![i64::MAX; rank], vec![1; rank]);
    let mut parts = Vec::with_capacity(sizes.len());
    let mut at = 0i64;
    for size in sizes {
        let next = at.saturating_add(*size);
        if let (Some(start), Some(stop)) = (starts.get_mut(axis), stops.get_mut(axis)) {
            (*start, *stop) = (at, next);
        }
        parts.push(graph.slice(x, &starts, &stops, &steps)?);
        at = next;
    }
    Ok(parts)
}
