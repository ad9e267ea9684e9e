//! Weights in the forms that MLX computes with: made once, kept beside the memory that they were made of, and shared by all
//! plans that read it. MLX on the processor copies all memory that it did not allocate, so each is a copy.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ffi::CStr,
    rc::Rc,
};

use hotcell_graph::{DType, TensorSpec};
use mlx_rs::{Array, Dtype};

use super::{array, plan::overflow};
use crate::{
    backend::{Buffer, DeviceError, DeviceMemory, HostSpan},
    bound::Bound,
    cpu::dequant::dequantize_row,
    host::SharedBytes,
};

/// Numbers that share a scale, in MLX's affine mode as in GGUF's blocks of 32 and in the parts of its blocks of 256.
const GROUP: usize = 32;

/// A form of weights `[…, n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// As they are stored; no block type.
    Stored,
    /// The numbers in f32.
    Plain,
    /// One of MLX's modes: packed numbers, scales, and in the affine mode biases.
    Packed,
}

/// A mode of MLX's that holds the very numbers of a block type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    /// MLX's name of it.
    pub mode: &'static CStr,
    /// Numbers that share a scale.
    pub group: usize,
    /// Bits of a number; a group is whole bytes.
    pub bits: usize,
    /// Bytes of a group's scale, and of its bias if there is one.
    scale: usize,
}

impl Packing {
    /// The mode for a block type, where there is one.
    ///
    /// Affine: `scale · q + bias` is a product without rounding and a sum with one, as it is in the blocks. Q6_K has groups of
    /// 16, which that mode has not. MXFP4 and NVFP4 have the numbers and scales of the modes of those names, but for scales
    /// that stand for no number, of which ggml makes another than MLX ([`mxfp4_block`], [`nvfp4_block`]).
    pub fn of(dtype: DType) -> Option<Self> {
        let affine = |bits| Packing {
            mode: c"affine",
            group: GROUP,
            bits,
            scale: 2 * size_of::<f32>(),
        };
        let float = |mode, group| Packing {
            mode,
            group,
            bits: 4,
            scale: 1,
        };
        match dtype {
            DType::Q4_0 | DType::Q4_1 | DType::Q4K => Some(affine(4)),
            DType::Q5_0 | DType::Q5_1 | DType::Q5K => Some(affine(5)),
            DType::Q8_0 => Some(affine(8)),
            DType::MXFP4 => Some(float(c"mxfp4", 32)),
            DType::NVFP4 => Some(float(c"nvfp4", 16)),
            _ => None,
        }
    }

    /// Bytes of a group's numbers.
    fn numbers(self) -> usize {
        self.group / 8 * self.bits
    }
}

impl Form {
    /// In which MLX multiplies with weights of a dtype.
    pub fn to_multiply(dtype: DType) -> Self {
        match Packing::of(dtype) {
            Some(_) => Form::Packed,
            None => Form::Plain,
        }
    }

    /// Bytes of weights in this form; `None`: more than can be counted.
    pub fn bytes(self, spec: &TensorSpec) -> Option<usize> {
        let elements = spec.shape.elements(0)?;
        match (self, Packing::of(spec.dtype)) {
            (Form::Stored, _) => spec.bytes(0),
            (Form::Packed, Some(packing)) => {
                let groups = elements / packing.group;
                groups.checked_mul(packing.numbers() + packing.scale)
            }
            _ => elements.checked_mul(size_of::<f32>()),
        }
    }
}

/// Weights in a form.
pub(super) struct Prepared {
    /// Packed: numbers, scales, biases if the mode has them. Else the numbers.
    pub arrays: Vec<Rc<Array>>,
    /// How they are packed, if they are.
    pub packing: Option<Packing>,
}

