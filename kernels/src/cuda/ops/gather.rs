//! Giving parts to the other members of a communicator, from device to device (`gather.cu`).

use std::rc::Rc;

use hotcell_graph::{
    TensorSpec,
    op::{Attribute, Call},
    shape::Dim,
};

use super::{Cx, Kernel, int};
use crate::{
    backend::DeviceError,
    cuda::{
        gpu::{Arguments, Grid},
        peers::{Peers, SLOT},
    },
    part::overflow,
};

/// Threads of a block, and bytes that one of them copies before there is another block.
const THREADS: u32 = 256;
const EACH: usize = 64;

/// Blocks at most: of those that wait, fewer than a device has processors.
const MOST_BLOCKS: usize = 64;

/// The op, and what its kernels are called.
pub(super) const OP: &str = "all_gather";
pub(super) const NAMES: [&str; 2] = ["give_part", "take_parts"];

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

fn grid(bytes: usize, receivers: usize) -> Result<Grid, DeviceError> {
    let blocks = bytes.div_ceil(THREADS as usize * EACH);
    Ok(Grid {
        blocks: [int(blocks.clamp(1, MOST_BLOCKS))?, int(receivers)?, 1],
        threads: [THREADS, 1, 1],
        shared: 0,
    })
}

impl Kernel for Gather {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let total = self.spec.bytes(cx.rows).ok_or_else(overflow)?;
        let (mine, all) = (cx.input(0)?, cx.output(0)?);
        let share = self.peers.share;
        let (members, rank) = (int(share.members)?, int(share.rank)?);
        for at in (0..total).step_by(SLOT) {
            let bytes = SLOT.min(total - at);
            let give = Arguments::default()
                .block(&self.peers.areas)
                .word(mine + at as u64)
                .word(bytes as u64)
                .word(SLOT as u64)
                .int(members)
                .int(rank);
            let take = Arguments::default()
                .block(&self.peers.areas)
                .word(all)
                .word(at as u64)
                .word(bytes as u64)
                .word(self.width as u64)
                .word(SLOT as u64)
                .int(members)
                .int(rank);
            let [giving, taking] = NAMES;
            let everyone = bytes.saturating_mul(share.members);
            // SAFETY: the kernels' arguments (gather.cu): so many bytes of the input, which fit into a slot of each area,
            // and as many of each member in the output.
            unsafe {
                cx.gpu.launch(giving, grid(bytes, share.members)?, &give)?;
                cx.gpu.launch(taking, grid(everyone, 1)?, &take)?;
            }
        }
        Ok(())
    }
}
