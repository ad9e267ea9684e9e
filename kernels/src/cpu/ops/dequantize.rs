//! Casts from block types: whole rows are dequantised.

use hotcell_graph::{
    DType, Shape,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::{dequantize_row, is_weight_dtype},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for: the casts that are not elementwise.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "cast",
    supports: fits,
    launch: dequantize,
}];

/// Elements below which one thread does it all.
const WORTH: usize = 4096;

struct Dequantize {
    x: Reg,
    out: Reg,
    dtype: DType,
    shape: Shape,
}

fn fits(call: &Call<'_>) -> bool {
    let [ValueSpec::Tensor(x)] = call.inputs else {
        return false;
    };
    x.dtype.is_block() && is_weight_dtype(x.dtype) && call.dtype(0).is_ok_and(|to| to == DType::F32)
}

impl Kernel for Dequantize {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.shape.elements(run.rows).unwrap_or(0);
        let block = self.dtype.block_len();
        let range = split_if_worth(n, block, WORTH, part, parts);
        let (first, last) = (range.start / block, range.end / block);
        let size = self.dtype.block_bytes();
        // SAFETY: sizes as the specs say, and rows are whole blocks; bytes have no alignment; parts write ranges of their own.
        let (x, out) = unsafe {
            (
                run.slice::<u8>(self.x, n / block * size),
                run.slice_mut::<f32>(self.out, range),
            )
        };
        if !out.is_empty() {
            dequantize_row(self.dtype, &x[first * size..last * size], out);
        }
    }
}

fn dequantize(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let ([ValueSpec::Tensor(x)], &[from], &[out]) = (call.inputs, ins, outs) else {
        return Err(unsupported(call));
    };
    let kernel = Dequantize {
        x: from,
        out,
        dtype: x.dtype,
        shape: x.shape.clone(),
    };
    launcher.step_with_bytes(kernel, &[from], &[out]);
    Ok(())
}