/// Where weights are.
pub(super) enum Source<'a> {
    Array(&'a Array),
    Memory(&'a Bound),
}

/// What was made of a piece of memory: where in it, as what, in which form.
type Key = (usize, TensorSpec, Form);

/// First byte and length of memory that was imported.
type Place = (usize, usize);

#[derive(Default)]
struct Region {
    /// Buffers of it.
    owners: usize,
    forms: HashMap<Key, Rc<Prepared>>,
}

/// Imported memory, and what was made of it.
#[derive(Default)]
pub(super) struct Weights {
    regions: RefCell<HashMap<Place, Region>>,
    bytes: Cell<usize>,
}

fn place(host: &HostSpan) -> Place {
    (host.start.addr(), host.len)
}

impl Weights {
    /// Imported memory, of which forms are kept until its last buffer is gone.
    pub fn keep(self: &Rc<Self>, buffer: Buffer) -> Buffer {
        let Some(host) = buffer.host().filter(|h| !h.writable) else {
            return buffer;
        };
        let place = place(&host);
        let mut regions = self.regions.borrow_mut();
        let region = regions.entry(place).or_default();
        region.owners = region.owners.saturating_add(1);
        Buffer::new(Rc::new(Kept {
            buffer,
            place,
            weights: Rc::clone(self),
        }))
    }

    /// Whether memory was imported, so that nobody writes it and forms of it are kept.
    pub fn keeps(&self, buffer: &Buffer) -> bool {
        let known = |h: HostSpan| !h.writable && self.regions.borrow().contains_key(&place(&h));
        buffer.host().is_some_and(known)
    }

    /// Bytes of all forms.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    /// The form of weights in imported memory.
    pub fn get(
        &self,
        bound: &Bound,
        spec: &TensorSpec,
        form: Form,
    ) -> Result<Rc<Prepared>, DeviceError> {
        let host = bound.buffer.host().ok_or_else(overflow)?;
        let (place, key) = (place(&host), (bound.offset, spec.clone(), form));
        let known = |regions: &HashMap<Place, Region>| {
            regions
                .get(&place)
                .and_then(|r| r.forms.get(&key))
                .map(Rc::clone)
        };
        if let Some(there) = known(&self.regions.borrow()) {
            return Ok(there);
        }
        let made = Rc::new(Prepared::new(Source::Memory(bound), spec, form)?);
        if let Some(region) = self.regions.borrow_mut().get_mut(&place) {
            region.forms.insert(key, Rc::clone(&made));
            self.bytes
                .set(self.bytes.get().saturating_add(made.bytes()));
        }
        Ok(made)
    }

    fn release(&self, place: Place) {
        let mut regions = self.regions.borrow_mut();
        let Some(region) = regions.get_mut(&place) else {
            return;
        };
        region.owners = region.owners.saturating_sub(1);
        if region.owners == 0 {
            let bytes = region.forms.values().map(|made| made.bytes()).sum();
            self.bytes.set(self.bytes.get().saturating_sub(bytes));
            regions.remove(&place);
        }
    }
}

/// Imported memory whose forms are kept while it lives.
struct Kept {
    buffer: Buffer,
    place: Place,
    weights: Rc<Weights>,
}

impl DeviceMemory for Kept {
    fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.buffer.write(offset, data)
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        self.buffer.read(offset, data)
    }

    fn host(&self) -> Option<HostSpan> {
        self.buffer.host()
    }

    fn share(&self) -> Option<SharedBytes> {
        self.buffer.share()
    }

    fn is_shared(&self) -> bool {
        self.buffer.is_shared()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.weights.release(self.place);
    }
}

impl Prepared {
    /// Makes the form, evaluated.
    pub fn new(source: Source<'_>, spec: &TensorSpec, form: Form) -> Result<Self, DeviceError> {
        let packing = match (&source, form) {
            (Source::Memory(_), Form::Packed) => Packing::of(spec.dtype),
            _ => None,
        };
        let arrays = match (source, packing) {
            (Source::Array(array), _) => vec![as_f32(array)?],
            (Source::Memory(bound), Some(packing)) => packed(bound, spec, packing)?,
            (Source::Memory(bound), _) if spec.dtype.is_block() => vec![dequantized(bound, spec)?],
            (Source::Memory(bound), _) => {
                let stored = array::of_bound(bound, spec, 0)?;
                vec![match form {
                    Form::Stored => stored,
                    _ => as_f32(&stored)?,
                }]
            }
        };
        array::evaluate(&arrays)?;
        let arrays = arrays.into_iter().map(Rc::new).collect();
        Ok(Self { arrays, packing })
    }

    fn bytes(&self) -> usize {
        self.arrays.iter().map(|array| array.nbytes()).sum()
    }
}

fn as_f32(array: &Array) -> Result<Array, DeviceError> {
    array
        .as_dtype(Dtype::Float32)
        .map_err(array::failed("weights as f32"))
}

/// Reads weights row by row: `each` gets a row's bytes.
fn each_row(
    bound: &Bound,
    spec: &TensorSpec,
    mut each: impl FnMut(&[u8]),
) -> Result<(), DeviceError> {
    let row = spec.shape.inner().ok_or_else(overflow)?;
    let stride = spec.dtype.row_bytes(row).ok_or_else(overflow)?;
    let size = spec.bytes(0).ok_or_else(overflow)?;
    let mut bytes = array::zeros("a row of weights", stride)?;
    for at in (0..size).step_by(stride.max(1)) {
        bound.buffer.read(bound.offset + at, &mut bytes)?;
        each(&bytes);
    }
    Ok(())
}

