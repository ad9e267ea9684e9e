//! Convolutions and pools, all channels first.

use anyhow::{Context, Result, bail};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, as_i64, ints, word};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "Conv" => {
            let (x, w) = (m.x(0)?, m.x(1)?);
            let bias = m.optional(2)?.unwrap_or(Value::Absent);
            conv(
                m,
                [x, w, bias],
                &Window::read(m, x, Some(w))?,
                m.int("group", 1),
            )?
        }
        "ConvInteger" => {
            let (x, w) = (m.x(0)?, m.x(1)?);
            let window = Window::read(m, x, Some(w))?;
            let less = |v: Value, zero: usize, dims: &[usize]| {
                let v = m.cast(v, DType::F64)?;
                match m.optional(zero)? {
                    Some(z) => m.sub(v, m.reshape(m.cast(z, DType::F64)?, dims)?),
                    None => Ok(v),
                }
            };
            let zeros = m.given(3)?.map_or(1, |z| z.elements());
            let x = less(x, 2, &[])?;
            let w = less(w, 3, &[zeros, 1, 1, 1])?;
            let y = conv(m, [x, w, Value::Absent], &window, m.int("group", 1))?;
            m.cast(y, DType::I32)?
        }
        "ConvTranspose" => transposed(m)?,
        "CausalConvWithState" => return causal(m).map(Some),
        "MaxPool" => {
            if m.wants_output(1) {
                bail!("pool does not say where the greatest element was");
            }
            let x = m.x(0)?;
            pool(m, x, "max", &Window::read(m, x, None)?)?
        }
        "AveragePool" => {
            let x = m.x(0)?;
            let window = Window::read(m, x, None)?;
            average(m, x, window)?
        }
        "LpPool" => {
            let x = m.x(0)?;
            let window = Window::read(m, x, None)?;
            let count: i64 = window.size.iter().product();
            let p = m.int("p", 2) as f64;
            let power = m.binary("pow", m.unary("abs", x)?, m.like(p, x)?)?;
            // Padding is zeros, which add nothing to the sum.
            let sum = m.scale(pool(m, power, "average", &window)?, count as f64)?;
            m.binary("pow", sum, m.like(1.0 / p, x)?)?
        }
        "GlobalAveragePool" | "GlobalMaxPool" => {
            let x = m.x(0)?;
            let axes: Vec<i64> = (2..m.dims(x)?.len() as i64).collect();
            let name = if op == "GlobalMaxPool" {
                "reduce_max"
            } else {
                "mean"
            };
            m.reduce(name, x, &axes, true)?
        }
        "MaxUnpool" => max_unpool(m)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// What slides over the spatial axes.
struct Window {
    size: Vec<i64>,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    low: Vec<i64>,
    high: Vec<i64>,
    /// What `high` has beyond the pads, so that the last window of ceil mode fits.
    extra: Vec<i64>,
}

impl Window {
    fn read(m: &Mapper<'_>, x: Value, w: Option<Value>) -> Result<Self> {
        let dims = as_i64(&m.dims(x)?);
        let input = dims.get(2..).context("no spatial axes")?;
        let rank = input.len();
        let size = match (m.list("kernel_shape"), w) {
            (Some(size), _) => size,
            (None, Some(w)) => as_i64(&m.dims(w)?).split_off(2),
            (None, None) => bail!("a pool without kernel_shape"),
        };
        let ones = || vec![1; rank];
        let strides = m.list("strides").unwrap_or_else(ones);
        let dilations = m.list("dilations").unwrap_or_else(ones);
        let pads = m.list("pads").unwrap_or_else(|| vec![0; 2 * rank]);
        let (mut low, mut high) = (pads[..rank].to_vec(), pads[rank..].to_vec());
        let mut extra = vec![0; rank];
        for i in 0..rank {
            let reach = dilations[i] * (size[i] - 1) + 1;
            match m.text("auto_pad", "NOTSET") {
                "NOTSET" => {}
                "VALID" => (low[i], high[i]) = (0, 0),
                same => {
                    let windows = (input[i] + strides[i] - 1) / strides[i];
                    let all = ((windows - 1) * strides[i] + reach - input[i]).max(0);
                    let less = all / 2;
                    let upper = same == "SAME_UPPER";
                    (low[i], high[i]) = if upper {
                        (less, all - less)
                    } else {
                        (all - less, less)
                    };
                }
            }
            if m.int("ceil_mode", 0) != 0 {
                let padded = input[i] + low[i] + high[i];
                let mut windows = (padded - reach + strides[i] - 1) / strides[i] + 1;
                // A window that would start in the padding at the end does not count.
                if (windows - 1) * strides[i] >= input[i] + low[i] {
                    windows -= 1;
                }
                extra[i] = ((windows - 1) * strides[i] + reach - padded).max(0);
                high[i] += extra[i];
            }
        }
        Ok(Self {
            size,
            strides,
            dilations,
            low,
            high,
            extra,
        })
    }
}

