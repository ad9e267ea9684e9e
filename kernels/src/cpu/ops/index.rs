//! Reading by index: take, take_along_axis and gather_nd.

use hotcell_graph::{
    DType, Dim, TensorSpec,
    dtype::Kind,
    op::{Call, ValueSpec, rules::normal_axis},
};

use super::{Entry, movement::plain, split_if_worth, strided::around, unsupported};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "take",
        supports: fits,
        launch: take,
    },
    Entry {
        op: "take_along_axis",
        supports: fits,
        launch: take_along_axis,
    },
    Entry {
        op: "gather_nd",
        supports: fits,
        launch: gather_nd,
    },
];

/// Indices that are read, checked and used together.
const BATCH: usize = 256;

/// Bytes below which one thread does it all.
const WORTH: usize = 32 << 10;

/// Whether a plain tensor is indexed by integers.
pub(super) fn fits(call: &Call<'_>) -> bool {
    let integers = match call.inputs.get(1) {
        Some(ValueSpec::Tensor(t)) => matches!(t.dtype.kind(), Kind::Signed | Kind::Unsigned),
        _ => false,
    };
    plain(call) && integers
}

/// A tensor of indices of any integer dtype.
#[derive(Clone, Copy)]
pub(super) struct Indices {
    pub reg: Reg,
    pub dtype: DType,
}

impl Indices {
    /// Reads `out.len()` indices from `first`; what no i64 holds becomes the largest one, which is outside of
    /// every axis.
    ///
    /// # Safety
    /// The tensor has that many, and nobody writes them.
    pub unsafe fn read(self, run: &Run<'_>, first: usize, out: &mut [i64]) {
        /// # Safety
        /// As for the method; the tensor's elements are `T`s at any address.
        unsafe fn cast<T: Copy>(p: *const u8, first: usize, out: &mut [i64], to: fn(T) -> i64) {
            // SAFETY: the caller's promise.
            let p = unsafe { p.cast::<T>().add(first) };
            for (i, o) in out.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                *o = to(unsafe { p.add(i).read_unaligned() });
            }
        }
        let p = run.pointer(self.reg);
        // SAFETY: the caller's promise; every arm names the dtype's own type.
        unsafe {
            match self.dtype {
                DType::U8 => cast::<u8>(p, first, out, i64::from),
                DType::U16 => cast::<u16>(p, first, out, i64::from),
                DType::U32 => cast::<u32>(p, first, out, i64::from),
                DType::U64 => cast::<u64>(p, first, out, |v| v.try_into().unwrap_or(i64::MAX)),
                DType::I8 => cast::<i8>(p, first, out, i64::from),
                DType::I16 => cast::<i16>(p, first, out, i64::from),
                DType::I32 => cast::<i32>(p, first, out, i64::from),
                _ => cast::<i64>(p, first, out, |v| v),
            }
        }
    }
}

/// An index with negative ones counted from the end; `None` outside.
#[inline(always)]
pub(super) fn wrap(index: i64, n: usize) -> Option<usize> {
    let at = if index < 0 {
        index.wrapping_add(n as i64)
    } else {
        index
    };
    usize::try_from(at).ok().filter(|at| *at < n)
}

/// Copies a block of `bytes` bytes.
///
/// # Safety
/// Both are valid for so many bytes and do not overlap.
#[inline(always)]
pub(super) unsafe fn copy_block(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise. Small constant sizes are one move each.
    unsafe {
        match bytes {
            1 => std::ptr::copy_nonoverlapping(from, to, 1),
            2 => std::ptr::copy_nonoverlapping(from, to, 2),
            4 => std::ptr::copy_nonoverlapping(from, to, 4),
            8 => std::ptr::copy_nonoverlapping(from, to, 8),
            _ => std::ptr::copy_nonoverlapping(from, to, bytes),
        }
    }
}

struct Take {
    x: Reg,
    indices: Indices,
    out: Reg,
    bytes: usize,
    x_dims: Vec<Dim>,
    i_dims: Vec<Dim>,
    axis: usize,
}

