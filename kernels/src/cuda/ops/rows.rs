//! Rows of tables, and casts of block types to f32, which are all rows in turn.

use hotcell_graph::{DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made, int};
use crate::{
    backend::DeviceError,
    cuda::gpu::{Arguments, Grid},
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "get_rows",
        make: get_rows,
    },
    Entry {
        op: "cast",
        make: cast,
    },
];

struct GetRows {
    name: &'static str,
    n: usize,
    k: usize,
    /// None: all rows in turn.
    indices: Option<Shape>,
}

/// The kernel that reads rows of this dtype.
fn name_of(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "get_rows_f32",
        DType::F16 => "get_rows_f16",
        DType::BF16 => "get_rows_bf16",
        DType::F8E4M3 => "get_rows_f8_e4m3",
        DType::Q8_0 => "get_rows_q8_0",
        DType::Q4_0 => "get_rows_q4_0",
        DType::Q4_1 => "get_rows_q4_1",
        DType::Q5_0 => "get_rows_q5_0",
        DType::Q5_1 => "get_rows_q5_1",
        DType::MXFP4 => "get_rows_mxfp4",
        DType::NVFP4 => "get_rows_nvfp4",
        DType::Q4K => "get_rows_q4_k",
        DType::Q5K => "get_rows_q5_k",
        DType::Q6K => "get_rows_q6_k",
        _ => return None,
    })
}

fn cast(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    if !x.dtype.is_block() || call.dtype(0).ok()? != DType::F32 || x.shape.is_symbolic() {
        return None;
    }
    let k = x.shape.inner().filter(|k| *k > 0)?;
    let kernel = GetRows {
        name: name_of(x.dtype)?,
        n: x.shape.elements(0)? / k,
        k,
        indices: None,
    };
    int(kernel.n).and_then(|_| int(kernel.k)).ok()?;
    let names = vec![kernel.name];
    Some((Box::new(kernel), names))
}

fn get_rows(call: &Call<'_>) -> Option<Made> {
    let (table, indices) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let name = name_of(table.dtype)?;
    let [n, k] = table.shape.dims() else {
        return None;
    };
    // A table that has as many rows as the execution is not one of weights.
    if table.shape.is_symbolic() || indices.dtype != DType::I32 {
        return None;
    }
    let kernel = GetRows {
        name,
        n: n.at(0),
        k: k.at(0),
        indices: Some(indices.shape.clone()),
    };
    int(kernel.n).and_then(|_| int(kernel.k)).ok()?;
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for GetRows {
    fn reads_indices(&self) -> bool {
        self.indices.is_some()
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let (rows, indices) = match &self.indices {
            Some(indices) => {
                let rows = indices.elements(cx.rows).ok_or_else(overflow)?;
                (rows, cx.input(1)?)
            }
            None => (self.n, 0),
        };
        if rows == 0 {
            return Ok(());
        }
        let grid = Grid {
            blocks: [int(rows)?, int(self.k.div_ceil(4096).clamp(1, 64))?, 1],
            threads: [64, 1, 1],
            shared: 0,
        };
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(indices)
            .word(cx.output(0)?)
            .int(int(self.n)?)
            .int(int(self.k)?)
            .word(cx.faults);
        // SAFETY: the kernel's arguments (rows.cu), of a table of this size.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}
