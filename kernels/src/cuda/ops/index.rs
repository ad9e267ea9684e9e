//! Reading by index: take, take_along_axis and gather_nd.

use hotcell_graph::{DType, Shape, dtype::Kind, op::Call, op::rules::normal_axis};

use super::{
    Cx, Entry, Kernel, Made,
    layout::{around, code, dims_at, grid},
};
use crate::{backend::DeviceError, cuda::gpu::Arguments, part::overflow};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "take",
        make: take,
    },
    Entry {
        op: "take_along_axis",
        make: take_along_axis,
    },
    Entry {
        op: "gather_nd",
        make: gather_nd,
    },
];

/// Axes of a tuple of indices that the kernel takes.
pub(super) const AXES: usize = 8;

/// How kernels name the dtype of indices.
pub(super) fn index_code(dtype: DType) -> Option<u32> {
    let is_integer = matches!(dtype.kind(), Kind::Signed | Kind::Unsigned);
    code(dtype).filter(|_| is_integer)
}

/// What is read by index.
struct Read {
    bytes: usize,
    dtype: u32,
    x: Shape,
    indices: Shape,
}

fn read(call: &Call<'_>) -> Option<Read> {
    let (x, indices) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let bytes = x.dtype.block_bytes();
    let read = Read {
        bytes,
        dtype: index_code(indices.dtype)?,
        x: x.shape.clone(),
        indices: indices.shape.clone(),
    };
    (!x.dtype.is_block() && matches!(bytes, 1 | 2 | 4 | 8)).then_some(read)
}

impl Read {
    /// What all of the kernels begin with.
    fn arguments(&self, cx: &Cx<'_>) -> Result<Arguments, DeviceError> {
        let bytes = u32::try_from(self.bytes).map_err(|_| overflow())?;
        Ok(Arguments::default()
            .int(bytes)
            .int(self.dtype)
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(cx.input(1)?))
    }
}

/// Elements of these sizes.
pub(super) fn product(all: &[u64]) -> Result<u64, DeviceError> {
    let mut all = all.iter();
    let n = all.try_fold(1u64, |n, m| n.checked_mul(*m));
    n.ok_or_else(overflow)
}

/// Along an axis: by a list of indices for all of the others, or by one for each element.
struct Take {
    read: Read,
    axis: usize,
    along: bool,
}

fn along(call: &Call<'_>, along: bool, name: &'static str) -> Option<Made> {
    let read = read(call)?;
    let axis = normal_axis(call.int(0).ok()?, read.x.rank())?;
    Some((Box::new(Take { read, axis, along }), vec![name]))
}

fn take(call: &Call<'_>) -> Option<Made> {
    along(call, false, "take")
}

fn take_along_axis(call: &Call<'_>) -> Option<Made> {
    along(call, true, "take_along_axis")
}

impl Kernel for Take {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let (x, indices) = (&self.read.x, dims_at(&self.read.indices, cx.rows));
        let sizes = around(&dims_at(x, cx.rows), self.axis);
        let [mut outer, n, k] = sizes.ok_or_else(overflow)?;
        let (name, count) = match self.along {
            false => {
                let dims: Vec<u64> = indices.iter().map(|d| *d as u64).collect();
                ("take", product(&dims)?)
            }
            true => {
                let [o, m, _] = around(&indices, self.axis).ok_or_else(overflow)?;
                outer = o;
                ("take_along_axis", m)
            }
        };
        let elements = product(&[outer, count, k])?;
        let arguments = self.read.arguments(cx)?;
        let arguments = arguments.word(outer).word(n).word(k).word(count);
        let arguments = arguments.word(cx.faults);
        // SAFETY: the kernel's arguments (index.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch(name, grid(elements), &arguments) }
    }
}

/// By tuples of indices into the axes after those of a batch.
struct GatherNd {
    read: Read,
    batch: usize,
    width: usize,
}

fn gather_nd(call: &Call<'_>) -> Option<Made> {
    let read = read(call)?;
    let kernel = GatherNd {
        batch: usize::try_from(call.int(0).ok()?).ok()?,
        width: read.indices.inner()?,
        read,
    };
    (kernel.width <= AXES).then(|| -> Made { (Box::new(kernel), vec!["gather_nd"]) })
}

impl Kernel for GatherNd {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let dims = |shape: &Shape| -> Vec<u64> {
            let dims = dims_at(shape, cx.rows);
            dims.into_iter().map(|d| d as u64).collect()
        };
        let (x, indices) = (dims(&self.read.x), dims(&self.read.indices));
        let tuples = indices.get(..indices.len().saturating_sub(1));
        let tuples = tuples.ok_or_else(overflow)?;
        let end = self.batch.checked_add(self.width).ok_or_else(overflow)?;
        let each = product(tuples.get(self.batch..).ok_or_else(overflow)?)?;
        let sizes = x.get(self.batch..end).ok_or_else(overflow)?;
        let inside = product(x.get(end..).ok_or_else(overflow)?)?;
        let all = product(tuples)?;
        let mut words = vec![all, each, self.width as u64];
        words.extend((0..AXES).map(|axis| sizes.get(axis).copied().unwrap_or(1)));
        words.push(inside);
        let arguments = self.read.arguments(cx)?.block(&words).word(cx.faults);
        // SAFETY: the kernel's arguments (index.cu), of tensors of these shapes.
        unsafe {
            cx.gpu
                .launch("gather_nd", grid(product(&[all, inside])?), &arguments)
        }
    }
}
