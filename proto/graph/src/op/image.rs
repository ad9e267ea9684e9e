//! Windows of images: columns of them and back, transposed and causal convolution. `…` are one to three
//! spatial axes; lists have one number for each of them, as in `conv`.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, optional_vector, pair, shaped},
        ops,
        place::{cut, places},
        rules::{Specs, Values, cast_to, one, plain, scalar, size, size_of, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

/// The greatest stride, padding or dilation.
pub(super) const MOST: i64 = 1 << 30;

ops! {
    /// The windows of `x` as columns (PyTorch's `unfold`, ggml's `im2col`): channel by channel each element of the window, for
    /// each place where the window lies. Padding is 0.
    im2col(x; window: Ints(1, MOST), strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST)) -> one { shapes: "[n, c, …] → [n, c · window, places]", dtypes: "plain: x", effect: Effect::None, infer: columns_spec, decompose: Some(columns_of_parts) }

    /// The sums of columns where their windows lie on an image of these `sizes` (PyTorch's `fold`, ONNX's `Col2Im`); what
    /// lies on the padding is left out. Sums of f16 and bf16 are f32 and rounded once.
    col2im(x; sizes: Ints(1, MOST), window: Ints(1, MOST), strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST)) -> one { shapes: "[n, c · window, places] → [n, c, sizes]", dtypes: "float: x", effect: Effect::None, infer: folded_spec, decompose: Some(folded_of_parts) }

    /// What `conv` with these attributes takes back (PyTorch's `conv_transpose`): each element of `x` `[n, c, …]` adds `w`
    /// `[c, o/groups, …]` times itself to the result, of which `low` and `high` elements at the ends are left out and which has
    /// `more` at its end; plus `bias` `[o]`. An output is
    /// `(size − 1) · stride + dilation · (window − 1) + 1 + more − low − high`.
    conv_transpose(x, w, bias = optional; strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), more: Ints(0, MOST), dilations: Ints(1, MOST), groups: Int(1, MOST)) -> one { shapes: "[n, c, …], [c, o/groups, …], [o] → [n, o, …]", dtypes: "float → promote(x, w, bias)", effect: Effect::None, infer: transposed_spec, decompose: Some(transposed_of_parts) }

    /// A causal convolution of each channel by itself (ggml's `ssm_conv`): `x` begins with the `k − 1` columns before the
    /// first token, and token `i` is `Σⱼ x[…, c, i + j] · w[c, j]`.
    ssm_conv(x, w;) -> one { shapes: "[n, c, k − 1 + t], [c, k] → [n, t, c]", dtypes: "float → promote(x, w)", effect: Effect::None, infer: ssm_conv_spec, decompose: Some(ssm_conv_of_parts) }
}

/// The first axis, the channels and the spatial axes of `[n, c, …]`.
pub(super) fn image(
    call: &Call<'_>,
    t: &TensorSpec,
) -> Result<(Dim, usize, Vec<usize>), GraphError> {
    let fits = || {
        call.error(format_args!(
            "{} must be [n, c, …] with one to three spatial axes",
            t.shape
        ))
    };
    let [first, channels, spatial @ ..] = t.shape.dims() else {
        return Err(fits());
    };
    if !(1..=3).contains(&spatial.len()) {
        return Err(fits());
    }
    let sizes = spatial.iter().map(|d| size_of(call, *d, "a spatial axis"));
    Ok((
        *first,
        size_of(call, *channels, "channels")?,
        sizes.collect::<Result<_, _>>()?,
    ))
}

/// Attribute `i`, one number for each spatial axis.
pub(super) fn list(call: &Call<'_>, i: usize, axes: usize) -> Result<Vec<usize>, GraphError> {
    let values = call.ints(i)?.iter().map(|&n| size(call, n));
    let values = values.collect::<Result<Vec<_>, _>>()?;
    match values.len() == axes {
        true => Ok(values),
        false => Err(call.error(format_args!(
            "needs one number for each of {axes} spatial axes in each list"
        ))),
    }
}

