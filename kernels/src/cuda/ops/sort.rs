//! Sorting along an axis.

use hotcell_graph::{Shape, op::Call, op::rules::normal_axis, shape::Dim};

use super::{
    Cx, Entry, Kernel, Made,
    layout::{around, code, dims_at, grid_of},
};
use crate::{backend::DeviceError, cuda::gpu::Arguments, part::overflow};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "sort",
        make: sort,
    },
    Entry {
        op: "argsort",
        make: argsort,
    },
    Entry {
        op: "topk",
        make: topk,
    },
];

/// Elements of a line that is sorted as a whole at most (`MOST` in `sort.cu`); longer ones run on the processor.
const MOST: usize = 2048;

/// So many are taken of a longer line one after the other; more run on the processor.
const FEW: usize = 128;

struct Sort {
    name: &'static str,
    dtype: u32,
    bytes: usize,
    x: Shape,
    axis: usize,
    count: usize,
    descending: bool,
    /// Which results there are: sorted values, and their places.
    results: [Option<usize>; 2],
}

fn sorted(
    call: &Call<'_>,
    axis: i64,
    descending: bool,
    count: Option<usize>,
    results: [Option<usize>; 2],
) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let axis = normal_axis(axis, x.shape.rank())?;
    let Some(Dim::Fixed(n)) = x.shape.dims().get(axis) else {
        return None;
    };
    let count = count.unwrap_or(*n).min(*n);
    let name = match *n <= MOST {
        true => "sort_lines",
        false if count <= FEW && u32::try_from(*n).is_ok() => "first_of_lines",
        false => return None,
    };
    let kernel = Sort {
        name,
        dtype: code(x.dtype)?,
        bytes: x.dtype.block_bytes(),
        x: x.shape.clone(),
        axis,
        count,
        descending,
        results,
    };
    Some((Box::new(kernel), vec![name]))
}

fn sort(call: &Call<'_>) -> Option<Made> {
    let (axis, descending) = (call.int(0).ok()?, call.bool(1).ok()?);
    sorted(call, axis, descending, None, [Some(0), None])
}

fn argsort(call: &Call<'_>) -> Option<Made> {
    let (axis, descending) = (call.int(0).ok()?, call.bool(1).ok()?);
    sorted(call, axis, descending, None, [None, Some(0)])
}

fn topk(call: &Call<'_>) -> Option<Made> {
    let count = usize::try_from(call.int(0).ok()?).ok()?;
    let (axis, largest) = (call.int(1).ok()?, call.bool(2).ok()?);
    sorted(call, axis, largest, Some(count), [Some(0), Some(1)])
}

impl Kernel for Sort {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let sizes = around(&dims_at(&self.x, cx.rows), self.axis);
        let [outer, n, k] = sizes.ok_or_else(overflow)?;
        let lines = outer.checked_mul(k).ok_or_else(overflow)?;
        if lines == 0 || self.count == 0 {
            return Ok(());
        }
        let [values, places] = self
            .results
            .map(|result| result.map_or(Ok(0), |at| cx.output(at)));
        let arguments = Arguments::default()
            .word(values?)
            .word(places?)
            .word(cx.input(0)?)
            .block(&[
                self.dtype.into(),
                self.bytes as u64,
                outer,
                n,
                k,
                self.count as u64,
                if self.descending { u64::MAX } else { 0 },
            ]);
        // SAFETY: the kernel's arguments (sort.cu), of tensors of these shapes; a line is no longer than it takes.
        unsafe { cx.gpu.launch(self.name, grid_of(lines), &arguments) }
    }
}
