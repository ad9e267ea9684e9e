//! Convolution and pooling over one to three spatial axes.

use crate::{
    dtype::Kind,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, optional_vector, pair, shaped},
        ops,
        rules::{Specs, Values, apply_as, cast_to, common, dtype_error, one, plain, size, spec_of},
    },
    shape::Dim,
};

/// Where the channels of an image stand.
const LAYOUT: &[&str] = &["channels_first", "channels_last"];

/// The greatest stride, padding or dilation.
const MOST: i64 = 1 << 30;

/// Multiplications of a convolution at most, per row of a symbolic `x`: weights and results are memory, but windows
/// on padding are not, and may be far more than all of it.
const MOST_PRODUCTS: usize = 1 << 48;

/// Elements that the windows of a pooling see at most, for the same reason.
const MOST_SEEN: usize = 1 << 36;

ops! {
    /// Cross-correlation of `x` `[n, c, …]` with `w` `[o, c/groups, …]`, plus `bias` `[o]`, over the one to three
    /// spatial axes `…`; with `channels_last`, `x` is `[n, …, c]` and `w` `[o, …, c/groups]`. Each list has one number
    /// per spatial axis: `low` and `high` zeros before and after `x`, and an output is
    /// `(size + low + high − dilation·(window − 1) − 1) / stride + 1`. Sums of f16 and bf16 are f32 and rounded once.
    conv(x, w, bias = optional; strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST), groups: Int(1, MOST), layout: Name(LAYOUT)) -> one
    { shapes: "[n, c, …], [o, c/groups, …], [o] → [n, o, …]", dtypes: "float → promote(x, w, bias)", effect: Effect::None, infer: conv_spec, decompose: Some(conv_of_parts) }

    /// The greatest element, or the mean, of each window of `x` `[n, c, …]` (`channels_last`: `[n, …, c]`), with the
    /// lists of `conv`. Padding is lower than every element (−∞, of integers the least); `average` counts it as zeros,
    /// `average_valid` leaves it out. Means of f16 and bf16 are f32 and rounded once.
    pool(x; kind: Name(&["max", "average", "average_valid"]), window: Ints(1, MOST), strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST), layout: Name(LAYOUT)) -> one
    { shapes: "[n, c, …] → [n, c, …]", dtypes: "float; max also integers → x", effect: Effect::None, infer: pool_spec, decompose: Some(pool_of_parts) }
}

/// An image: its first axis, its channels and its spatial axes.
struct Image {
    first: Dim,
    channels: usize,
    spatial: Vec<usize>,
}

/// Reads the axes of input `i`; the row dimension can only be the first.
fn image(call: &Call<'_>, i: usize, first_layout: bool) -> Result<Image, GraphError> {
    let t = plain(call, i)?;
    let fixed = |dims: &[Dim]| -> Option<Vec<usize>> {
        let size = |d: &Dim| match d {
            Dim::Fixed(n) => Some(*n),
            Dim::Rows => None,
        };
        dims.iter().map(size).collect()
    };
    let parts = match (t.shape.dims(), first_layout) {
        ([first, Dim::Fixed(c), spatial @ ..], true)
        | ([first, spatial @ .., Dim::Fixed(c)], false)
            if (1..=3).contains(&spatial.len()) =>
        {
            fixed(spatial).map(|spatial| Image {
                first: *first,
                channels: *c,
                spatial,
            })
        }
        _ => None,
    };
    parts.ok_or_else(|| {
        call.error(format_args!(
            "{} must have one to three spatial axes besides two others, not {}",
            call.input_name(i),
            t.shape
        ))
    })
}