fn conv(m: &Mapper<'_>, inputs: [Value; 3], window: &Window, groups: i64) -> Result<Value> {
    let attributes = vec![
        ints(&window.strides),
        ints(&window.low),
        ints(&window.high),
        ints(&window.dilations),
        Attribute::Int(groups),
        word("channels_first"),
    ];
    m.one("conv", &inputs, attributes)
}

fn pool(m: &Mapper<'_>, x: Value, kind: &str, window: &Window) -> Result<Value> {
    let attributes = vec![
        word(kind),
        ints(&window.size),
        ints(&window.strides),
        ints(&window.low),
        ints(&window.high),
        ints(&window.dilations),
        word("channels_first"),
    ];
    m.one("pool", &[x], attributes)
}

fn average(m: &Mapper<'_>, x: Value, mut window: Window) -> Result<Value> {
    if m.int("count_include_pad", 0) == 0 {
        return pool(m, x, "average_valid", &window);
    }
    if window.extra.iter().all(|&e| e == 0) {
        return pool(m, x, "average", &window);
    }
    // The pads count, what ceil mode adds does not: pads become zeros, the rest stays padding.
    let at_end: Vec<i64> = window
        .high
        .iter()
        .zip(&window.extra)
        .map(|(h, e)| h - e)
        .collect();
    let all = |spatial: &[i64]| [&[0, 0], spatial].concat();
    let x = m.pad(x, &all(&window.low), &all(&at_end))?;
    window.low.fill(0);
    window.high.clone_from(&window.extra);
    pool(m, x, "average_valid", &window)
}

/// A transposed convolution, whose padding may be negative.
fn transposed(m: &Mapper<'_>) -> Result<Value> {
    let (x, w) = (m.x(0)?, m.x(1)?);
    let (dims, wide) = (m.dims(x)?, m.dims(w)?);
    let rank = dims.len() - 2;
    let groups = m.int("group", 1);
    let ones = || vec![1; rank];
    let strides = m.list("strides").unwrap_or_else(ones);
    let dilations = m.list("dilations").unwrap_or_else(ones);
    let mut more = m.list("output_padding").unwrap_or_else(|| vec![0; rank]);
    let pads = m.list("pads").unwrap_or_else(|| vec![0; 2 * rank]);
    let (mut low, mut high) = (pads[..rank].to_vec(), pads[rank..].to_vec());
    let auto = m.text("auto_pad", "NOTSET");
    for i in 0..rank {
        let n = dims[i + 2] as i64;
        let size = match m.list("output_shape") {
            Some(shape) => Some(shape[i]),
            None if auto.starts_with("SAME") => Some(n * strides[i]),
            None => None,
        };
        if let Some(size) = size {
            let reach = dilations[i] * (wide[i + 2] as i64 - 1);
            let all = strides[i] * (n - 1) + more[i] + reach + 1 - size;
            // All is less than nothing where the result is larger than what the kernel reaches.
            let less = all.div_euclid(2);
            let upper = auto == "SAME_UPPER";
            (low[i], high[i]) = if upper {
                (less, all - less)
            } else {
                (all - less, less)
            };
        }
    }
    let mut before = vec![0; rank + 2];
    for i in 0..rank {
        before[i + 2] = (-low[i]).max(0);
        more[i] += (-high[i]).max(0);
        (low[i], high[i]) = (low[i].max(0), high[i].max(0));
    }
    let lists = [&strides, &low, &high, &more, &dilations];
    let lists = lists.iter().map(|l| ints(l));
    let attributes: Vec<Attribute> = lists.chain([Attribute::Int(groups)]).collect();
    let padded = before.iter().any(|&n| n > 0);
    let bias = m.optional(2)?;
    let own = bias.filter(|_| !padded).unwrap_or(Value::Absent);
    let y = m.one("conv_transpose", &[x, w, own], attributes)?;
    if !padded {
        return Ok(y);
    }
    let y = m.pad(y, &before, &vec![0; rank + 2])?;
    match bias {
        Some(bias) => {
            let mut shape = vec![1; rank + 1];
            shape[0] = m.dims(bias)?[0];
            m.add(y, m.reshape(bias, &shape)?)
        }
        None => Ok(y),
    }
}

