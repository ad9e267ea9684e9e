//! Buffers of what is not read in place: small weights and scales converted, experts copied together.

use std::{ops::Range, rc::Rc};

use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError, HostRegion},
    cpu::dequant::{dequantize_row, is_decoded},
    host::Staging,
};

use super::{
    run::RunError,
    weave::{Bands, BuildError, Piece},
};
use crate::weights::{Weight, Weights};

/// Bytes of weights that are copied together.
pub(super) fn stack_bytes(weights: &Weights, pieces: &[Piece]) -> Result<usize, RunError> {
    pieces.iter().try_fold(0usize, |sum, piece| {
        Ok(sum.saturating_add(
            found(weights, &piece.name, piece.rows.as_ref())?
                .range
                .len(),
        ))
    })
}

/// A weight, or some rows of it, in place.
pub(super) fn found(
    weights: &Weights,
    name: &str,
    rows: Option<&Range<usize>>,
) -> Result<Weight, RunError> {
    let whole = weights.get(name).map_err(BuildError::Model)?;
    match rows {
        None => Ok(whole.clone()),
        Some(rows) => whole.flat_rows(rows.clone()).ok_or_else(|| {
            let what = format!("rows {rows:?} of {name}, which is {whole:?}");
            DeviceError::Binding(what).into()
        }),
    }
}

/// A small weight's numbers, or some of them.
pub(super) fn vector(
    weights: &Weights,
    name: &str,
    elements: Option<&Range<usize>>,
) -> Result<Vec<f32>, RunError> {
    let weight = weights.get(name).map_err(BuildError::Model)?;
    if !is_decoded(weight.dtype) {
        let why = format!("{name} is {}", weight.dtype);
        return Err(DeviceError::Unsupported {
            backend: "cpu",
            op: "dequantize",
            why,
        }
        .into());
    }
    let mut values = vec![0.0; weight.elements()];
    dequantize_row(weight.dtype, weight.bytes(), &mut values);
    if let Some(elements) = elements {
        values.truncate(elements.end);
        values.drain(..elements.start.min(values.len()));
    }
    Ok(values)
}

/// Scales of rectangles of weights.
pub(super) fn scales(weights: &Weights, bands: &[Bands]) -> Result<Vec<f32>, RunError> {
    let mut all = Vec::new();
    // Those of one tensor follow each other.
    let mut read: Option<(&str, Vec<f32>)> = None;
    for of in bands {
        let Bands { name, across, .. } = of;
        if read.as_ref().is_none_or(|(of, _)| of != name) {
            read = Some((name, vector(weights, name, None)?));
        }
        let values = read.as_ref().map_or(&[][..], |(_, values)| values);
        for band in of.each() {
            let values = (band.checked_mul(*across))
                .and_then(|start| values.get(start..)?.get(..*across))
                .ok_or_else(|| {
                    DeviceError::Binding(format!("{name} has no {across} scales at {band}"))
                })?;
            all.extend_from_slice(values);
        }
    }
    Ok(all)
}

/// Memory that was filled once.
struct Filled(Staging);

// SAFETY: the memory stays at one address, and nothing changes it from here on.
unsafe impl HostRegion for Filled {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Weights copied together, one after another: as memory that nobody writes, so that a device may keep the form that it
/// computes with.
pub(super) fn stack(
    weights: &Weights,
    pieces: &[Piece],
    progressed: &dyn Fn(),
) -> Result<Rc<dyn HostRegion>, RunError> {
    let what = pieces.first().map_or("experts", |piece| &piece.name);
    let mut all = Staging::new(what, stack_bytes(weights, pieces)?)?;
    let mut rest = all.bytes_mut();
    for piece in pieces {
        progressed();
        let weight = found(weights, &piece.name, piece.rows.as_ref())?;
        let bytes = weight.bytes();
        let Some((here, after)) = rest.split_at_mut_checked(bytes.len()) else {
            let what = format!("{} is longer than it was", piece.name);
            return Err(DeviceError::Binding(what).into());
        };
        here.copy_from_slice(bytes);
        rest = after;
    }
    Ok(Rc::new(Filled(all)))
}

/// A buffer of these numbers.
pub(super) fn f32_buffer(
    device: &dyn Device,
    what: &str,
    values: &[f32],
) -> Result<Buffer, DeviceError> {
    let buffer = device.allocate(what, size_of_val(values))?;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    buffer.write(0, &bytes)?;
    Ok(buffer)
}
