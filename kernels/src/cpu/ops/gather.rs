//! Giving parts to the other members of a communicator.

use std::sync::Arc;

use hotcell_graph::{
    Dim, TensorSpec,
    op::{Attribute, Call},
};

use super::{Entry, unsupported};
use crate::{
    backend::DeviceError,
    communicator::Communicator,
    cpu::{
        NAME,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "all_gather",
    supports: of_several,
    launch: all_gather,
}];

fn of_several(call: &Call<'_>) -> bool {
    matches!(call.attributes, &[Attribute::Int(members)] if members > 1)
}

struct AllGather {
    x: Reg,
    out: Reg,
    spec: TensorSpec,
    width: usize,
    communicator: Arc<Communicator>,
}

impl Kernel for AllGather {
    unsafe fn run(&self, run: &Run<'_>, part: usize, _: usize) {
        // One thread meets the other processes; the others of this one wait for it at the next step.
        if part != 0 || self.width == 0 {
            return;
        }
        let rows = self.spec.bytes(run.rows).unwrap_or(0) / self.width;
        // SAFETY: both places have the sizes of their specs, and nobody else uses the result.
        let gathered = unsafe {
            let (mine, all) = (run.pointer(self.x), run.pointer(self.out));
            self.communicator.all_gather(mine, all, rows, self.width)
        };
        if let Err(error) = gathered {
            run.fail(error);
        }
    }
}

fn all_gather(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let spec = call.tensor(0)?;
    let members = usize::try_from(call.int(0)?).unwrap_or(0);
    let communicator = launcher.communicator.clone();
    let Some(communicator) = communicator.filter(|c| c.share().members == members) else {
        return Err(DeviceError::Unsupported {
            backend: NAME,
            op: call.op.name,
            why: format!("the device is not one of {members} that execute this graph together"),
        });
    };
    let width = match spec.shape.dims().last() {
        Some(Dim::Fixed(n)) => n.checked_mul(spec.dtype.block_bytes()),
        _ => None,
    };
    let width = width.ok_or_else(|| unsupported(call))?;
    let kernel = AllGather {
        x,
        out,
        spec: spec.clone(),
        width,
        communicator,
    };
    launcher.step(kernel, &[x], &[out]);
    Ok(())
}