/// The numbers of block weights in f32.
fn dequantized(bound: &Bound, spec: &TensorSpec) -> Result<Array, DeviceError> {
    let dims = array::dims_or("weights", &spec.shape, 0)?;
    let elements = spec.shape.elements(0).ok_or_else(overflow)?;
    let row = spec.shape.inner().ok_or_else(overflow)?;
    let mut plain: Vec<f32> = array::zeros("weights as f32", elements)?;
    let mut rows = plain.chunks_exact_mut(row.max(1));
    each_row(bound, spec, |bytes| {
        if let Some(out) = rows.next() {
            dequantize_row(spec.dtype, bytes, out);
        }
    })?;
    array::from_f32(&plain, &dims)
}

/// A group's numbers, scale and bias.
type Group = ([u8; GROUP], f32, f32);

fn half(bytes: &[u8], at: usize) -> f32 {
    match bytes.get(at..at + 2) {
        Some([a, b]) => half::f16::from_le_bytes([*a, *b]).to_f32(),
        _ => 0.0,
    }
}

/// Element `l` of nibbles, two in a byte: low ones first, then the high ones.
fn nibble(bytes: &[u8], l: usize) -> u8 {
    let half = bytes.len().max(1);
    let byte = bytes.get(l % half).copied().unwrap_or(0);
    if l < half { byte & 15 } else { byte >> 4 }
}

fn bit(bytes: &[u8], at: usize, bit: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0) >> bit & 1
}

/// A block of 32 as a group. A number is `scale · q + bias`: Q4_0's bias is −8 scales and Q5_0's −16, Q4_1 and Q5_1 store it,
/// and Q8_0's signed bytes are turned into unsigned ones by their sign bit, with a bias of −128 scales.
fn small_block(dtype: DType, block: &[u8]) -> Group {
    let scale = half(block, 0);
    let stored = matches!(dtype, DType::Q4_1 | DType::Q5_1);
    let head = if stored { 4 } else { 2 };
    let bias = match dtype {
        DType::Q4_1 | DType::Q5_1 => half(block, 2),
        DType::Q4_0 => -8.0 * scale,
        DType::Q5_0 => -16.0 * scale,
        _ => -128.0 * scale,
    };
    let fifth = matches!(dtype, DType::Q5_0 | DType::Q5_1);
    let numbers = head + if fifth { 4 } else { 0 };
    let packed = block.get(numbers..).unwrap_or_default();
    let number = |l: usize| match dtype {
        DType::Q8_0 => packed.get(l).copied().unwrap_or(0) ^ 0x80,
        _ if fifth => nibble(packed, l) | bit(block, head + l / 8, l % 8) << 4,
        _ => nibble(packed, l),
    };
    (std::array::from_fn(number), scale, bias)
}

/// Part `j` of eight of a block of 256: `(d · scale) · q − dmin · min`, with six bits for scale and min.
fn large_block(dtype: DType, block: &[u8], j: usize) -> Group {
    let packed = |at: usize| block.get(4 + at).copied().unwrap_or(0);
    let (scale, min) = match j < 4 {
        true => (packed(j) & 63, packed(j + 4) & 63),
        false => (
            (packed(j + 4) & 15) | (packed(j - 4) >> 6 << 4),
            (packed(j + 4) >> 4) | (packed(j) >> 6 << 4),
        ),
    };
    let start = if dtype == DType::Q5K { 48 } else { 16 };
    let number = |l: usize| {
        let byte = block.get(start + j / 2 * 32 + l).copied().unwrap_or(0);
        let low = byte >> (j % 2 * 4) & 15;
        match dtype {
            DType::Q5K => low | bit(block, 16 + l, j) << 4,
            _ => low,
        }
    };
    let (d, dmin) = (half(block, 0), half(block, 2));
    let numbers = std::array::from_fn(number);
    (numbers, d * f32::from(scale), -(dmin * f32::from(min)))
}

/// A group's numbers as MLX packs them: one after another, from the lowest bit up.
fn pack(numbers: &[u8], bits: usize, packed: &mut Vec<u8>) {
    let (mut held, mut count) = (0u32, 0);
    for number in numbers {
        held |= u32::from(*number) << count;
        count += bits;
        while count >= 8 {
            packed.extend(held.to_le_bytes().first());
            held >>= 8;
            count -= 8;
        }
    }
}

