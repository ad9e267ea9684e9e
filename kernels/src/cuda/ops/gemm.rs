//! Products of activations.

use hotcell_graph::{DType, op::Call, shape::Dim};

use super::{Cx, Entry, Kernel, Made, layout::grid_of};
use crate::{backend::DeviceError, cuda::gpu::Arguments, part::overflow};

pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "matmul",
    make: matmul,
}];

/// Axes before the last two that the kernel takes.
const AXES: usize = 8;

/// Rows and columns of a tile (`ROWS` and `COLUMNS` in `gemm.cu`).
const TILE: [u64; 2] = [32, 64];

/// An axis before the last two.
struct Axis {
    size: Dim,
    /// Whether the operand has it, or repeats along it.
    in_a: bool,
    in_b: bool,
}

struct Matmul {
    name: &'static str,
    batch: Vec<Axis>,
    /// Their product is the number of rows of a matrix.
    m: Vec<Dim>,
    n: u64,
    k: u64,
}

fn matmul(call: &Call<'_>) -> Option<Made> {
    let (a, b) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let name = match a.dtype {
        DType::F32 => "matmul_f32",
        DType::F16 => "matmul_f16",
        DType::BF16 => "matmul_bf16",
        DType::F64 => "matmul_f64",
        _ => return None,
    };
    // The rest decomposes into such.
    let ([before_a @ .., m, Dim::Fixed(k)], [before_b @ .., _, Dim::Fixed(n)]) =
        (a.shape.dims(), b.shape.dims())
    else {
        return None;
    };
    let one = Dim::Fixed(1);
    let (batch, m) = match before_b.iter().all(|dim| *dim == one) {
        // One matrix for all rows: they are the rows of one product.
        true => (vec![], [before_a, &[*m]].concat()),
        false => {
            let rank = before_a.len().max(before_b.len());
            let axis = |dims: &[Dim], i: usize| {
                let at = (i + dims.len()).checked_sub(rank);
                at.and_then(|at| dims.get(at).copied()).unwrap_or(one)
            };
            let batch = (0..rank).map(|i| {
                let (a, b) = (axis(before_a, i), axis(before_b, i));
                Axis {
                    size: if a == one { b } else { a },
                    in_a: a != one,
                    in_b: b != one,
                }
            });
            (batch.collect(), vec![*m])
        }
    };
    let kernel = Matmul {
        name,
        batch,
        m,
        n: u64::try_from(*n).ok()?,
        k: u64::try_from(*k).ok()?,
    };
    let fits = a.dtype == b.dtype && kernel.batch.len() <= AXES;
    fits.then(|| -> Made { (Box::new(kernel), vec![name]) })
}

fn product(mut dims: impl Iterator<Item = Dim>, rows: usize) -> Result<u64, DeviceError> {
    let n = dims.try_fold(1u64, |n, dim| n.checked_mul(dim.at(rows) as u64));
    n.ok_or_else(overflow)
}

impl Kernel for Matmul {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let products = product(self.batch.iter().map(|axis| axis.size), cx.rows)?;
        let m = product(self.m.iter().copied(), cx.rows)?;
        let mut words = vec![m, self.n, self.k, products, self.batch.len() as u64];
        let axis = |i: usize| self.batch.get(i);
        words.extend((0..AXES).map(|i| axis(i).map_or(1, |axis| axis.size.at(cx.rows) as u64)));
        words.extend((0..AXES).map(|i| u64::from(axis(i).is_some_and(|axis| axis.in_a))));
        words.extend((0..AXES).map(|i| u64::from(axis(i).is_some_and(|axis| axis.in_b))));
        let [down, across] = [m.div_ceil(TILE[0]), self.n.div_ceil(TILE[1])];
        let tiles = products
            .checked_mul(down)
            .and_then(|n| n.checked_mul(across));
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.output(0)?)
            .block(&words);
        let grid = grid_of(tiles.ok_or_else(overflow)?);
        // SAFETY: the kernel's arguments (gemm.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}
