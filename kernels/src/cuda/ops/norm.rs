//! Norms of rows.

use hotcell_graph::{DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made};
use crate::{
    backend::DeviceError,
    cuda::gpu::{Arguments, Grid},
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "layer_norm",
        make: layer_norm,
    },
    Entry {
        op: "rms_norm",
        make: rms_norm,
    },
];

/// A norm over the innermost axis, of f32.
struct Norm {
    name: &'static str,
    x: Shape,
    n: u32,
    /// Of the optional inputs: whether they are given.
    given: Vec<bool>,
    eps: f32,
}

fn norm(call: &Call<'_>, name: &'static str) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let mut given = Vec::new();
    for i in 1..call.inputs.len() {
        let vector = call.optional(i).ok()?;
        if vector.is_some_and(|v| v.dtype != DType::F32) {
            return None;
        }
        given.push(vector.is_some());
    }
    let n = i32::try_from(x.shape.inner()?).ok().filter(|n| *n > 0)?;
    let kernel = Norm {
        name,
        x: x.shape.clone(),
        n: n.unsigned_abs(),
        given,
        eps: call.float(0).ok()? as f32,
    };
    (x.dtype == DType::F32).then(|| -> Made { (Box::new(kernel), vec![name]) })
}

fn layer_norm(call: &Call<'_>) -> Option<Made> {
    norm(call, "layer_norm_f32")
}

fn rms_norm(call: &Call<'_>) -> Option<Made> {
    norm(call, "rms_norm_f32")
}

impl Kernel for Norm {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let elements = self.x.elements(cx.rows).ok_or_else(overflow)?;
        let rows = elements / self.n as usize;
        let grid = Grid {
            blocks: [u32::try_from(rows).map_err(|_| overflow())?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let mut arguments = Arguments::default().word(cx.input(0)?);
        for (i, given) in self.given.iter().enumerate() {
            arguments = arguments.word(if *given { cx.input(i + 1)? } else { 0 });
        }
        let arguments = arguments
            .word(cx.output(0)?)
            .int(self.n)
            .int(self.eps.to_bits());
        // SAFETY: the kernel's arguments (norm.cu), of tensors of so many rows.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}
