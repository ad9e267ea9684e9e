//! Reductions over any axes, and where the greatest and the least is.
//!
//! What is done in which order is that of the processor ([`reduction`](crate::reduction)), and so are the bits.

use hotcell_graph::{
    DType, Shape,
    op::{Call, rules::normal_axes, rules::normal_axis},
};

use super::{
    Cx, Entry, Kernel, Made,
    layout::{around, code, dims_at, grid, grid_of},
};
use crate::{
    backend::DeviceError,
    cuda::gpu::Arguments,
    part::overflow,
    reduction::{LANES, Layout, phases},
};

/// The ops in the order of `Op` in `generic_reduce.cu`.
const OPS: &[&str] = &[
    "reduce_sum",
    "reduce_prod",
    "reduce_max",
    "reduce_min",
    "reduce_any",
    "reduce_all",
];

macro_rules! entries {
    ($make:ident: $($name:literal)*) => { [$(Entry { op: $name, make: $make }),*] };
}

/// One row for each of [`OPS`].
pub(super) static ENTRIES: [Entry; 6] = entries!(
    reduce: "reduce_sum" "reduce_prod" "reduce_max" "reduce_min" "reduce_any" "reduce_all"
);

pub(super) static ARGS: [Entry; 2] = entries!(arg: "argmax" "argmin");

/// Axes of outer matrices that kernels take.
const AXES: usize = 8;

