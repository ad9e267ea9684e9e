//! Weights in the forms that MLX multiplies with, made once per weight and shared by all plans that read it.

use std::{
    collections::HashMap,
    rc::{Rc, Weak},
};

use hotcell_graph::{DType, TensorSpec};
use mlx_rs::{Array, Dtype};

use super::{array, plan::overflow};
use crate::{
    backend::{Buffer, DeviceError},
    bound::Bound,
    cpu::dequant::dequantize_row,
};

/// Numbers that share a scale, in MLX's affine mode as in GGUF's blocks.
pub(super) const GROUP: usize = 32;

/// A form of weights `[…, n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// The numbers in f32.
    Plain,
    /// MLX's affine mode: packed numbers, scales and biases.
    Affine,
}

/// Weights in a form.
pub(super) struct Prepared {
    /// Plain: the numbers. Affine: numbers, scales, biases.
    pub arrays: Vec<Array>,
    /// Bits of a packed number.
    pub bits: i32,
    /// What they were made of: its address is in the key that finds them, and must not become another's.
    _buffer: Option<Buffer>,
}

/// Where weights are.
pub(super) enum Source<'a> {
    Array(&'a Array),
    Memory(&'a Bound),
}

/// Bits per number in the affine form of a block type, which holds exactly the same numbers.
pub(super) fn affine_bits(dtype: DType) -> Option<i32> {
    match dtype {
        DType::Q4_0 | DType::Q4_1 => Some(4),
        DType::Q8_0 => Some(8),
        _ => None,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    address: usize,
    spec: TensorSpec,
    form: Form,
}

/// What was made, for as long as a plan uses it.
#[derive(Default)]
pub(super) struct Weights(HashMap<Key, Weak<Prepared>>);

impl Weights {
    /// The form of weights in memory that nobody writes.
    pub fn get(
        &mut self,
        bound: &Bound,
        spec: &TensorSpec,
        form: Form,
    ) -> Result<Rc<Prepared>, DeviceError> {
        let key = Key {
            address: bound.range.start,
            spec: spec.clone(),
            form,
        };
        if let Some(there) = self.0.get(&key).and_then(Weak::upgrade) {
            return Ok(there);
        }
        self.0.retain(|_, made| made.strong_count() > 0);
        let mut made = Prepared::new(Source::Memory(bound), spec, form)?;
        made._buffer = Some(bound.buffer.clone());
        let made = Rc::new(made);
        self.0.insert(key, Rc::downgrade(&made));
        Ok(made)
    }
}

impl Prepared {
    /// Makes the form, evaluated.
    pub fn new(source: Source<'_>, spec: &TensorSpec, form: Form) -> Result<Self, DeviceError> {
        let (arrays, bits) = match source {
            Source::Array(array) => (vec![as_f32(array)?], 0),
            Source::Memory(bound) => {
                // Weights have no rows.
                let size = spec.bytes(0).ok_or_else(overflow)?;
                let mut bytes = Vec::new();
                let fits = bytes.try_reserve_exact(size);
                fits.map_err(|_| DeviceError::OutOfMemory {
                    what: "weights in MLX's form".to_owned(),
                    bytes: size,
                })?;
                bytes.resize(size, 0);
                bound.buffer.read(bound.offset, &mut bytes)?;
                of_bytes(&bytes, spec, form)?
            }
        };
        array::evaluate(&arrays)?;
        Ok(Self {
            arrays,
            bits,
            _buffer: None,
        })
    }
}

fn as_f32(array: &Array) -> Result<Array, DeviceError> {
    array
        .as_dtype(Dtype::Float32)
        .map_err(array::failed("weights as f32"))
}

fn of_bytes(bytes: &[u8], spec: &TensorSpec, form: Form) -> Result<(Vec<Array>, i32), DeviceError> {
    let dims = array::dims_or("weights", &spec.shape, 0)?;
    match (form, affine_bits(spec.dtype)) {
        (Form::Affine, Some(bits)) => Ok((affine(bytes, spec.dtype, &dims, bits)?, bits)),
        _ if spec.dtype.is_block() => {
            let row = spec.shape.inner().ok_or_else(overflow)?;
            let stride = spec.dtype.row_bytes(row).ok_or_else(overflow)?;
            let mut plain = vec![0f32; spec.shape.elements(0).ok_or_else(overflow)?];
            let rows = plain.chunks_exact_mut(row.max(1));
            for (out, row) in rows.zip(bytes.chunks_exact(stride.max(1))) {
                dequantize_row(spec.dtype, row, out);
            }
            Ok((vec![array::from_f32(&plain, &dims)?], 0))
        }
        _ => Ok((
            vec![as_f32(&array::from_bytes(bytes, spec.dtype, &dims)?)?],
            0,
        )),
    }
}

/// GGUF's blocks of 32 as MLX's groups of 32. A number is `scale · q + bias` there: Q4_0's bias is −8 scales, Q4_1 stores
/// it, and Q8_0's signed bytes are turned into unsigned ones by their sign bit, with a bias of −128 scales.
fn affine(bytes: &[u8], dtype: DType, dims: &[i32], bits: i32) -> Result<Vec<Array>, DeviceError> {
    let half = |b: &[u8]| match b {
        [a, b, ..] => half::f16::from_le_bytes([*a, *b]).to_f32(),
        _ => 0.0,
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    let (mut packed, mut scales, mut biases) = (vec![], vec![], vec![]);
    for block in blocks {
        let scale = half(block);
        scales.push(scale);
        let head = if dtype == DType::Q4_1 { 4 } else { 2 };
        biases.push(match dtype {
            DType::Q4_1 => half(block.get(2..).unwrap_or_default()),
            DType::Q4_0 => -8.0 * scale,
            _ => -128.0 * scale,
        });
        let numbers = block.get(head..).unwrap_or_default();
        match bits {
            // The low halves of the 16 bytes are numbers 0 to 15, the high ones 16 to 31; MLX has them in order.
            4 => {
                let order = |shift: u32| numbers.iter().map(move |b| (b >> shift) & 15);
                let all: Vec<u8> = order(0).chain(order(4)).collect();
                packed.extend(all.as_chunks::<2>().0.iter().map(|[a, b]| a | (b << 4)));
            }
            _ => packed.extend(numbers.iter().map(|b| b ^ 0x80)),
        }
    }
    let (inner, outer) = dims.split_last().ok_or_else(overflow)?;
    let with = |last: i32| [outer, &[last]].concat();
    let words = with(inner / (32 / bits));
    let groups = with(inner / GROUP as i32);
    Ok(vec![
        array::from_bytes(&packed, DType::U32, &words)?,
        array::from_f32(&scales, &groups)?,
        array::from_f32(&biases, &groups)?,
    ])
}
