//! Writing by index: scatter_along_axis and scatter_nd.

use hotcell_graph::{Shape, op::Call, op::rules::normal_axis};

use super::{
    Cx, Entry, Kernel, Made,
    index::{AXES, index_code, product},
    layout::{around, code, contiguous, dims_at, grid},
};
use crate::{backend::DeviceError, cuda::gpu::Arguments, part::overflow};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "scatter_along_axis",
        make: scatter_along_axis,
    },
    Entry {
        op: "scatter_nd",
        make: scatter_nd,
    },
];

/// What becomes of an element and its update, in the order of `Fold` in `scatter.cu`.
const REDUCE: [&str; 5] = ["set", "add", "mul", "max", "min"];

/// Threads that share the places that tuples name, at most: each looks at all tuples.
const THREADS: u64 = 1 << 16;
const MOST_SHARES: u64 = 1024;

/// What is written into a copy of the tensor.
struct Write {
    how: u64,
    dtype: u32,
    bytes: usize,
    ids: u32,
    x: Shape,
    indices: Shape,
}

fn write(call: &Call<'_>, reduce: usize) -> Option<Write> {
    let (x, indices) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let name = call.name(reduce).ok()?;
    let how = REDUCE.iter().position(|known| *known == name)?;
    let write = Write {
        how: how as u64,
        dtype: code(x.dtype)?,
        bytes: x.dtype.block_bytes(),
        ids: index_code(indices.dtype)?,
        x: x.shape.clone(),
        indices: indices.shape.clone(),
    };
    (call.tensor(2).ok()?.dtype == x.dtype).then_some(write)
}

impl Write {
    /// What all of the kernels begin with, after a copy of the tensor.
    fn arguments(&self, cx: &Cx<'_>) -> Result<Arguments, DeviceError> {
        let elements = self.x.elements(cx.rows).ok_or_else(overflow)?;
        let bytes = elements.checked_mul(self.bytes).ok_or_else(overflow)?;
        cx.gpu.copy(cx.output(0)?, cx.input(0)?, bytes)?;
        Ok(Arguments::default()
            .word(cx.output(0)?)
            .word(cx.input(2)?)
            .word(cx.input(1)?)
            .int(self.ids))
    }
}

struct AlongAxis {
    write: Write,
    axis: usize,
}

fn scatter_along_axis(call: &Call<'_>) -> Option<Made> {
    let write = write(call, 1)?;
    let axis = normal_axis(call.int(0).ok()?, write.x.rank())?;
    let fits = write.x.rank() <= AXES;
    fits.then(|| -> Made {
        (
            Box::new(AlongAxis { write, axis }),
            vec!["scatter_along_axis"],
        )
    })
}

impl Kernel for AlongAxis {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let arguments = self.write.arguments(cx)?;
        let (x, indices) = (&self.write.x, &self.write.indices);
        let (x, mut sizes) = (dims_at(x, cx.rows), dims_at(indices, cx.rows));
        let [of_tensor, of_indices] = [contiguous(&x), contiguous(&sizes)];
        let [before, m, after] = around(&sizes, self.axis).ok_or_else(overflow)?;
        let lines = product(&[before, after])?;
        let along = |all: &[i64]| all.get(self.axis).map_or(0, |stride| *stride as u64);
        let n = x.get(self.axis).copied().unwrap_or(0) as u64;
        let mut words = vec![
            self.write.how,
            self.write.dtype.into(),
            self.write.bytes as u64,
            lines,
            m,
            along(&of_indices),
            n,
            along(&of_tensor),
            sizes.len() as u64,
        ];
        if let Some(size) = sizes.get_mut(self.axis) {
            *size = 1;
        }
        words.extend((0..AXES).map(|axis| sizes.get(axis).copied().unwrap_or(1) as u64));
        for strides in [of_indices, of_tensor] {
            let stride = |axis: usize| strides.get(axis).copied().unwrap_or(0);
            words.extend((0..AXES).map(|axis| stride(axis) as u64));
        }
        if m == 0 {
            return Ok(());
        }
        let arguments = arguments.block(&words).word(cx.faults);
        // SAFETY: the kernel's arguments (scatter.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch("scatter_along_axis", grid(lines), &arguments) }
    }
}

struct ScatterNd {
    write: Write,
    width: usize,
}

fn scatter_nd(call: &Call<'_>) -> Option<Made> {
    let write = write(call, 0)?;
    let width = write.indices.inner()?;
    let fits = width <= AXES;
    fits.then(|| -> Made { (Box::new(ScatterNd { write, width }), vec!["scatter_nd"]) })
}

impl Kernel for ScatterNd {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let arguments = self.write.arguments(cx)?;
        let dims = |shape: &Shape| -> Vec<u64> {
            let dims = dims_at(shape, cx.rows);
            dims.into_iter().map(|d| d as u64).collect()
        };
        let (x, indices) = (dims(&self.write.x), dims(&self.write.indices));
        let tuples = indices.split_last().map_or(&[][..], |(_, tuples)| tuples);
        let (sizes, rest) = x.split_at_checked(self.width).ok_or_else(overflow)?;
        let (all, inside) = (product(tuples)?, product(rest)?);
        let places = product(sizes)?.clamp(1, MOST_SHARES);
        let shares = THREADS.checked_div(inside).unwrap_or(1).clamp(1, places);
        let mut words = vec![
            self.write.how,
            self.write.dtype.into(),
            self.write.bytes as u64,
            all,
            self.width as u64,
        ];
        words.extend((0..AXES).map(|axis| sizes.get(axis).copied().unwrap_or(1)));
        words.extend([inside, shares]);
        let arguments = arguments.block(&words).word(cx.faults);
        let threads = product(&[inside, shares])?;
        // SAFETY: the kernel's arguments (scatter.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch("scatter_nd", grid(threads), &arguments) }
    }
}
