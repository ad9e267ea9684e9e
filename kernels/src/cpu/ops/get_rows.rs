//! Reading rows of a table.

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, stays, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::{dequantize_row, is_decoded},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "get_rows",
    supports: fits,
    launch: get_rows,
}];

/// Numbers that are worth sharing out.
const WORTH: usize = 4096;

struct Take {
    table: Reg,
    indices: Reg,
    out: Reg,
    dtype: DType,
    n: usize,
    k: usize,
    row_bytes: usize,
    /// Number of indices; `Rows` of the execution where symbolic.
    count: Dim,
}

fn parts_of(call: &Call<'_>) -> Option<(DType, usize, usize, Dim)> {
    let [ValueSpec::Tensor(table), ValueSpec::Tensor(indices)] = call.inputs else {
        return None;
    };
    match (table.shape.dims(), indices.shape.dims()) {
        (&[Dim::Fixed(n), Dim::Fixed(k)], &[count]) => Some((table.dtype, n, k, count)),
        _ => None,
    }
}

/// Tables of a fixed number of rows.
fn fits(call: &Call<'_>) -> bool {
    parts_of(call).is_some_and(|(dtype, ..)| is_decoded(dtype))
}

impl Kernel for Take {
    fn is_alone(&self, rows: usize) -> bool {
        stays(self.count.at(rows) * self.k, self.k.max(1), WORTH)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let count = self.count.at(run.rows);
        let range = split_if_worth(count * self.k, self.k.max(1), WORTH, part, parts);
        // SAFETY: sizes as the specs say; bytes have no alignment; parts write rows of their own.
        let (table, indices, out) = unsafe {
            (
                run.slice::<u8>(self.table, self.n * self.row_bytes),
                run.slice::<i32>(self.indices, count),
                run.slice_mut::<f32>(self.out, range.clone()),
            )
        };
        if self.k == 0 {
            return;
        }
        let first = range.start / self.k;
        for (i, row) in out.chunks_exact_mut(self.k).enumerate() {
            let index = indices[first + i];
            let Some(at) = usize::try_from(index).ok().filter(|at| *at < self.n) else {
                run.index_out_of_range("get_rows", index.into(), self.n);
                row.fill(0.0);
                continue;
            };
            dequantize_row(
                self.dtype,
                &table[at * self.row_bytes..][..self.row_bytes],
                row,
            );
        }
    }
}

fn get_rows(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some((dtype, n, k, count)), &[table, indices], &[out]) = (parts_of(call), ins, outs)
    else {
        return Err(unsupported(call));
    };
    let row_bytes = dtype.row_bytes(k).ok_or_else(|| unsupported(call))?;
    let kernel = Take {
        table,
        indices,
        out,
        dtype,
        n,
        k,
        row_bytes,
        count,
    };
    launcher.aligned(indices);
    launcher.step_with_bytes(kernel, &[table, indices], &[out]);
    Ok(())
}