/// How a window moves along one axis.
#[derive(Clone, Copy)]
struct Along {
    /// Elements of the image.
    n: usize,
    window: usize,
    stride: usize,
    low: usize,
    high: usize,
    dilation: usize,
    /// Places where the window lies.
    places: usize,
}

/// The lists of attributes `at..`, axis by axis.
fn windows(call: &Call<'_>, spatial: &[usize], at: usize) -> Result<Vec<Along>, GraphError> {
    let lists: Vec<Vec<usize>> = (at..at + 5)
        .map(|i| list(call, i, spatial.len()))
        .collect::<Result<_, _>>()?;
    let along = |i: usize| -> Option<Along> {
        let get = |l: usize| lists.get(l)?.get(i).copied();
        let (n, window, stride) = (*spatial.get(i)?, get(0)?, get(1)?);
        let (low, high, dilation) = (get(2)?, get(3)?, get(4)?);
        let padded = n.checked_add(low)?.checked_add(high)?;
        let span = dilation
            .checked_mul(window.checked_sub(1)?)?
            .checked_add(1)?;
        let places = (padded.checked_sub(span)? / stride).checked_add(1)?;
        Some(Along {
            n,
            window,
            stride,
            low,
            high,
            dilation,
            places,
        })
    };
    let all: Option<Vec<Along>> = (0..spatial.len()).map(along).collect();
    all.ok_or_else(|| {
        call.error(format_args!(
            "the window does not lie within {spatial:?} and its padding"
        ))
    })
}

fn product(call: &Call<'_>, sizes: impl IntoIterator<Item = usize>) -> Result<usize, GraphError> {
    sizes
        .into_iter()
        .try_fold(1usize, usize::checked_mul)
        .ok_or_else(|| call.error("is too large"))
}

fn columns_spec(call: &Call<'_>) -> Specs {
    let x = plain(call, 0)?;
    let (first, channels, spatial) = image(call, x)?;
    let along = windows(call, &spatial, 0)?;
    let column = product(call, along.iter().map(|a| a.window).chain([channels]))?;
    let places = product(call, along.iter().map(|a| a.places))?;
    // The padded image is made on the way.
    let padded = along.iter().map(|a| a.n + a.low + a.high);
    let padded = product(call, padded.chain([channels]))?;
    one(call, x.dtype, [first, Dim::Fixed(padded)])?;
    one(
        call,
        x.dtype,
        [first, Dim::Fixed(column), Dim::Fixed(places)],
    )
}

/// Where element `k` of the window at place `p` stands on the padded axis, i64 `[window, places]`.
fn under(graph: &mut GraphBuilder, a: &Along) -> Result<Value, GraphError> {
    let tap = places(graph, (0, a.dilation as i64), a.window, 0, 2)?;
    let place = places(graph, (0, a.stride as i64), a.places, 1, 2)?;
    graph.add(tap, place)
}

fn columns_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&im2col, graph, inputs, attributes)?;
    let call = parts.call();
    let (first, channels, spatial) = image(&call, call.tensor(0)?)?;
    let along = windows(&call, &spatial, 0)?;
    let pads = |of: fn(&Along) -> usize| -> Vec<i64> {
        let sizes = along.iter().map(|a| of(a) as i64);
        [0, 0].into_iter().chain(sizes).collect()
    };
    let mut x = graph.pad(
        inputs[0],
        None,
        &pads(|a| a.low),
        &pads(|a| a.high),
        "constant",
    )?;
    for (i, a) in along.iter().enumerate() {
        let at = under(graph, a)?;
        x = graph.take(x, at, 2 + 2 * i as i64)?;
    }
    // [n, c, k0, p0, k1, p1, …] → [n, c, k…, p…]
    let axes = along.len() as i64;
    let order: Vec<i64> = [0, 1]
        .into_iter()
        .chain((0..axes).map(|i| 2 + 2 * i))
        .chain((0..axes).map(|i| 3 + 2 * i))
        .collect();
    let x = graph.transpose(x, &order)?;
    let column = product(&call, along.iter().map(|a| a.window).chain([channels]))?;
    let count = product(&call, along.iter().map(|a| a.places))?;
    Ok(vec![shaped(
        graph,
        x,
        [first, Dim::Fixed(column), Dim::Fixed(count)],
    )?])
}

