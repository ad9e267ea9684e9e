//! Images at other sizes: each axis by itself, by sums of elements around a place.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, shaped},
        image::{MOST, image, list},
        ops,
        place::places,
        rules::{Specs, Values, cast_to, plain, rounded_once, scalar, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// `x` at these spatial `sizes` (PyTorch's `interpolate`): element `i` of a result axis is read at
    /// `(i + ½) · old/new − ½`, with `align_corners` at `i · (old − 1)/(new − 1)`: from the `nearest` element
    /// (`⌊i · old/new⌋`, whatever `align_corners`), from the two around it, or from four by Keys' cubic with −¾; beyond the edge
    /// is the edge.
    interpolate(x; sizes: Ints(1, MOST), mode: Name(&["nearest", "linear", "cubic"]), align_corners: Bool) -> one { shapes: "[n, c, …] → [n, c, sizes]", dtypes: "float: x; nearest: plain", effect: Effect::None, infer: interpolate_spec, decompose: Some(interpolate_of_parts) }
}

/// The spatial axes of a resampling, old and new, and its result.
fn resampled(call: &Call<'_>) -> Result<(Vec<(usize, usize)>, TensorSpec), GraphError> {
    let x = match call.name(1)? {
        "nearest" => plain(call, 0)?,
        _ => float(call, 0)?,
    };
    let (first, channels, spatial) = image(call, x)?;
    let sizes = list(call, 0, spatial.len())?;
    if spatial.contains(&0) {
        return Err(call.error(format_args!("there is nothing to read of {}", x.shape)));
    }
    let dims = sizes.iter().map(|&n| Dim::Fixed(n));
    let dims = [first, Dim::Fixed(channels)].into_iter().chain(dims);
    let shape = Shape::new(dims).map_err(|e| call.error(e))?;
    // Between the axes that shrink and those that grow, something larger may be made.
    let most = spatial.iter().zip(&sizes).map(|(a, b)| *a.max(b));
    let most = [first, Dim::Fixed(channels)]
        .into_iter()
        .chain(most.map(Dim::Fixed));
    Shape::new(most).map_err(|e| call.error(e))?;
    Ok((
        spatial.into_iter().zip(sizes).collect(),
        TensorSpec::new(x.dtype, shape)?,
    ))
}

fn interpolate_spec(call: &Call<'_>) -> Specs {
    Ok(vec![resampled(call)?.1])
}

fn interpolate_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&interpolate, graph, inputs, attributes)?;
    let call = parts.call();
    let (axes, result) = resampled(&call)?;
    let (mode, corners) = (call.name(1)?.to_owned(), call.bool(2)?);
    if mode == "nearest" {
        let mut x = inputs[0];
        for (i, &(old, new)) in axes.iter().enumerate() {
            let at = places(graph, (0, old as i64), new, 0, 1)?;
            let by = scalar(graph, new as f64, DType::I64)?;
            let at = graph.floor_divide(at, by)?;
            x = graph.take(x, at, 2 + i as i64)?;
        }
        return Ok(vec![x]);
    }
    rounded_once(graph, inputs, |g, inputs| {
        let mut x = inputs[0];
        for (i, &(old, new)) in axes.iter().enumerate() {
            x = along(g, x, 2 + i, (old, new), mode == "cubic", corners)?;
        }
        // As it was, where no axis was resampled.
        if x == inputs[0] {
            return g.reshape(x, result.shape.clone());
        }
        Ok(x)
    })
}

/// One axis resampled by sums of elements around a place.
fn along(
    g: &mut GraphBuilder,
    x: Value,
    axis: usize,
    (old, new): (usize, usize),
    cubic: bool,
    corners: bool,
) -> Result<Value, GraphError> {
    if old == new {
        return Ok(x);
    }
    let (dtype, rank) = (spec_of(g, x)?.dtype, spec_of(g, x)?.shape.rank());
    let (start, step) = match (corners, new) {
        (true, 1) => (0.0, 0.0),
        (true, _) => (0.0, (old as f64 - 1.0) / (new as f64 - 1.0)),
        (false, _) => {
            let scale = old as f64 / new as f64;
            (scale / 2.0 - 0.5, scale)
        }
    };
    let at = g.arange(start, step, new as i64, DType::F64)?;
    let at = match cubic {
        true => at,
        // PyTorch's: a place before the first element is the first.
        false => {
            let zero = scalar(g, 0.0, DType::F64)?;
            g.maximum(at, zero)?
        }
    };
    let base = g.floor(at)?;
    let t = g.sub(at, base)?;
    let taps: &[i64] = if cubic { &[-1, 0, 1, 2] } else { &[0, 1] };
    let (zero, last) = (
        scalar(g, 0.0, DType::F64)?,
        scalar(g, old as f64 - 1.0, DType::F64)?,
    );
    let mut sum: Option<Value> = None;
    for &tap in taps {
        let far = scalar(g, tap as f64, DType::F64)?;
        let from = g.add(base, far)?;
        let from = g.maximum(from, zero)?;
        let from = g.minimum(from, last)?;
        let from = g.cast(from, DType::I64)?;
        let apart = g.sub(t, far)?;
        let apart = g.abs(apart)?;
        let weight = match cubic {
            true => keys(g, apart, tap == -1 || tap == 2)?,
            false => {
                let one = scalar(g, 1.0, DType::F64)?;
                g.sub(one, apart)?
            }
        };
        let weight = cast_to(g, weight, dtype)?;
        let dims = (0..rank).map(|i| Dim::Fixed(if i == axis { new } else { 1 }));
        let weight = shaped(g, weight, dims)?;
        let taken = g.take(x, from, axis as i64)?;
        let part = g.mul(taken, weight)?;
        sum = Some(match sum {
            Some(sum) => g.add(sum, part)?,
            None => part,
        });
    }
    sum.ok_or(GraphError::NoResult)
}

/// Keys' cubic convolution kernel with −¾, of distances up to 1, or from 1 to 2 (`far`).
fn keys(g: &mut GraphBuilder, d: Value, far: bool) -> Result<Value, GraphError> {
    let factors = match far {
        true => [-0.75, 3.75, -6.0, 3.0],
        false => [1.25, -2.25, 0.0, 1.0],
    };
    let mut sum = scalar(g, factors[0], DType::F64)?;
    for factor in &factors[1..] {
        sum = g.mul(sum, d)?;
        let factor = scalar(g, *factor, DType::F64)?;
        sum = g.add(sum, factor)?;
    }
    Ok(sum)
}