/// The kernels of a class of numbers: of chunks of rows, of chunks of columns, and of parts.
type Class = [&'static str; 3];

const SINGLE: Class = [
    "reduce_rows_single",
    "reduce_columns_single",
    "reduce_join_single",
];
const DOUBLE: Class = [
    "reduce_rows_double",
    "reduce_columns_double",
    "reduce_join_double",
];
const WHOLE: Class = [
    "reduce_rows_whole",
    "reduce_columns_whole",
    "reduce_join_whole",
];

struct Reduce {
    op: &'static str,
    class: Class,
    /// The op, the dtype of the input and that of the result, as the kernels number them.
    codes: [u64; 3],
    layout: Layout,
}

/// The sizes of an execution.
struct Sizes {
    /// Matrices in all, results of them, and matrices of each result.
    outer: u64,
    kept: u64,
    each: u64,
    n: u64,
    k: u64,
    /// Rows of a chunk, and chunks.
    chunk: u64,
    chunks: u64,
    phases: u64,
    direct: bool,
}

fn reduce(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let axes = normal_axes(call.ints(0).ok()?, x.shape.rank())?;
    let results = (call.op.infer)(call).ok()?;
    let place = OPS.iter().position(|op| *op == call.op.name)?;
    let adds = matches!(call.op.name, "reduce_sum" | "reduce_prod");
    let class = match x.dtype {
        DType::F16 | DType::BF16 | DType::F32 if adds => SINGLE,
        DType::F64 if adds => DOUBLE,
        _ => WHOLE,
    };
    let layout = Layout::new(x.shape.dims(), |axis| axes.contains(&axis));
    if layout.outer.len() > AXES {
        return None;
    }
    let codes = [
        place as u64,
        code(x.dtype)?.into(),
        code(results.first()?.dtype)?.into(),
    ];
    let kernel = Reduce {
        op: call.op.name,
        class,
        codes,
        layout,
    };
    Some((Box::new(kernel), class.to_vec()))
}

impl Reduce {
    fn sizes(&self, rows: usize) -> Option<Sizes> {
        let s = self.layout.at(rows);
        let word = |n: usize| u64::try_from(n).ok();
        let kept = word(self.layout.count(false, rows))?;
        let each = word(self.layout.count(true, rows))?;
        Some(Sizes {
            outer: kept.checked_mul(each)?,
            kept,
            each,
            n: word(s.n)?,
            k: word(s.k)?,
            chunk: word(s.chunk)?,
            chunks: word(s.chunks)?,
            phases: word(phases(s.k))?,
            direct: self.layout.is_direct(&s),
        })
    }

    /// `Reduction` of `generic_reduce.cu`.
    fn words(&self, s: &Sizes, rows: usize) -> Option<Vec<u64>> {
        let mut words = self.codes.to_vec();
        words.extend([s.outer, s.n, s.k, s.chunk, s.chunks, s.phases]);
        let outer = &self.layout.outer;
        words.extend([s.direct.into(), outer.len() as u64]);
        let run = |axis: usize| outer.get(axis);
        for axis in 0..AXES {
            let size = run(axis).map_or(1, |run| run.at(rows));
            words.push(u64::try_from(size).ok()?);
        }
        words.extend((0..AXES).map(|axis| u64::from(run(axis).is_some_and(|run| run.reduced))));
        words.extend([s.kept, s.each]);
        Some(words)
    }
}

impl Kernel for Reduce {
    /// A part of 64 bits for each chunk.
    fn scratch(&self, rows: usize) -> Option<usize> {
        let s = self.sizes(rows)?;
        if s.direct {
            return Some(0);
        }
        let parts = s.outer.checked_mul(s.chunks)?.checked_mul(s.k)?;
        usize::try_from(parts.checked_mul(8)?).ok()
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let s = self.sizes(cx.rows).ok_or_else(overflow)?;
        let results = s.kept.checked_mul(s.k).ok_or_else(overflow)?;
        if results == 0 {
            return Ok(());
        }
        if s.each.saturating_mul(s.n) == 0 && matches!(self.op, "reduce_max" | "reduce_min") {
            return Err(of_nothing(self.op));
        }
        let words = self.words(&s, cx.rows).ok_or_else(overflow)?;
        let [of_rows, of_columns, of_parts] = self.class;
        let to = match s.direct {
            true => cx.output(0)?,
            false => cx.scratch,
        };
        let arguments = Arguments::default()
            .word(to)
            .word(cx.input(0)?)
            .block(&words);
        // No overflow: `scratch` has multiplied them for more rows.
        let chunks = s.outer * s.chunks;
        let (name, grid_of_chunks) = match self.layout.in_rows() {
            true => (of_rows, grid_of(chunks.div_ceil(LANES as u64))),
            false => (of_columns, grid(chunks * s.k)),
        };
        // SAFETY: the kernel's arguments (generic_reduce.cu), of tensors of these sizes; the scratch memory is as large as
        // `scratch` says.
        unsafe { cx.gpu.launch(name, grid_of_chunks, &arguments)? };
        if s.direct {
            return Ok(());
        }
        let arguments = Arguments::default()
            .word(cx.output(0)?)
            .word(cx.scratch)
            .block(&words);
        // SAFETY: as above; the parts are those of the kernel before.
        unsafe { cx.gpu.launch(of_parts, grid(results), &arguments) }
    }
}

/// Of nothing there is no greatest.
fn of_nothing(op: &'static str) -> DeviceError {
    DeviceError::Undefined {
        op,
        why: "an axis without elements has none",
    }
}

struct Arg {
    op: &'static str,
    dtype: u32,
    least: bool,
    x: Shape,
    axis: usize,
}

fn arg(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let kernel = Arg {
        op: call.op.name,
        dtype: code(x.dtype)?,
        least: call.op.name == "argmin",
        x: x.shape.clone(),
        axis: normal_axis(call.int(0).ok()?, x.shape.rank())?,
    };
    Some((Box::new(kernel), vec!["arg_extreme"]))
}

impl Kernel for Arg {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let sizes = around(&dims_at(&self.x, cx.rows), self.axis);
        let [outer, n, k] = sizes.ok_or_else(overflow)?;
        let results = outer.checked_mul(k).ok_or_else(overflow)?;
        if results == 0 {
            return Ok(());
        }
        if n == 0 {
            return Err(of_nothing(self.op));
        }
        u32::try_from(n).map_err(|_| overflow())?;
        let arguments = Arguments::default()
            .int(self.dtype)
            .int(if self.least { u32::MAX } else { 0 })
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(outer)
            .word(n)
            .word(k);
        // SAFETY: the kernel's arguments (generic_reduce.cu), of a tensor of this shape.
        unsafe {
            cx.gpu
                .launch("arg_extreme", grid_of(results.div_ceil(8)), &arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_know_the_ops_by_the_same_numbers() {
        let source = include_str!("../generic_reduce.cu");
        let (_, list) = source.split_once("enum Op : unsigned {").unwrap();
        let (list, _) = list.split_once('}').unwrap();
        let names: Vec<String> = list.split(',').map(|n| n.trim().to_lowercase()).collect();
        assert_eq!(names, OPS);
        assert!(ENTRIES.iter().map(|entry| entry.op).eq(OPS.iter().copied()));
    }
}
