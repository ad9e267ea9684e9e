//! Buffers of what is not read in place: small weights converted, experts copied together.

use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    cpu::dequant::{dequantize_row, is_weight_dtype},
};

use super::{run::RunError, weave::BuildError};
use crate::weights::Weights;

/// Bytes of weights that are copied together.
pub(super) fn stack_bytes(weights: &Weights, names: &[String]) -> Result<usize, RunError> {
    names.iter().try_fold(0usize, |sum, name| {
        let weight = weights.get(name).map_err(BuildError::Model)?;
        Ok(sum.saturating_add(weight.range.len()))
    })
}

/// A small weight's numbers.
pub(super) fn vector(weights: &Weights, name: &str) -> Result<Vec<f32>, RunError> {
    let weight = weights.get(name).map_err(BuildError::Model)?;
    if !is_weight_dtype(weight.dtype) {
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
    Ok(values)
}

/// Weights copied together, one after another.
pub(super) fn stack(
    device: &dyn Device,
    weights: &Weights,
    names: &[String],
    progressed: &dyn Fn(),
) -> Result<Buffer, RunError> {
    let what = names.first().map_or("experts", String::as_str);
    let buffer = device.allocate(what, stack_bytes(weights, names)?)?;
    let mut at = 0;
    for name in names {
        progressed();
        let bytes = weights.get(name).map_err(BuildError::Model)?.bytes();
        buffer.write(at, bytes)?;
        at += bytes.len();
    }
    Ok(buffer)
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
