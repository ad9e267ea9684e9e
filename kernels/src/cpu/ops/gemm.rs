//! Products of activations as one step.

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        gemm::{Gemm, Grid, Operands, Unit, is_gemm_dtype},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "matmul",
    supports: fits,
    launch: matmul,
}];

/// An axis before the last two.
#[derive(Clone, Copy)]
struct Axis {
    size: Dim,
    /// Whether the operand has it, or repeats along it.
    in_a: bool,
    in_b: bool,
}

/// The shapes of a call.
#[derive(Clone)]
struct Sizes {
    dtype: DType,
    /// Outermost first.
    batch: Vec<Axis>,
    /// Their product is the number of rows of `a`.
    m: Vec<Dim>,
    n: usize,
    k: usize,
}

impl Sizes {
    /// Products, and the size of each, for so many rows.
    fn at(&self, rows: usize) -> (usize, Gemm) {
        let product = |dims: &mut dyn Iterator<Item = Dim>| -> usize {
            dims.fold(1, |n, d| n.saturating_mul(d.at(rows)))
        };
        let gemm = Gemm {
            dtype: self.dtype,
            m: product(&mut self.m.iter().copied()),
            n: self.n,
            k: self.k,
        };
        (product(&mut self.batch.iter().map(|axis| axis.size)), gemm)
    }

    /// Which matrices of `a` and `b` make product `i`.
    fn matrices(&self, mut i: usize, rows: usize) -> (usize, usize) {
        let (mut a, mut b, mut stride_a, mut stride_b) = (0, 0, 1, 1);
        for axis in self.batch.iter().rev() {
            let size = axis.size.at(rows);
            let at = i % size;
            i /= size;
            if axis.in_a {
                a += at * stride_a;
                stride_a *= size;
            }
            if axis.in_b {
                b += at * stride_b;
                stride_b *= size;
            }
        }
        (a, b)
    }
}

/// Both of one dtype, with two axes or more.
fn sizes_of(call: &Call<'_>) -> Option<Sizes> {
    let [ValueSpec::Tensor(a), ValueSpec::Tensor(b)] = call.inputs else {
        return None;
    };
    let ([before_a @ .., m, Dim::Fixed(k)], [before_b @ .., _, Dim::Fixed(n)]) =
        (a.shape.dims(), b.shape.dims())
    else {
        return None;
    };
    if a.dtype != b.dtype || !is_gemm_dtype(a.dtype) {
        return None;
    }
    let sizes = |batch, m| Sizes {
        dtype: a.dtype,
        batch,
        m,
        n: *n,
        k: *k,
    };
    if before_b.iter().all(|d| *d == Dim::Fixed(1)) {
        // One matrix for all rows: they are the rows of one product.
        return Some(sizes(vec![], [before_a, &[*m]].concat()));
    }
    let rank = before_a.len().max(before_b.len());
    let axis = |dims: &[Dim], i: usize| {
        let i = (i + dims.len()).checked_sub(rank);
        i.and_then(|i| dims.get(i).copied())
            .unwrap_or(Dim::Fixed(1))
    };
    let batch = (0..rank).map(|i| {
        let (a, b) = (axis(before_a, i), axis(before_b, i));
        let one = Dim::Fixed(1);
        Axis {
            size: if a == one { b } else { a },
            in_a: a != one,
            in_b: b != one,
        }
    });
    Some(sizes(batch.collect(), vec![*m]))
}

fn fits(call: &Call<'_>) -> bool {
    sizes_of(call).is_some()
}

struct Product {
    a: Reg,
    b: Reg,
    out: Reg,
    scratch: Reg,
    /// Scratch bytes of one part.
    room: usize,
    sizes: Sizes,
}

impl Kernel for Product {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (batch, gemm) = self.sizes.at(run.rows);
        let Gemm { dtype, m, n, k } = gemm;
        let bytes = dtype.block_bytes();
        for unit in Grid::of(batch, m, n, k, parts)
            .units(part)
            .flat_map(Unit::pieces)
        {
            if run.stopped() {
                return;
            }
            let (a, b) = self.sizes.matrices(unit.batch, run.rows);
            // SAFETY: sizes as the specs say, so every matrix lies within its operand; units share no
            // result and parts no scratch.
            unsafe {
                let at = Operands {
                    a: run.pointer(self.a).add(a * m * k * bytes),
                    b: run.pointer(self.b).add(b * k * n * bytes),
                    out: run.pointer(self.out).add(unit.batch * m * n * bytes),
                };
                let scratch = run.pointer(self.scratch).add(part * self.room);
                gemm.run(run.path, at, unit.rows, unit.columns, scratch);
            }
        }
    }
}

fn matmul(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(sizes), &[a, b], &[out]) = (sizes_of(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let (_, largest) = sizes.at(launcher.max_rows);
    let room = largest.scratch_bytes().next_multiple_of(64);
    let scratch = launcher.scratch(room.saturating_mul(launcher.parts));
    if sizes.dtype == DType::C64 {
        launcher.aligned(a);
        launcher.aligned(b);
    }
    let kernel = Product {
        a,
        b,
        out,
        scratch,
        room,
        sizes,
    };
    launcher.step_with_bytes(kernel, &[a, b], &[out, scratch]);
    Ok(())
}