/// Sizes of the results along the spatial axes; `at` is where the four lists start.
fn outputs(
    call: &Call<'_>,
    spatial: &[usize],
    window: &[usize],
    at: usize,
) -> Result<Vec<Dim>, GraphError> {
    let lists = [
        call.ints(at)?,
        call.ints(at + 1)?,
        call.ints(at + 2)?,
        call.ints(at + 3)?,
    ];
    if window.len() != spatial.len() || lists.iter().any(|l| l.len() != spatial.len()) {
        return Err(call.error(format_args!(
            "needs one number per spatial axis in each list, {} in all",
            spatial.len()
        )));
    }
    let [strides, low, high, dilations] = lists;
    let size = |i: usize| -> Option<usize> {
        let get = |l: &[i64]| usize::try_from(*l.get(i)?).ok();
        let padded = spatial
            .get(i)?
            .checked_add(get(low)?)?
            .checked_add(get(high)?)?;
        let span = get(dilations)?
            .checked_mul(window.get(i)?.checked_sub(1)?)?
            .checked_add(1)?;
        (padded.checked_sub(span)? / get(strides)?).checked_add(1)
    };
    let dims = (0..spatial.len()).map(|i| size(i).map(Dim::Fixed));
    dims.collect::<Option<_>>().ok_or_else(|| {
        call.error(format_args!(
            "the window {window:?} does not lie within {spatial:?} and its padding"
        ))
    })
}

/// The axes of a result.
fn arranged(first: Dim, channels: usize, spatial: Vec<Dim>, channels_first: bool) -> Vec<Dim> {
    let channels = [Dim::Fixed(channels)];
    match channels_first {
        true => [&[first], &channels[..], &spatial[..]].concat(),
        false => [&[first], &spatial[..], &channels[..]].concat(),
    }
}

/// Refuses more than `most` steps, which is what `sizes` multiply to.
fn at_most(
    call: &Call<'_>,
    most: usize,
    sizes: impl IntoIterator<Item = usize>,
) -> Result<(), GraphError> {
    let steps = sizes.into_iter().fold(1, usize::saturating_mul);
    match steps <= most {
        true => Ok(()),
        false => Err(call.error(format_args!(
            "takes more than {most} steps; make the window or its padding smaller"
        ))),
    }
}

fn conv_spec(call: &Call<'_>) -> Specs {
    let (x, w) = (float(call, 0)?, float(call, 1)?);
    let channels_first = call.name(5)? == "channels_first";
    let (image, kernel) = (
        image(call, 0, channels_first)?,
        image(call, 1, channels_first)?,
    );
    let groups = size(call, call.int(4)?)?;
    let Dim::Fixed(outs) = kernel.first else {
        return Err(call.error("w cannot have the row dimension"));
    };
    let shared = groups > 0
        && kernel.channels.checked_mul(groups) == Some(image.channels)
        && outs.is_multiple_of(groups);
    if !shared {
        return Err(call.error(format_args!(
            "x {} and w {} do not have channels for {groups} groups",
            x.shape, w.shape
        )));
    }
    optional_vector(call, 2, outs)?;
    let mut dtype = pair(call, x.dtype, w.dtype)?;
    if let Some(bias) = call.optional(2)? {
        dtype = pair(call, dtype, bias.dtype)?;
    }
    let spatial = outputs(call, &image.spatial, &kernel.spatial, 0)?;
    let places = spatial.iter().map(|d| d.at(1));
    let taps = kernel.spatial.iter().copied();
    let others = [image.first.at(1), outs, kernel.channels];
    let steps = others.into_iter().chain(places).chain(taps);
    let steps = steps.collect::<Vec<_>>();
    let dims = arranged(image.first, outs, spatial, channels_first);
    let result = one(call, dtype, dims)?;
    at_most(call, MOST_PRODUCTS, steps)?;
    Ok(result)
}

fn pool_spec(call: &Call<'_>) -> Specs {
    let x = plain(call, 0)?;
    let fits = match x.dtype.kind() {
        Kind::Float => true,
        Kind::Unsigned | Kind::Signed => call.name(0)? == "max",
        _ => false,
    };
    if !fits {
        return Err(call.error(format_args!(
            "x cannot be {} for {}; cast it first",
            x.dtype,
            call.name(0)?
        )));
    }
    let channels_first = call.name(6)? == "channels_first";
    let image = image(call, 0, channels_first)?;
    let window = call.ints(1)?.iter().map(|&n| size(call, n));
    let window = window.collect::<Result<Vec<_>, _>>()?;
    let spatial = outputs(call, &image.spatial, &window, 2)?;
    let dilations = call.ints(5)?.iter().map(|&n| size(call, n));
    let dilations = dilations.collect::<Result<Vec<_>, _>>()?;
    // Of a window, no more can lie on the axis than the axis has.
    let taps = image.spatial.iter().zip(&dilations).zip(&window);
    let taps = taps.map(|((n, dilation), window)| n.div_ceil((*dilation).max(1)).min(*window));
    let places = spatial.iter().map(|d| d.at(1));
    let others = [image.first.at(1), image.channels];
    let steps = others.into_iter().chain(places).chain(taps);
    let steps = steps.collect::<Vec<_>>();
    let dims = arranged(image.first, image.channels, spatial, channels_first);
    let result = one(call, x.dtype, dims)?;
    at_most(call, MOST_SEEN, steps)?;
    Ok(result)
}

