//! Drawing tokens of rows of logits.

use hotcell_graph::{Shape, op::Call, shape::Dim};

use super::{Cx, Entry, Kernel, Made, int};
use crate::{
    backend::DeviceError,
    cpu::draw::MOST_ON_DEVICES,
    cuda::gpu::{Arguments, Grid},
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "draw",
    make: draw,
}];

struct Draw {
    logits: Shape,
    n: usize,
    /// Whether not all tokens are left.
    has_limits: bool,
}

fn draw(call: &Call<'_>) -> Option<Made> {
    let logits = call.tensor(0).ok()?.shape.clone();
    let Some(&Dim::Fixed(n)) = logits.dims().last() else {
        return None;
    };
    let has_limits = call.optional(3).ok()?.is_some();
    let kernel = Draw {
        logits,
        n,
        has_limits,
    };
    let name = kernel.name();
    // So many runs has `sample.cu` room for (`RUNS`).
    (n <= MOST_ON_DEVICES).then(|| (Box::new(kernel) as _, vec![name]))
}

impl Draw {
    fn name(&self) -> &'static str {
        match self.has_limits {
            false => "draw_f32",
            true => "draw_among_f32",
        }
    }
}

impl Kernel for Draw {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let all = self.logits.elements(cx.rows).ok_or_else(overflow)?;
        let rows = all / self.n.max(1);
        if rows == 0 {
            return Ok(());
        }
        let grid = Grid {
            blocks: [int(rows)?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.input(2)?);
        let arguments = match self.has_limits {
            false => arguments,
            true => arguments.word(cx.input(3)?),
        };
        let arguments = arguments.word(cx.output(0)?).int(int(self.n)?);
        // SAFETY: the kernel's arguments (sample.cu), of tensors of these shapes, with a block for each row.
        unsafe { cx.gpu.launch(self.name(), grid, &arguments) }
    }
}
