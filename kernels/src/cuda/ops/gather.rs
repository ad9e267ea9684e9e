//! Giving parts to the other members of a communicator, from device to device (`gather.cu`).

use std::rc::Rc;

use hotcell_graph::{
    TensorSpec,
    op::{Attribute, Call},
    shape::Dim,
};

use super::{Cx, Kernel};
use crate::{
    backend::DeviceError,
    cuda::peers::{Peers, SLOT},
    part::overflow,
};

/// The op.
pub(super) const OP: &str = "all_gather";

struct Gather {
    peers: Rc<Peers>,
    spec: TensorSpec,
    /// Bytes of a row.
    width: usize,
}

/// The kernel for a call, where the members are those who are to give each other parts, and there is something to give.
pub(super) fn kernel(call: &Call<'_>, peers: &Rc<Peers>) -> Option<Box<dyn Kernel>> {
    let &[Attribute::Int(members)] = call.attributes else {
        return None;
    };
    if usize::try_from(members) != Ok(peers.share.members) {
        return None;
    }
    let spec = call.tensor(0).ok()?.clone();
    let &Dim::Fixed(last) = spec.shape.dims().last()? else {
        return None;
    };
    let width = spec.dtype.row_bytes(last).filter(|width| *width > 0)?;
    let peers = Rc::clone(peers);
    Some(Box::new(Gather { peers, spec, width }))
}

impl Kernel for Gather {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let total = self.spec.bytes(cx.rows).ok_or_else(overflow)?;
        let (mine, all) = (cx.input(0)?, cx.output(0)?);
        for at in (0..total).step_by(SLOT) {
            let bytes = SLOT.min(total - at);
            self.peers.give(cx.gpu, mine + at as u64, bytes)?;
            self.peers.take(cx.gpu, all, (at, bytes), self.width)?;
        }
        Ok(())
    }
}