/// `x` with its channels moved from the end to the second place, or back.
fn turned(graph: &mut GraphBuilder, x: Value, channels_first: bool) -> Result<Value, GraphError> {
    let rank = spec_of(graph, x)?.shape.rank() as i64;
    let axes: Vec<i64> = match channels_first {
        true => [0, rank - 1].into_iter().chain(1..rank - 1).collect(),
        false => std::iter::once(0).chain(2..rank).chain([1]).collect(),
    };
    graph.transpose(x, &axes)
}

/// The same attributes for the layout that backends have.
fn channels_first(attributes: &[Attribute]) -> Vec<Attribute> {
    let mut attributes = attributes.to_vec();
    if let Some(layout) = attributes.last_mut() {
        *layout = Attribute::Name("channels_first".to_owned());
    }
    attributes
}

/// Without bias, channels first, of one dtype.
fn conv_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&conv, graph, inputs, attributes)?;
    let call = parts.call();
    let &[x, w, bias] = inputs else {
        return Err(GraphError::NoResult);
    };
    let dtype = common(graph, inputs)?;
    let equal = call.tensor(0)?.dtype == dtype && call.tensor(1)?.dtype == dtype;
    let last = call.name(5)? == "channels_last";
    if bias != Value::Absent {
        // The sum and its bias are rounded once.
        let work = dtype.working();
        let plain = [x, w, Value::Absent];
        let y = apply_as(graph, &conv, &plain, attributes, 0, work)?;
        let &[y] = y.as_slice() else {
            return Err(GraphError::NoResult);
        };
        let mut bias = cast_to(graph, bias, work)?;
        if !last {
            let n = spec_of(graph, bias)?.shape.dims().to_vec();
            let ones = std::iter::repeat_n(Dim::Fixed(1), spec_of(graph, y)?.shape.rank() - 2);
            bias = shaped(graph, bias, n.into_iter().chain(ones))?;
        }
        let y = graph.add(y, bias)?;
        return Ok(vec![cast_to(graph, y, dtype)?]);
    }
    if !equal {
        return apply_as(graph, &conv, inputs, attributes, 0, dtype);
    }
    if !last {
        return Err(dtype_error(&call, dtype));
    }
    let (x, w) = (turned(graph, x, true)?, turned(graph, w, true)?);
    let y = graph.apply(&conv, vec![x, w, Value::Absent], channels_first(attributes))?;
    let &[y] = y.as_slice() else {
        return Err(GraphError::NoResult);
    };
    Ok(vec![turned(graph, y, false)?])
}