/// A group of numbers of E2M1: their codes, as many as the group has, and the scale's.
type Float4 = ([u8; GROUP], u8);

/// An MXFP4 block as a group. Its scale is that of MLX but for 255, of which OCP and MLX make no number and ggml the power of two
/// that follows: the numbers are then named so that the scale before it says the same.
fn mxfp4_block(block: &[u8]) -> Float4 {
    let scale = block.first().copied().unwrap_or(0);
    let packed = block.get(1..).unwrap_or_default();
    let numbers = std::array::from_fn(|l| match (scale, nibble(packed, l)) {
        (255, code) => match code & 7 {
            0 => 0,
            // Half of what it was named, twice the number.
            1 => code & 8 | 2,
            // Too large for f32, as 2 with the scale before is.
            _ => code & 8 | 4,
        },
        (_, code) => code,
    });
    (numbers, scale.min(254))
}

/// Sub-block `j` of four of an NVFP4 block as a group. As in ggml a scale's sign does not count, and the NaN without one is 0;
/// with one it is 480, which is no number of MLX's: `None`.
fn nvfp4_block(block: &[u8], j: usize) -> Option<Float4> {
    let scale = match block.get(j)? {
        0xff => return None,
        0x7f => 0,
        scale => scale & 0x7f,
    };
    let packed = block.get(4 + 8 * j..12 + 8 * j)?;
    Some((std::array::from_fn(|l| nibble(packed, l % 16)), scale))
}

/// GGUF's blocks as groups of one of MLX's modes.
fn packed(bound: &Bound, spec: &TensorSpec, packing: Packing) -> Result<Vec<Array>, DeviceError> {
    let dims = array::dims_or("weights", &spec.shape, 0)?;
    let (dtype, Packing { group, bits, .. }) = (spec.dtype, packing);
    let groups = spec.shape.elements(0).ok_or_else(overflow)? / group;
    let bytes = groups.checked_mul(packing.numbers()).ok_or_else(overflow)?;
    let what = "weights in MLX's form";
    let mut numbers: Vec<u8> = array::room(what, bytes)?;
    let is_affine = packing.mode == c"affine";
    let floats = if is_affine { groups } else { 0 };
    let (mut scales, mut biases) = (array::room(what, floats)?, array::room(what, floats)?);
    let mut codes: Vec<u8> = array::room(what, groups - floats)?;
    let mut all_have = true;
    each_row(bound, spec, |row| {
        let mut affine = |numbers: &mut Vec<u8>, (group, scale, bias): Group| {
            pack(&group, bits, numbers);
            scales.push(scale);
            biases.push(bias);
        };
        let mut float = |numbers: &mut Vec<u8>, (all, scale): Float4| {
            pack(all.get(..group).unwrap_or_default(), bits, numbers);
            codes.push(scale);
        };
        for block in row.chunks_exact(dtype.block_bytes()) {
            match dtype {
                DType::Q4K | DType::Q5K => {
                    (0..8).for_each(|j| affine(&mut numbers, large_block(dtype, block, j)));
                }
                DType::MXFP4 => float(&mut numbers, mxfp4_block(block)),
                DType::NVFP4 => (0..4).for_each(|j| match nvfp4_block(block, j) {
                    Some(group) => float(&mut numbers, group),
                    None => all_have = false,
                }),
                _ => affine(&mut numbers, small_block(dtype, block)),
            }
        }
    })?;
    if !all_have {
        let why = format!("a scale of these {dtype} weights is 0xff, which MLX has no number for");
        return Err(array::refused("weights", why));
    }
    let (inner, outer) = dims.split_last().ok_or_else(overflow)?;
    let with = |last: usize| -> Result<Vec<i32>, DeviceError> {
        let last = i32::try_from(last).map_err(|_| overflow())?;
        Ok([outer, &[last]].concat())
    };
    let groups = usize::try_from(*inner).map_err(|_| overflow())? / group;
    let words = with(groups * packing.numbers() / size_of::<u32>())?;
    let each = with(groups)?;
    let numbers = array::from_bytes(&numbers, DType::U32, &words)?;
    Ok(match is_affine {
        true => vec![
            numbers,
            array::from_f32(&scales, &each)?,
            array::from_f32(&biases, &each)?,
        ],
        false => vec![numbers, array::from_bytes(&codes, DType::U8, &each)?],
    })
}
