//! Rotary positions. MLX's own kernel makes angles in f32, which far from 0 are not the catalogue's; so sines and
//! cosines are made here, in f64, once per execution for all layers.

use hotcell_graph::op::Call;
use mlx_rs::{Array, error::Exception, ops};

use super::{
    Entry, has_elements,
    needs::{Needs, bytes, checked, elements, product, sum},
    one,
};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "rope",
    supports: some,
    needs: needed,
    launch: rope,
}];

fn some(call: &Call<'_>) -> bool {
    has_elements(call)
}

/// Positions, cosines and sines (here and in MLX), and the parts that are put together: halves, their products, and sums.
fn needed(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let (x, positions) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let frequencies = elements(call.tensor(2).ok()?, rows)?;
    let positions = elements(positions, rows)?;
    let angles = product(&[positions, frequencies, 4 * size_of::<f32>()])?;
    let parts = product(&[elements(x, rows)?, 4 * size_of::<f32>()])?;
    let read = sum(&[checked(positions)?, product(&[frequencies, 12])?])?;
    bytes(sum(&[angles, parts, read])?)
}

/// Cosines and sines `[m, 1, d/2]`.
fn angles(cx: &Cx<'_>) -> Result<(Array, Array), DeviceError> {
    let positions = cx.integers(1)?;
    let bytes = cx.bytes(2)?;
    let given = bytes.as_chunks::<4>().0;
    let mut frequencies = array::room("frequencies", given.len())?;
    frequencies.extend(given.iter().map(|b| f64::from(f32::from_le_bytes(*b))));
    let count = positions.len().checked_mul(frequencies.len());
    let count = count.ok_or_else(overflow)?;
    let mut cosines = array::room("cosines", count)?;
    let mut sines = array::room("sines", count)?;
    for position in positions {
        for frequency in &frequencies {
            // The product of two numbers of 24 bits is exact in f64.
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            cosines.push(cosine as f32);
            sines.push(sine as f32);
        }
    }
    let dims = cx.dims(0)?;
    let &[m, _, d] = dims.as_slice() else {
        return Err(overflow());
    };
    let dims = [m, 1, d / 2];
    Ok((
        array::from_f32(&cosines, &dims)?,
        array::from_f32(&sines, &dims)?,
    ))
}

fn rope(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (cosines, sines) = cx.shared("rope", 1, 2, || angles(cx))?;
    let interleaved = cx.call().bool(0)?;
    let x = cx.array(0)?;
    let &[m, heads, d] = x.shape() else {
        return Err(overflow());
    };
    // Pairs apart: [m, heads, 2, d/2], or side by side: [m, heads, d/2, 2].
    let (apart, axis) = match interleaved {
        true => ([m, heads, d / 2, 2], 3),
        false => ([m, heads, 2, d / 2], 2),
    };
    let turned = || -> Result<Array, Exception> {
        let pairs = x.reshape(&apart)?.split_equal(2, axis)?;
        let [a, b] = pairs.as_slice() else {
            return Err(Exception::custom("two halves were asked for"));
        };
        let (a, b) = (
            a.reshape(&[m, heads, d / 2])?,
            b.reshape(&[m, heads, d / 2])?,
        );
        let first = a.multiply(&*cosines)?.subtract(b.multiply(&*sines)?)?;
        let second = a.multiply(&*sines)?.add(b.multiply(&*cosines)?)?;
        ops::stack(&[first, second], axis)?.reshape(&[m, heads, d])
    };
    one(cx, turned())
}