/// The first axis, channels and windows of columns.
fn folded(call: &Call<'_>) -> Result<(Dim, usize, Vec<Along>), GraphError> {
    let x = float(call, 0)?;
    let sizes = call.ints(0)?.iter().map(|&n| size(call, n));
    let sizes = sizes.collect::<Result<Vec<_>, _>>()?;
    if !(1..=3).contains(&sizes.len()) {
        return Err(call.error("sizes must be those of one to three spatial axes"));
    }
    let along = windows(call, &sizes, 1)?;
    let window = product(call, along.iter().map(|a| a.window))?;
    let places = product(call, along.iter().map(|a| a.places))?;
    match *x.shape.dims() {
        [first, Dim::Fixed(column), Dim::Fixed(count)]
            if column.is_multiple_of(window) && count == places =>
        {
            Ok((first, column / window, along))
        }
        _ => Err(call.error(format_args!(
            "x {} must be [n, c · {window}, {places}]",
            x.shape
        ))),
    }
}

fn folded_spec(call: &Call<'_>) -> Specs {
    let (first, channels, along) = folded(call)?;
    let padded = along.iter().map(|a| a.n + a.low + a.high);
    let padded = product(call, padded.chain([channels]))?;
    one(call, DType::F64, [first, Dim::Fixed(padded)])?;
    let sizes = along.iter().map(|a| Dim::Fixed(a.n));
    let dims = [first, Dim::Fixed(channels)].into_iter().chain(sizes);
    one(call, call.tensor(0)?.dtype, dims)
}

fn folded_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&col2im, graph, inputs, attributes)?;
    let call = parts.call();
    let (first, channels, along) = folded(&call)?;
    let dtype = call.tensor(0)?.dtype;
    let window = product(&call, along.iter().map(|a| a.window))?;
    let count = product(&call, along.iter().map(|a| a.places))?;
    let axes = along.len();
    let padded: Vec<usize> = along.iter().map(|a| a.n + a.low + a.high).collect();
    let area = product(&call, padded.iter().copied())?;
    // Flat places on the padded image, [k…, p…].
    let mut at = scalar(graph, 0.0, DType::I64)?;
    let mut stride = 1i64;
    for (i, a) in along.iter().enumerate().rev() {
        let on = under(graph, a)?;
        let dims = (0..2 * axes).map(|j| match j {
            j if j == i => Dim::Fixed(a.window),
            j if j == axes + i => Dim::Fixed(a.places),
            _ => Dim::Fixed(1),
        });
        let on = shaped(graph, on, dims)?;
        let by = scalar(graph, stride as f64, DType::I64)?;
        let on = graph.mul(on, by)?;
        at = graph.add(at, on)?;
        stride = stride.saturating_mul(padded[i] as i64);
    }
    let flat = [first, Dim::Fixed(channels), Dim::Fixed(window * count)];
    let at = shaped(graph, at, [Dim::Fixed(window * count)])?;
    let at = graph.broadcast_to(at, Shape::new(flat)?)?;
    let work = dtype.working();
    let updates = cast_to(graph, inputs[0], work)?;
    let updates = shaped(graph, updates, flat)?;
    let nothing = scalar(graph, 0.0, work)?;
    let empty = Shape::new([first, Dim::Fixed(channels), Dim::Fixed(area)])?;
    let empty = graph.broadcast_to(nothing, empty)?;
    let sums = graph.scatter_along_axis(empty, at, updates, 2, "add")?;
    let whole = [first, Dim::Fixed(channels)].into_iter();
    let mut y = shaped(
        graph,
        sums,
        whole.chain(padded.iter().map(|&n| Dim::Fixed(n))),
    )?;
    for (i, a) in along.iter().enumerate() {
        y = cut(graph, y, 2 + i, (a.low, a.low + a.n))?;
    }
    Ok(vec![cast_to(graph, y, dtype)?])
}

/// Of one spatial axis of a transposed convolution: its size, the window, and elements of the result before those at the ends are
/// left out and after.
struct Back {
    n: usize,
    stride: usize,
    span: usize,
    low: usize,
    more: usize,
    out: usize,
}