/// Channels first.
fn pool_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&pool, graph, inputs, attributes)?;
    let call = parts.call();
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    if call.name(6)? != "channels_last" {
        return Err(dtype_error(&call, call.tensor(0)?.dtype));
    }
    let x = turned(graph, x, true)?;
    let y = graph.apply(&pool, vec![x], channels_first(attributes))?;
    let &[y] = y.as_slice() else {
        return Err(GraphError::NoResult);
    };
    Ok(vec![turned(graph, y, false)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, ints, name, table};

    const FIRST: &str = "channels_first";
    const LAST: &str = "channels_last";

    fn conv_of(lists: [&[i64]; 4], groups: i64, layout: &str) -> Vec<Attribute> {
        let lists = lists.iter().map(|l| ints(l));
        lists.chain([int(groups), name(layout)]).collect()
    }

    fn pool_of(kind: &str, lists: [&[i64]; 5], layout: &str) -> Vec<Attribute> {
        let lists = lists.iter().map(|l| ints(l));
        std::iter::once(name(kind))
            .chain(lists)
            .chain([name(layout)])
            .collect()
    }

    const PLAIN: [&[i64]; 4] = [&[1], &[0], &[0], &[1]];
    const PLANE: [&[i64]; 4] = [&[2, 1], &[1, 0], &[1, 2], &[1, 3]];

    #[test]
    fn sizes_are_those_of_the_formula() {
        let plain = conv_of(PLAIN, 1, FIRST);
        let plane = |groups, layout| conv_of(PLANE, groups, layout);
        // (9 + 1 + 1 − 2 − 1) / 2 + 1 = 5, (8 + 0 + 2 − 3·1 − 1) / 1 + 1 = 7
        table(
            &conv,
            &[
                (
                    &["f32[2, 3, 10]", "f32[5, 3, 4]", "-"],
                    &plain,
                    "f32[2, 5, 7]",
                ),
                (
                    &["f32[rows, 3, 10]", "f16[5, 3, 4]", "f64[5]"],
                    &plain,
                    "f64[rows, 5, 7]",
                ),
                (
                    &["f16[2, 4, 9, 8]", "f16[6, 2, 3, 2]", "-"],
                    &plane(2, FIRST),
                    "f16[2, 6, 5, 7]",
                ),
                (
                    &["f16[2, 9, 8, 4]", "f16[6, 3, 2, 2]", "-"],
                    &plane(2, LAST),
                    "f16[2, 5, 7, 6]",
                ),
                (
                    &["f16[2, 9, 8, 4]", "f16[6, 3, 2, 3]", "-"],
                    &plane(2, LAST),
                    "!groups",
                ),
                (
                    &["f16[2, 9, 8, 4]", "f16[5, 3, 2, 2]", "-"],
                    &plane(2, LAST),
                    "!groups",
                ),
                (
                    &["f16[rows, 9, 8, 4]", "f16[rows, 3, 2, 2]", "-"],
                    &plane(2, LAST),
                    "!row dimension",
                ),
                (
                    &["f32[2, 3, 3]", "f32[5, 3, 4]", "-"],
                    &plain,
                    "!does not lie within",
                ),
                (
                    &["f32[2, 3, 3]", "f32[5, 3, 0]", "-"],
                    &plain,
                    "!does not lie within",
                ),
                (
                    &["f32[2, 3, 10]", "f32[5, 3, 4]", "f32[3]"],
                    &plain,
                    "!bias must be [5]",
                ),
                (&["f32[2, 3, 10]", "i32[5, 3, 4]", "-"], &plain, "!float"),
                (&["f32[2, 3]", "f32[5, 3]", "-"], &plain, "!spatial"),
                (
                    &["f32[2, 3, 1, 1, 1, 1]", "f32[5, 3, 1, 1, 1, 1]", "-"],
                    &plain,
                    "!spatial",
                ),
                (
                    &["f32[2, 3, 9, 9]", "f32[5, 3, 4, 4]", "-"],
                    &plain,
                    "!per spatial axis",
                ),
                (
                    &["f32[2, 3, 9]", "f32[5, 3, 4]", "-"],
                    &conv_of([&[], &[], &[], &[]], 1, FIRST),
                    "!per spatial axis",
                ),
                (
                    &["f32[2, 3, 9]", "f32[5, 3, 4]", "-"],
                    &conv_of([&[0], &[0], &[0], &[1]], 1, FIRST),
                    "!strides",
                ),
                (
                    &["f32[2, 3, 9]", "f32[5, 3, 4]", "-"],
                    &conv_of([&[1], &[-1], &[0], &[1]], 1, FIRST),
                    "!low",
                ),
                (
                    &["f32[1, 1, 1099511627776]", "f32[1, 1, 1]", "-"],
                    &conv_of([&[1], &[MOST], &[MOST], &[MOST]], 1, FIRST),
                    "!elements",
                ),
                (
                    &["f32[1, 1, 9]", "f32[1, 1, 1099511627776]", "-"],
                    &conv_of([&[MOST], &[0], &[0], &[MOST]], 1, FIRST),
                    "!does not lie within",
                ),
                // 2^20 places that see 2^28 taps each, from one element: as many as may be, and twice as many.
                (
                    &["f32[1, 1, 1]", "f32[1, 1, 268435456]", "-"],
                    &conv_of([&[1], &[268435456], &[1048574], &[1]], 1, FIRST),
                    "f32[1, 1, 1048576]",
                ),
                (
                    &["f32[2, 1, 1]", "f32[1, 1, 268435456]", "-"],
                    &conv_of([&[1], &[268435456], &[1048574], &[1]], 1, FIRST),
                    "!takes more than",
                ),
            ],
        );
    }

    #[test]
    fn windows_are_pooled() {
        let of = |kind, layout| {
            pool_of(
                kind,
                [&[3, 2], PLANE[0], PLANE[1], PLANE[2], PLANE[3]],
                layout,
            )
        };
        table(
            &pool,
            &[
                (
                    &["f16[rows, 4, 9, 8]"],
                    &of("average", FIRST),
                    "f16[rows, 4, 5, 7]",
                ),
                (
                    &["f64[2, 9, 8, 4]"],
                    &of("average_valid", LAST),
                    "f64[2, 5, 7, 4]",
                ),
                (&["i8[2, 9, 8, 4]"], &of("max", LAST), "i8[2, 5, 7, 4]"),
                (&["i8[2, 9, 8, 4]"], &of("average", LAST), "!i8"),
                (&["bool[2, 9, 8, 4]"], &of("max", LAST), "!bool"),
                (&["c64[2, 9, 8, 4]"], &of("max", LAST), "!c64"),
                (&["f32[2, 9, 8]"], &of("max", LAST), "!per spatial axis"),
                (&["f32[2, 9, 8, 4]"], &of("min", LAST), "!one of"),
                (
                    &["f32[9, 2, 3]"],
                    &pool_of("max", [&[9], &[1], &[0], &[0], &[1]], FIRST),
                    "!does not lie within",
                ),
                // Windows of 2^20 on 2^16 elements, at 2^20 places and at one more; dilated, they see half.
                (
                    &["f32[1, 1, 65536]"],
                    &pool_of(
                        "max",
                        [&[1 << 20], &[1], &[1 << 20], &[983039], &[1]],
                        FIRST,
                    ),
                    "f32[1, 1, 1048576]",
                ),
                (
                    &["f32[1, 1, 65536]"],
                    &pool_of(
                        "max",
                        [&[1 << 20], &[1], &[1 << 20], &[983040], &[1]],
                        FIRST,
                    ),
                    "!takes more than",
                ),
                (
                    &["f32[1, 1, 65536]"],
                    &pool_of(
                        "max",
                        [&[1 << 20], &[1], &[1 << 20], &[2031616], &[2]],
                        FIRST,
                    ),
                    "f32[1, 1, 1048578]",
                ),
            ],
        );
    }

    #[test]
    fn decompositions_have_the_specs_of_the_rows() {
        for (x, w, b) in [
            ("f32", "f32", "f32"),
            ("f16", "bf16", "f16"),
            ("f16", "f16", "f16"),
            ("f64", "f32", "bf16"),
        ] {
            for (layout, dims) in [
                (FIRST, ["[rows, 4, 9, 8]", "[6, 2, 3, 2]"]),
                (LAST, ["[rows, 9, 8, 4]", "[6, 3, 2, 2]"]),
            ] {
                let attributes = conv_of(PLANE, 2, layout);
                let (x, w) = (format!("{x}{}", dims[0]), format!("{w}{}", dims[1]));
                decomposes(&conv, &[&x, &w, &format!("{b}[6]")], &attributes);
                if layout == LAST || w[..3] != x[..3] {
                    decomposes(&conv, &[&x, &w, "-"], &attributes);
                }
            }
        }
        for (x, lists) in [
            ("f16[2, 9, 4]", PLAIN),
            ("u8[rows, 9, 4]", PLAIN),
            ("bf16[2, 9, 8, 4]", PLANE),
        ] {
            let window = vec![3; lists[0].len()];
            decomposes(
                &pool,
                &[x],
                &pool_of(
                    "max",
                    [&window, lists[0], lists[1], lists[2], lists[3]],
                    LAST,
                ),
            );
        }
    }
}
