//! Linear algebra, a matrix at a time: each is read into f64, and what belongs to it is rounded once.

mod factors;

use hotcell_graph::{DType, Dim, op::Call, op::ValueSpec};

use self::factors::{Matrix, Of};
use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    entry("cholesky"),
    entry("qr"),
    entry("lu"),
    entry("det"),
    entry("solve"),
    entry("solve_triangular"),
    entry("svd"),
    entry("eigh"),
    entry("eig"),
];

const fn entry(op: &'static str) -> Entry {
    Entry {
        op,
        supports: fits,
        launch,
    }
}

/// What computes an op, and how many of a result's last axes are a matrix's: of its results in order.
fn of(op: &str) -> Option<(Of, &'static [usize])> {
    Some(match op {
        "cholesky" => (factors::cholesky, &[2]),
        "qr" => (factors::qr, &[2, 2]),
        "lu" => (factors::lu, &[1, 2, 2]),
        "det" => (factors::det, &[0]),
        "solve" => (factors::solve, &[2]),
        "solve_triangular" => (factors::solve_triangular, &[2]),
        "svd" => (factors::svd, &[2, 1, 2]),
        "eigh" => (factors::eigh, &[1, 2]),
        "eig" => (factors::eig, &[1, 2]),
        _ => return None,
    })
}

/// One matrix of a batch, of an input or a result.
struct Part {
    reg: Reg,
    dtype: DType,
    m: usize,
    n: usize,
}

impl Part {
    fn new(reg: Reg, dtype: DType, dims: &[Dim]) -> Self {
        let size = |i: usize| dims.get(i).map_or(1, |d| d.at(1));
        Self {
            reg,
            dtype,
            m: size(0),
            n: size(1),
        }
    }

    /// Matrix `i` of the batch, if all of its numbers are finite.
    ///
    /// # Safety
    /// The batch has it, and nobody writes it.
    unsafe fn read(&self, run: &Run<'_>, i: usize) -> Option<Matrix> {
        let count = self.m * self.n;
        let at = |j: usize| i * count + j;
        let from = run.pointer(self.reg);
        let value = |j: usize| match self.dtype {
            // SAFETY: the caller's promise.
            DType::F64 => unsafe { from.cast::<f64>().wrapping_add(at(j)).read_unaligned() },
            // SAFETY: the caller's promise.
            _ => f64::from(unsafe { from.cast::<f32>().wrapping_add(at(j)).read_unaligned() }),
        };
        let values: Vec<f64> = (0..count).map(value).collect();
        let finite = values.iter().all(|v| v.is_finite());
        finite.then(|| Matrix::from_row_slice(self.m, self.n, &values))
    }

    /// Writes matrix `i` of the batch: this one, or that there is none.
    ///
    /// # Safety
    /// The batch has it, and it is this thread's.
    unsafe fn write(&self, run: &Run<'_>, i: usize, matrix: Option<&Matrix>) {
        // Of complex numbers both parts.
        let n = match self.dtype {
            DType::C64 => 2 * self.n,
            _ => self.n,
        };
        let count = self.m * n;
        let to = run.pointer(self.reg);
        for j in 0..count {
            let (at, row) = (i * count + j, j / n);
            let value = matrix.map(|x| x.get((row, j % n)).copied().unwrap_or(f64::NAN));
            // SAFETY: the caller's promise.
            unsafe {
                match self.dtype {
                    DType::F64 => to
                        .cast::<f64>()
                        .wrapping_add(at)
                        .write_unaligned(value.unwrap_or(f64::NAN)),
                    // Places of rows: where there is no result, each is its own.
                    DType::U32 => to
                        .cast::<u32>()
                        .wrapping_add(at)
                        .write_unaligned(value.map_or(row as u32, |v| v as u32)),
                    _ => to
                        .cast::<f32>()
                        .wrapping_add(at)
                        .write_unaligned(value.unwrap_or(f64::NAN) as f32),
                }
            }
        }
    }
}

struct Linear {
    inputs: Vec<Part>,
    results: Vec<Part>,
    /// The axes of the batch.
    batch: Vec<Dim>,
    of: Of,
    flag: bool,
}

impl Kernel for Linear {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let sizes = self.batch.iter().map(|d| d.at(run.rows));
        let count = sizes.fold(1usize, usize::saturating_mul);
        let work: usize = self.inputs.iter().map(|x| x.m * x.n * x.n).sum();
        for i in split_if_worth(count, 1, (4096 / work.max(1)).max(2), part, parts) {
            if run.stopped() {
                return;
            }
            // SAFETY: the specs say that each tensor has a matrix for every place of the batch; parts have places of their own.
            unsafe {
                let inputs: Option<Vec<Matrix>> =
                    self.inputs.iter().map(|x| x.read(run, i)).collect();
                let found = inputs.and_then(|x| (self.of)(&x, self.flag));
                for (at, result) in self.results.iter().enumerate() {
                    result.write(run, i, found.as_ref().and_then(|f| f.get(at)));
                }
            }
        }
    }
}

/// All inputs of one dtype and of one batch.
fn fits(call: &Call<'_>) -> bool {
    let mut tensors = (0..call.inputs.len()).map(|i| call.tensor(i).ok());
    let Some(Some(first)) = tensors.next() else {
        return false;
    };
    let batch = |dims: &[Dim]| dims[..dims.len().saturating_sub(2)].to_vec();
    matches!(first.dtype, DType::F32 | DType::F64)
        && tensors.all(|t| {
            t.is_some_and(|t| {
                t.dtype == first.dtype && batch(t.shape.dims()) == batch(first.shape.dims())
            })
        })
}

fn launch(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (of, axes) = of(call.op.name).ok_or_else(|| unsupported(call))?;
    let specs = (call.op.infer)(call)?;
    if specs.len() != outs.len() || axes.len() != outs.len() {
        return Err(unsupported(call));
    }
    let apart = |dims: &[Dim], axes: usize| -> (Vec<Dim>, Vec<Dim>) {
        let (before, matrix) = dims.split_at(dims.len().saturating_sub(axes));
        (before.to_vec(), matrix.to_vec())
    };
    let mut batch = Vec::new();
    let mut inputs = Vec::new();
    for (&reg, spec) in ins.iter().zip(call.inputs) {
        let ValueSpec::Tensor(t) = spec else {
            return Err(unsupported(call));
        };
        let (before, matrix) = apart(t.shape.dims(), 2);
        batch = before;
        inputs.push(Part::new(reg, t.dtype, &matrix));
    }
    let mut results = Vec::new();
    for ((&reg, spec), &axes) in outs.iter().zip(&specs).zip(axes) {
        let (before, matrix) = apart(spec.shape.dims(), axes);
        if before != batch {
            return Err(unsupported(call));
        }
        results.push(Part::new(reg, spec.dtype, &matrix));
    }
    let kernel = Linear {
        inputs,
        results,
        batch,
        of,
        flag: !call.attributes.is_empty() && call.bool(0)?,
    };
    launcher.step(kernel, ins, outs);
    Ok(())
}