struct Transposed {
    first: Dim,
    channels: usize,
    groups: usize,
    /// Of a group.
    outs: usize,
    axes: Vec<Back>,
    window: Vec<usize>,
    dtype: DType,
}

fn transposed(call: &Call<'_>) -> Result<Transposed, GraphError> {
    let (x, w) = (float(call, 0)?, float(call, 1)?);
    let (first, channels, spatial) = image(call, x)?;
    let (kernel, outs, window) = image(call, w)?;
    let groups = size(call, call.int(5)?)?;
    if kernel != Dim::Fixed(channels)
        || groups == 0
        || !channels.is_multiple_of(groups)
        || window.len() != spatial.len()
    {
        return Err(call.error(format_args!(
            "w {} does not go with x {} in {groups} groups",
            w.shape, x.shape
        )));
    }
    let axes = spatial.len();
    let lists: Vec<Vec<usize>> = (0..5)
        .map(|i| list(call, i, axes))
        .collect::<Result<_, _>>()?;
    let back = |i: usize| -> Option<Back> {
        let get = |l: usize| lists.get(l)?.get(i).copied();
        let (stride, low, high) = (get(0)?, get(1)?, get(2)?);
        let (more, dilation) = (get(3)?, get(4)?);
        let (n, window) = (*spatial.get(i)?, *window.get(i)?);
        let span = dilation.checked_mul(window.checked_sub(1)?)?;
        let reach = n.checked_sub(1)?.checked_mul(stride)?.checked_add(1)?;
        let full = reach.checked_add(span)?.checked_add(more)?;
        let out = full.checked_sub(low.checked_add(high)?)?;
        (out > 0 && full <= 1 << 40).then_some(Back {
            n,
            stride,
            span,
            low,
            more,
            out,
        })
    };
    let backs: Option<Vec<Back>> = (0..axes).map(back).collect();
    let backs = backs.ok_or_else(|| {
        call.error(format_args!(
            "there is nothing left of {spatial:?}, or too much"
        ))
    })?;
    let all = product(call, [outs, groups])?;
    optional_vector(call, 2, all)?;
    let mut dtype = pair(call, x.dtype, w.dtype)?;
    if let Some(bias) = call.optional(2)? {
        dtype = pair(call, dtype, bias.dtype)?;
    }
    Ok(Transposed {
        first,
        channels,
        groups,
        outs,
        axes: backs,
        window,
        dtype,
    })
}

fn transposed_spec(call: &Call<'_>) -> Specs {
    let t = transposed(call)?;
    let dims = |sizes: Vec<usize>, channels: usize| {
        let sizes = sizes.into_iter().map(Dim::Fixed);
        [t.first, Dim::Fixed(channels)].into_iter().chain(sizes)
    };
    // What is convolved on the way, and its bounds: as many products as `conv` takes.
    let full: Vec<usize> = (t.axes.iter())
        .map(|a| (a.n - 1) * a.stride + 1 + a.span + a.more)
        .collect();
    let spread: Vec<usize> = t
        .axes
        .iter()
        .map(|a| a.n.saturating_mul(a.stride))
        .collect();
    one(call, DType::F64, dims(full.clone(), t.outs * t.groups))?;
    one(call, DType::F64, dims(spread, t.channels))?;
    let steps = full.iter().chain(&t.window).copied();
    let others = [t.first.at(1), t.outs, t.channels];
    let steps = steps.chain(others).fold(1, usize::saturating_mul);
    if steps > 1 << 48 {
        return Err(call.error("takes too many steps; make the window or its dilation smaller"));
    }
    let sizes = t.axes.iter().map(|a| a.out).collect();
    one(call, t.dtype, dims(sizes, t.outs * t.groups))
}

