//! What is made of nothing.

use std::cell::OnceCell;

use hotcell_graph::op::Call;

use super::{
    Cx, Entry, Kernel, Made,
    layout::{code, grid},
};
use crate::{
    backend::DeviceError,
    cuda::{buffer::Memory, gpu::Arguments},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "arange",
        make: arange,
    },
    Entry {
        op: "literal",
        make: literal,
    },
];

/// Bytes of the graph, copied within the device from where they are put at the first launch.
struct Literal {
    bytes: Vec<u8>,
    there: OnceCell<Memory>,
}

fn literal(call: &Call<'_>) -> Option<Made> {
    let kernel = Literal {
        bytes: call.bytes(2).ok()?.to_vec(),
        there: OnceCell::new(),
    };
    Some((Box::new(kernel), vec![]))
}

impl Kernel for Literal {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let there = match self.there.get() {
            Some(there) => there.start(),
            None => {
                let memory = Memory::of(cx.gpu, "a literal", &self.bytes, false)?;
                self.there.get_or_init(|| memory).start()
            }
        };
        cx.gpu.copy(cx.output(0)?, there, self.bytes.len())
    }
}

/// Numbers one after another.
struct Arange {
    dtype: u32,
    start: f64,
    step: f64,
    n: u64,
}

fn arange(call: &Call<'_>) -> Option<Made> {
    let kernel = Arange {
        dtype: code(call.dtype(3).ok()?)?,
        start: call.float(0).ok()?,
        step: call.float(1).ok()?,
        n: u64::try_from(call.int(2).ok()?).ok()?,
    };
    Some((Box::new(kernel), vec!["arange"]))
}

impl Kernel for Arange {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let arguments = Arguments::default()
            .int(self.dtype)
            .word(cx.output(0)?)
            .word(self.start.to_bits())
            .word(self.step.to_bits())
            .word(self.n);
        // SAFETY: the kernel's arguments (generic_cast.cu), of a result of so many elements.
        unsafe { cx.gpu.launch("arange", grid(self.n), &arguments) }
    }
}
