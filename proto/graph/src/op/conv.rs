//! Convolution and pooling over one to three spatial axes.

use crate::{
    dtype::Kind,
    graph::GraphError,
    op::{
        Call, Effect,
        fit::{float, optional_vector, pair},
        ops,
        rules::{Specs, one, plain, size},
    },
    shape::Dim,
};

/// Where the channels of an image stand.
const LAYOUT: &[&str] = &["channels_first", "channels_last"];

/// The greatest stride, padding or dilation.
const MOST: i64 = 1 << 30;

ops! {
    /// Cross-correlation of `x` `[n, c, …]` with `w` `[o, c/groups, …]`, plus `bias` `[o]`, over the one to three
    /// spatial axes `…`; with `channels_last`, `x` is `[n, …, c]` and `w` `[o, …, c/groups]`. Each list has one number
    /// per spatial axis: `low` and `high` zeros before and after `x`, and an output is
    /// `(size + low + high − dilation·(window − 1) − 1) / stride + 1`. Sums of f16 and bf16 are f32 and rounded once.
    conv(x, w, bias = optional; strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST), groups: Int(1, MOST), layout: Name(LAYOUT)) -> one
    { shapes: "[n, c, …], [o, c/groups, …], [o] → [n, o, …]", dtypes: "float → promote(x, w, bias)", effect: Effect::None, infer: conv_spec, decompose: None }

    /// The greatest element, or the mean, of each window of `x` `[n, c, …]` (`channels_last`: `[n, …, c]`), with the
    /// lists of `conv`. Padding is lower than every element (−∞, of integers the least); `average` counts it as zeros,
    /// `average_valid` leaves it out. Means of f16 and bf16 are f32 and rounded once.
    pool(x; kind: Name(&["max", "average", "average_valid"]), window: Ints(1, MOST), strides: Ints(1, MOST), low: Ints(0, MOST), high: Ints(0, MOST), dilations: Ints(1, MOST), layout: Name(LAYOUT)) -> one
    { shapes: "[n, c, …] → [n, c, …]", dtypes: "float; max also integers → x", effect: Effect::None, infer: pool_spec, decompose: None }
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
    one(
        call,
        dtype,
        arranged(image.first, outs, spatial, channels_first),
    )
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
    let dims = arranged(image.first, image.channels, spatial, channels_first);
    one(call, x.dtype, dims)
}