impl Kernel for Take {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.x_dims, self.axis, run.rows);
        let count: usize = self.i_dims.iter().map(|d| d.at(run.rows)).product();
        let block = k * self.bytes;
        let worth = (WORTH / block.max(1)).max(2);
        let items = if block == 0 { 0 } else { outer * count };
        let step = (64 / block.max(1)).max(1);
        let range = split_if_worth(items, step, worth, part, parts);
        let (x, out) = (run.pointer(self.x), run.pointer(self.out));
        let mut batch = [0i64; BATCH];
        let mut at = range.start;
        while at < range.end {
            let (o, first) = (at / count, at % count);
            let batch = &mut batch[..BATCH.min(range.end - at).min(count - first)];
            // SAFETY: `first + batch.len() <= count`.
            unsafe { self.indices.read(run, first, batch) };
            for (i, &index) in batch.iter().enumerate() {
                let to = out.wrapping_add((at + i) * block);
                let Some(row) = wrap(index, n) else {
                    run.index_out_of_range("take", index, n);
                    // SAFETY: blocks of this part.
                    unsafe { to.write_bytes(0, block) };
                    continue;
                };
                let from = x.wrapping_add((o * n + row) * block);
                // SAFETY: `row < n`; the specs say the sizes; blocks of this part.
                unsafe { copy_block(from, to, block) };
            }
            at += batch.len();
        }
    }
}

fn parts_of<'a>(call: &Call<'a>) -> Result<(&'a TensorSpec, &'a TensorSpec), DeviceError> {
    Ok((call.tensor(0)?, call.tensor(1)?))
}

fn take(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, indices], &[out], (t, i)) = (ins, outs, parts_of(call)?) else {
        return Err(unsupported(call));
    };
    let kernel = Take {
        x,
        indices: Indices {
            reg: indices,
            dtype: i.dtype,
        },
        out,
        bytes: t.dtype.block_bytes(),
        x_dims: t.shape.dims().to_vec(),
        i_dims: i.shape.dims().to_vec(),
        axis: normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?,
    };
    launcher.step_with_bytes(kernel, &[x, indices], &[out]);
    Ok(())
}

struct TakeAlong {
    x: Reg,
    indices: Indices,
    out: Reg,
    bytes: usize,
    x_dims: Vec<Dim>,
    i_dims: Vec<Dim>,
    axis: usize,
}

impl Kernel for TakeAlong {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (_, n, k) = around(&self.x_dims, self.axis, run.rows);
        let (outer, m, _) = around(&self.i_dims, self.axis, run.rows);
        let range = split_if_worth(outer * m * k, 64, WORTH / self.bytes, part, parts);
        let (x, out) = (run.pointer(self.x), run.pointer(self.out));
        let mut batch = [0i64; BATCH];
        for first in range.clone().step_by(BATCH) {
            let batch = &mut batch[..BATCH.min(range.end - first)];
            // SAFETY: there are `outer · m · k` indices.
            unsafe { self.indices.read(run, first, batch) };
            let (mut o, mut q) = (first / k / m, first % k);
            let mut i = first / k % m;
            for (at, &index) in (first..).zip(batch.iter()) {
                let to = out.wrapping_add(at * self.bytes);
                match wrap(index, n) {
                    Some(row) => {
                        let from = x.wrapping_add(((o * n + row) * k + q) * self.bytes);
                        // SAFETY: `row < n`; elements of this part.
                        unsafe { copy_block(from, to, self.bytes) };
                    }
                    None => {
                        run.index_out_of_range("take_along_axis", index, n);
                        // SAFETY: elements of this part.
                        unsafe { to.write_bytes(0, self.bytes) };
                    }
                }
                q += 1;
                if q == k {
                    (q, i) = (0, i + 1);
                }
                if i == m {
                    (i, o) = (0, o + 1);
                }
            }
        }
    }
}

fn take_along_axis(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, indices], &[out], (t, i)) = (ins, outs, parts_of(call)?) else {
        return Err(unsupported(call));
    };
    let kernel = TakeAlong {
        x,
        indices: Indices {
            reg: indices,
            dtype: i.dtype,
        },
        out,
        bytes: t.dtype.block_bytes(),
        x_dims: t.shape.dims().to_vec(),
        i_dims: i.shape.dims().to_vec(),
        axis: normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?,
    };
    launcher.step_with_bytes(kernel, &[x, indices], &[out]);
    Ok(())
}

