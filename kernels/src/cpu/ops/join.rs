//! Putting tensors together.

use hotcell_graph::{
    Dim,
    op::{Call, ValueSpec, rules::normal_axis},
};

use super::{
    Entry,
    movement::{Move, plain, result},
    strided::strides,
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "concat",
    supports: equal_dtypes,
    launch: concat,
}];

fn equal_dtypes(call: &Call<'_>) -> bool {
    let mut dtypes = call.inputs.iter().map(|i| match i {
        ValueSpec::Tensor(t) => Some(t.dtype),
        _ => None,
    });
    let first = dtypes.next().flatten();
    first.is_some() && plain(call) && dtypes.all(|d| d == first)
}

/// One step, because the copies do not wait for each other.
struct Concat(Vec<Move>);

impl Kernel for Concat {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        for each in &self.0 {
            // SAFETY: the caller's promise; the copies write different parts of the result.
            unsafe { each.run(run, part, parts) };
        }
    }
}

fn concat(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[out] = outs else {
        return Err(unsupported(call));
    };
    let (dtype, shape) = result(call)?;
    let axis = normal_axis(call.int(0)?, shape.rank()).ok_or_else(|| unsupported(call))?;
    let to = strides(&shape);
    let mut moves = Vec::with_capacity(ins.len());
    let mut before = 0isize;
    for (i, &x) in ins.iter().enumerate() {
        let mut copy = Move::whole(x, out, dtype.block_bytes(), &call.tensor(i)?.shape);
        for (a, to) in copy.axes.iter_mut().zip(&to) {
            a.2 = *to;
        }
        copy.to = before * to[axis];
        before += match copy.axes.get(axis) {
            Some((Dim::Fixed(n), ..)) => *n as isize,
            // Only a single tensor can have its rows here.
            _ if ins.len() == 1 => 0,
            _ => return Err(unsupported(call)),
        };
        moves.push(copy);
    }
    launcher.step_with_bytes(Concat(moves), ins, &[out]);
    Ok(())
}