fn transposed_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&conv_transpose, graph, inputs, attributes)?;
    let call = parts.call();
    let t = transposed(&call)?;
    let dilations = call.ints(4)?.to_vec();
    let &[x, w, bias] = inputs else {
        return Err(GraphError::NoResult);
    };
    let axes = t.axes.len();
    let work = t.dtype.working();
    let mut x = cast_to(graph, x, work)?;
    for (i, a) in t.axes.iter().enumerate() {
        if a.stride == 1 {
            continue;
        }
        // stride − 1 zeros behind each element, but for the last.
        let dims = spec_of(graph, x)?.shape.dims().to_vec();
        let (before, after) = (&dims[..3 + i], &dims[3 + i..]);
        let apart = [before, &[Dim::Fixed(1)], after].concat();
        x = shaped(graph, x, apart)?;
        let (low, mut high) = (vec![0; dims.len() + 1], vec![0; dims.len() + 1]);
        high[3 + i] = a.stride as i64 - 1;
        x = graph.pad(x, None, &low, &high, "constant")?;
        let mut joined = dims.clone();
        joined[2 + i] = Dim::Fixed(a.n * a.stride);
        x = shaped(graph, x, joined)?;
        x = cut(graph, x, 2 + i, (0, (a.n - 1) * a.stride + 1))?;
    }
    // [c, o/g, …] → [o, c/g, …], backwards along the window.
    let each = t.channels / t.groups;
    let window = t.window.iter().map(|&n| Dim::Fixed(n));
    let w = cast_to(graph, w, work)?;
    let grouped = [t.groups, each, t.outs].map(Dim::Fixed);
    let w = shaped(graph, w, grouped.into_iter().chain(window.clone()))?;
    let order: Vec<i64> = [0, 2, 1].into_iter().chain(3..3 + axes as i64).collect();
    let w = graph.transpose(w, &order)?;
    let turned = [t.groups * t.outs, each].map(Dim::Fixed);
    let w = shaped(graph, w, turned.into_iter().chain(window))?;
    let spatial: Vec<i64> = (2..2 + axes as i64).collect();
    let w = graph.flip(w, &spatial)?;
    let ones = vec![1; axes];
    let low: Vec<i64> = t.axes.iter().map(|a| a.span as i64).collect();
    let high: Vec<i64> = t.axes.iter().map(|a| (a.span + a.more) as i64).collect();
    let groups = t.groups as i64;
    let mut y = graph.conv(
        x,
        w,
        None,
        &ones,
        &low,
        &high,
        &dilations,
        groups,
        "channels_first",
    )?;
    for (i, a) in t.axes.iter().enumerate() {
        y = cut(graph, y, 2 + i, (a.low, a.low + a.out))?;
    }
    if bias != Value::Absent {
        let bias = cast_to(graph, bias, work)?;
        let dims = [Dim::Fixed(t.outs * t.groups)];
        let ones = std::iter::repeat_n(Dim::Fixed(1), axes);
        let bias = shaped(graph, bias, dims.into_iter().chain(ones))?;
        y = graph.add(y, bias)?;
    }
    Ok(vec![cast_to(graph, y, t.dtype)?])
}

fn ssm_conv_spec(call: &Call<'_>) -> Specs {
    let (x, w) = (float(call, 0)?, float(call, 1)?);
    match (x.shape.dims(), w.shape.dims()) {
        (&[n, Dim::Fixed(c), Dim::Fixed(all)], &[Dim::Fixed(c2), Dim::Fixed(k)])
            if c == c2 && k > 0 && c > 0 && all >= k =>
        {
            let t = Dim::Fixed(all + 1 - k);
            one(call, pair(call, x.dtype, w.dtype)?, [n, t, Dim::Fixed(c)])
        }
        _ => Err(call.error(format_args!(
            "x {} and w {} must be [n, c, k − 1 + t] and [c, k]",
            x.shape, w.shape
        ))),
    }
}

fn ssm_conv_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let &[x, w] = inputs else {
        return Err(GraphError::NoResult);
    };
    let &[Dim::Fixed(c), k] = spec_of(graph, w)?.shape.dims() else {
        return Err(GraphError::NoResult);
    };
    let w = shaped(graph, w, [Dim::Fixed(c), Dim::Fixed(1), k])?;
    let y = graph.conv(
        x,
        w,
        None,
        &[1],
        &[0],
        &[0],
        &[1],
        c as i64,
        "channels_first",
    )?;
    Ok(vec![graph.transpose(y, &[0, 2, 1])?])
}
