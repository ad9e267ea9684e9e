//! Softmax of rows, and its logarithm.

use hotcell_graph::{DType, Shape, op::Call, op::rules::normal_axis};

use super::{Cx, Entry, Kernel, Made, int};
use crate::{
    backend::DeviceError,
    cuda::gpu::{Arguments, Grid},
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "softmax",
        make: softmax,
    },
    Entry {
        op: "log_softmax",
        make: softmax,
    },
];

/// Over the innermost axis, whose elements lie close together.
struct Softmax {
    name: &'static str,
    x: Shape,
    n: usize,
    log: bool,
}

fn softmax(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let name = match x.dtype {
        DType::F32 => "softmax_f32",
        DType::F16 => "softmax_f16",
        DType::BF16 => "softmax_bf16",
        _ => return None,
    };
    let axis = normal_axis(call.int(0).ok()?, x.shape.rank())?;
    let n = x.shape.inner().filter(|n| *n > 0)?;
    int(n).ok()?;
    let kernel = Softmax {
        name,
        x: x.shape.clone(),
        n,
        log: call.op.name == "log_softmax",
    };
    // Over other axes it decomposes.
    (axis + 1 == x.shape.rank()).then(|| -> Made { (Box::new(kernel), vec![name]) })
}

impl Kernel for Softmax {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.x.elements(cx.rows).ok_or_else(overflow)? / self.n;
        let grid = Grid {
            blocks: [int(rows)?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.output(0)?)
            .int(int(self.n)?)
            .int(self.log.into());
        // SAFETY: the kernel's arguments (softmax.cu), of tensors of so many rows.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}