/// Finds blocks of a tensor by tuples of indices into its first axes.
pub(super) struct Tuples {
    op: &'static str,
    indices: Indices,
    /// Axes before the indexed ones, the same in both tensors.
    batch: Vec<Dim>,
    /// The indexed axes.
    axes: Vec<Dim>,
    /// Tuples of one batch, as axes.
    count: Vec<Dim>,
    /// Bytes of an addressed block; the axes inside are fixed unless nothing is indexed.
    inside: Vec<Dim>,
    bytes: usize,
}

impl Tuples {
    /// The tuples of indices that input 1 of a call has for input 0, after `batch` equal axes.
    pub fn new(call: &Call<'_>, indices: Reg, batch: usize) -> Option<Self> {
        let (t, i) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
        let (x, tuples) = (t.shape.dims(), i.shape.dims());
        let (&last, tuples) = tuples.split_last()?;
        let Dim::Fixed(width) = last else {
            return None;
        };
        Some(Self {
            op: call.op.name,
            indices: Indices {
                reg: indices,
                dtype: i.dtype,
            },
            batch: x.get(..batch)?.to_vec(),
            axes: x.get(batch..batch.checked_add(width)?)?.to_vec(),
            count: tuples.get(batch..)?.to_vec(),
            inside: x.get(batch + width..)?.to_vec(),
            bytes: t.dtype.block_bytes(),
        })
    }

    fn product(dims: &[Dim], rows: usize) -> usize {
        dims.iter().map(|d| d.at(rows)).product()
    }

    /// Bytes of a block.
    pub fn block(&self, rows: usize) -> usize {
        Self::product(&self.inside, rows) * self.bytes
    }

    /// Tuples in all.
    pub fn count(&self, rows: usize) -> usize {
        Self::product(&self.batch, rows) * Self::product(&self.count, rows)
    }

    /// Blocks of the tensor.
    pub fn blocks(&self, rows: usize) -> usize {
        Self::product(&self.batch, rows) * Self::product(&self.axes, rows)
    }

    /// The block that tuple `at` names; `None` after reporting that it is outside.
    ///
    /// # Safety
    /// `at` is below [`Tuples::count`], and nobody writes the indices.
    pub unsafe fn find(&self, run: &Run<'_>, at: usize) -> Option<usize> {
        let mut tuple = [0i64; super::strided::MAX_AXES];
        let tuple = &mut tuple[..self.axes.len()];
        // SAFETY: the caller's promise.
        unsafe { self.indices.read(run, at * tuple.len(), tuple) };
        let mut block = match self.batch.is_empty() {
            true => 0,
            false => at / Self::product(&self.count, run.rows),
        };
        for (dim, &index) in self.axes.iter().zip(tuple.iter()) {
            let n = dim.at(run.rows);
            let Some(i) = wrap(index, n) else {
                run.index_out_of_range(self.op, index, n);
                return None;
            };
            block = block * n + i;
        }
        Some(block)
    }
}

struct GatherNd {
    x: Reg,
    out: Reg,
    tuples: Tuples,
}

impl Kernel for GatherNd {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let block = self.tuples.block(run.rows);
        let worth = (WORTH / (block + 8)).max(2);
        let step = (64 / block.max(1)).max(1);
        let range = split_if_worth(self.tuples.count(run.rows), step, worth, part, parts);
        let (x, out) = (run.pointer(self.x), run.pointer(self.out));
        for at in range {
            let to = out.wrapping_add(at * block);
            // SAFETY: `find` returns blocks of the tensor; blocks of this part.
            unsafe {
                match self.tuples.find(run, at) {
                    Some(from) => copy_block(x.wrapping_add(from * block), to, block),
                    None => to.write_bytes(0, block),
                }
            }
        }
    }
}

fn gather_nd(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, indices], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let batch = call.int(0)?.max(0) as usize;
    let tuples = Tuples::new(call, indices, batch).ok_or_else(|| unsupported(call))?;
    launcher.step_with_bytes(GatherNd { x, out, tuples }, &[x, indices], &[out]);
    Ok(())
}