/// A depthwise convolution over what came before and the input.
fn causal(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let (x, w) = (m.x(0)?, m.x(1)?);
    let (dims, kernel) = (m.dims(x)?, m.dims(w)?);
    let (channels, past) = (dims[1], kernel[2] as i64 - 1);
    let all = match m.optional(3)? {
        Some(state) => m.concat(&[state, x], 2)?,
        None => m.pad(x, &[0, 0, past], &[0, 0, 0])?,
    };
    let window = Window {
        size: vec![kernel[2] as i64],
        strides: vec![1],
        dilations: vec![1],
        low: vec![0],
        high: vec![0],
        extra: vec![0],
    };
    let bias = m.optional(2)?.unwrap_or(Value::Absent);
    let mut y = conv(m, [all, w, bias], &window, channels as i64)?;
    y = match m.text("activation", "none") {
        "silu" | "swish" => m.unary("silu", y)?,
        _ => y,
    };
    let length = m.dims(all)?[2] as i64;
    Ok(vec![y, m.slice(all, 2, length - past, i64::MAX, 1)?])
}

/// A convolution with the node's own strides and pads.
pub fn plain_conv(m: &Mapper<'_>, x: Value, w: Value) -> Result<Value> {
    let window = Window::read(m, x, Some(w))?;
    conv(m, [x, w, Value::Absent], &window, m.int("group", 1))
}

/// Elements back at the places of the pooled image that they came from, zeros elsewhere.
fn max_unpool(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let kernel = m.list("kernel_shape").context("no kernel")?;
    let rank = kernel.len();
    let strides = m.list("strides").unwrap_or_else(|| vec![1; rank]);
    let pads = m.list("pads").unwrap_or_else(|| vec![0; 2 * rank]);
    let mut pooled = dims[..2].to_vec();
    for i in 0..rank {
        let size = (dims[i + 2] as i64 - 1) * strides[i] + kernel[i] - pads[i] - pads[rank + i];
        pooled.push(usize::try_from(size)?);
    }
    let (all, given): (usize, usize) = (pooled.iter().product(), dims.iter().product());
    let empty = m.broadcast(m.like(0.0, x)?, &[all])?;
    let (places, x) = (m.reshape(m.x(1)?, &[given])?, m.reshape(x, &[given])?);
    let attributes = vec![Attribute::Int(0), word("set")];
    let flat = m.one("scatter_along_axis", &[empty, places, x], attributes)?;
    let image = m.reshape(flat, &pooled)?;
    let Some(shape) = m.given_ints(2)? else {
        return Ok(image);
    };
    let more: Vec<i64> = shape
        .iter()
        .zip(&pooled)
        .map(|(&to, &from)| to - from as i64)
        .collect();
    m.pad(image, &vec![0; more.len()], &more)
}
