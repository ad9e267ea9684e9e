//! Casts from and to block types: runs of whole blocks are dequantised, or encoded.

use std::ops::Range;

use hotcell_graph::{
    DType, Shape, TensorSpec,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::{dequantize_row, is_decoded},
        encode::encode_row,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for: the casts that are not elementwise.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "cast",
    supports: |call| way(call).is_some(),
    launch: blocks,
}];

/// Elements below which one thread does it all.
const WORTH: usize = 4096;

enum Way {
    Decode,
    Encode,
}

struct Blocks {
    way: Way,
    x: Reg,
    out: Reg,
    /// The block type.
    dtype: DType,
    shape: Shape,
}

/// Which way a cast goes, and the block type.
fn way<'a>(call: &Call<'a>) -> Option<(Way, DType, &'a TensorSpec)> {
    let [ValueSpec::Tensor(x)] = call.inputs else {
        return None;
    };
    match (x.dtype, call.dtype(0).ok()?) {
        (from, DType::F32) if from.is_block() && is_decoded(from) => Some((Way::Decode, from, x)),
        (DType::F32, to) if to.is_encoded() => Some((Way::Encode, to, x)),
        _ => None,
    }
}

impl Kernel for Blocks {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.shape.elements(run.rows).unwrap_or(0);
        let (block, size) = (self.dtype.block_len(), self.dtype.block_bytes());
        let range = split_if_worth(n, block, WORTH, part, parts);
        if range.is_empty() {
            return;
        }
        let bytes = Range {
            start: range.start / block * size,
            end: range.end / block * size,
        };
        // SAFETY: sizes as the specs say, and the last axis is whole blocks; bytes have no alignment; parts write ranges of
        // their own.
        unsafe {
            match self.way {
                Way::Decode => {
                    let x = &run.slice::<u8>(self.x, n / block * size)[bytes];
                    dequantize_row(self.dtype, x, run.slice_mut::<f32>(self.out, range));
                }
                Way::Encode => {
                    let x = &run.slice::<f32>(self.x, n)[range];
                    encode_row(self.dtype, x, run.slice_mut::<u8>(self.out, bytes));
                }
            }
        }
    }
}

fn blocks(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some((way, dtype, spec)), &[x], &[out]) = (way(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let decodes = matches!(way, Way::Decode);
    let kernel = Blocks {
        way,
        x,
        out,
        dtype,
        shape: spec.shape.clone(),
    };
    // Blocks have no alignment, floats do.
    match decodes {
        true => launcher.step_with_bytes(kernel, &[x], &[out]),
        false => launcher.step(kernel, &[x], &[out]),
    }
    Ok(())
}
