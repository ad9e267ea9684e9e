//! Writing by index: scatter_along_axis and scatter_nd.
//!
//! First the tensor is copied, then updates are applied in their order. Every thread reads all indices and
//! applies those that fall into its own part of the result, so equal indices meet on one thread, in order.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    index::{Indices, Tuples, copy_block, fits, wrap},
    movement::Move,
    split_if_worth,
    strided::{MAX_AXES, strides},
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "scatter_along_axis",
        supports: scatter_fits,
        launch: scatter_along_axis,
    },
    Entry {
        op: "scatter_nd",
        supports: scatter_fits,
        launch: scatter_nd,
    },
];

/// Updates below which one thread does it all.
const WORTH: usize = 4096;

/// What becomes of an element and its update.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduce {
    Set,
    Add,
    Mul,
    Max,
    Min,
}

impl Reduce {
    fn of(call: &Call<'_>, attribute: usize) -> Result<Self, DeviceError> {
        Ok(match call.name(attribute)? {
            "set" => Self::Set,
            "add" => Self::Add,
            "mul" => Self::Mul,
            "max" => Self::Max,
            "min" => Self::Min,
            _ => return Err(unsupported(call)),
        })
    }
}

/// A number that updates can be folded into.
trait Number: Copy {
    fn fold(self, update: Self, reduce: Reduce) -> Self;
}

/// The larger or smaller one; NaN if one is, and of equal ones the second.
macro_rules! float_fold {
    ($a:expr, $b:expr, $reduce:expr) => {{
        let (a, b) = ($a, $b);
        match $reduce {
            Reduce::Set => b,
            Reduce::Add => a + b,
            Reduce::Mul => a * b,
            Reduce::Max => {
                if a > b || a.is_nan() {
                    a
                } else {
                    b
                }
            }
            Reduce::Min => {
                if a < b || a.is_nan() {
                    a
                } else {
                    b
                }
            }
        }
    }};
}

macro_rules! numbers {
    ($($int:ident)*) => {$(
        impl Number for $int {
            #[inline(always)]
            fn fold(self, update: Self, reduce: Reduce) -> Self {
                match reduce {
                    Reduce::Set => update,
                    Reduce::Add => self.wrapping_add(update),
                    Reduce::Mul => self.wrapping_mul(update),
                    Reduce::Max => self.max(update),
                    Reduce::Min => self.min(update),
                }
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64 i8 i16 i32 i64);

impl Number for f32 {
    #[inline(always)]
    fn fold(self, update: Self, reduce: Reduce) -> Self {
        float_fold!(self, update, reduce)
    }
}

impl Number for f64 {
    #[inline(always)]
    fn fold(self, update: Self, reduce: Reduce) -> Self {
        float_fold!(self, update, reduce)
    }
}

/// A half-precision number's bits.
#[derive(Clone, Copy)]
struct Half(u16);
/// A bfloat16 number's bits.
#[derive(Clone, Copy)]
struct Brain(u16);

impl Number for Half {
    #[inline(always)]
    fn fold(self, update: Self, reduce: Reduce) -> Self {
        let v = float_fold!(f16_to_f32(self.0), f16_to_f32(update.0), reduce);
        Self(f32_to_f16(v))
    }
}

impl Number for Brain {
    #[inline(always)]
    fn fold(self, update: Self, reduce: Reduce) -> Self {
        let v = float_fold!(bf16_to_f32(self.0), bf16_to_f32(update.0), reduce);
        Self(f32_to_bf16(v))
    }
}

/// Folds `n` updates into `n` elements.
type Fold = unsafe fn(*mut u8, *const u8, usize, Reduce);

/// # Safety
/// `n` elements of type `T` lie at both addresses, which need no alignment, and do not overlap.
unsafe fn fold_block<T: Number>(out: *mut u8, updates: *const u8, n: usize, reduce: Reduce) {
    let (out, updates) = (out.cast::<T>(), updates.cast::<T>());
    for i in 0..n {
        // SAFETY: the caller's promise.
        unsafe {
            let update = updates.add(i).read_unaligned();
            let old = out.add(i).read_unaligned();
            out.add(i).write_unaligned(old.fold(update, reduce));
        }
    }
}

fn fold_of(dtype: DType, reduce: Reduce) -> Option<Fold> {
    /// # Safety
    /// As for [`fold_block`], with elements of `N` bytes.
    unsafe fn set<const N: usize>(out: *mut u8, updates: *const u8, n: usize, _: Reduce) {
        // SAFETY: the caller's promise.
        unsafe { copy_block(updates, out, n * N) }
    }
    Some(match (reduce, dtype) {
        (Reduce::Set, _) => match dtype.block_bytes() {
            1 => set::<1>,
            2 => set::<2>,
            4 => set::<4>,
            8 => set::<8>,
            _ => return None,
        },
        (Reduce::Max | Reduce::Min, DType::Bool) => fold_block::<u8>,
        (_, DType::U8) => fold_block::<u8>,
        (_, DType::U16) => fold_block::<u16>,
        (_, DType::U32) => fold_block::<u32>,
        (_, DType::U64) => fold_block::<u64>,
        (_, DType::I8) => fold_block::<i8>,
        (_, DType::I16) => fold_block::<i16>,
        (_, DType::I32) => fold_block::<i32>,
        (_, DType::I64) => fold_block::<i64>,
        (_, DType::F16) => fold_block::<Half>,
        (_, DType::BF16) => fold_block::<Brain>,
        (_, DType::F32) => fold_block::<f32>,
        (_, DType::F64) => fold_block::<f64>,
        _ => return None,
    })
}

fn scatter_fits(call: &Call<'_>) -> bool {
    let dtype = |i| call.tensor(i).map(|t| t.dtype).ok();
    let reduce = Reduce::of(call, call.attributes.len().saturating_sub(1));
    let folds = |d| reduce.is_ok_and(|r| fold_of(d, r).is_some());
    fits(call) && dtype(0) == dtype(2) && dtype(0).is_some_and(folds)
}

struct AlongAxis {
    indices: Indices,
    updates: Reg,
    out: Reg,
    bytes: usize,
    fold: Fold,
    reduce: Reduce,
    /// Sizes of the indices, and distances in the result; 0 along the axis.
    axes: Vec<(Dim, usize)>,
    axis: usize,
    /// Size of the result along the axis and its distance.
    n: Dim,
    stride: usize,
}

impl AlongAxis {
    /// Applies updates whose coordinate along `by` (of the result for the axis itself) lies in `mine`.
    unsafe fn apply(&self, run: &Run<'_>, by: usize, mine: &Range<usize>) {
        const BATCH: usize = 256;
        let n = self.n.at(run.rows);
        let mut sizes = [1usize; MAX_AXES];
        for (size, (dim, _)) in sizes.iter_mut().zip(&self.axes) {
            *size = dim.at(run.rows);
        }
        let rank = self.axes.len().min(MAX_AXES);
        let total: usize = sizes[..rank].iter().product();
        let (updates, out) = (run.pointer(self.updates), run.pointer(self.out));
        let mut at = [0usize; MAX_AXES];
        let mut base = 0;
        let mut batch = [0i64; BATCH];
        for first in (0..total).step_by(BATCH) {
            let batch = &mut batch[..BATCH.min(total - first)];
            // SAFETY: there are `total` indices.
            unsafe { self.indices.read(run, first, batch) };
            for (i, &index) in (first..).zip(batch.iter()) {
                match wrap(index, n) {
                    None => run.index_out_of_range("scatter_along_axis", index, n),
                    Some(row) => {
                        let place = if by == self.axis { row } else { at[by] };
                        if mine.contains(&place) {
                            let to = (base + row * self.stride) * self.bytes;
                            // SAFETY: `row < n` and the other coordinates lie inside the result, of which
                            // this part owns `mine`.
                            unsafe {
                                let update = updates.wrapping_add(i * self.bytes);
                                (self.fold)(out.wrapping_add(to), update, 1, self.reduce);
                            }
                        }
                    }
                }
                for axis in (0..rank).rev() {
                    at[axis] += 1;
                    base += self.axes[axis].1;
                    if at[axis] < sizes[axis] {
                        break;
                    }
                    at[axis] = 0;
                    base -= self.axes[axis].1 * sizes[axis];
                }
            }
        }
    }
}

impl Kernel for AlongAxis {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.n.at(run.rows);
        let total: usize = self.axes.iter().map(|(d, _)| d.at(run.rows)).product();
        let mine = match (total < WORTH, part) {
            (true, 0) => 0..n,
            (true, _) => return,
            (false, _) => split_if_worth(n, 1, 2, part, parts),
        };
        // SAFETY: the caller's promise; `mine` is this part's share of the result.
        unsafe { self.apply(run, self.axis, &mine) };
    }
}

fn scatter_along_axis(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, indices, updates], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let (t, i) = (call.tensor(0)?, call.tensor(1)?);
    let axis = normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?;
    let reduce = Reduce::of(call, 1)?;
    let fold = fold_of(t.dtype, reduce).ok_or_else(|| unsupported(call))?;
    let bytes = t.dtype.block_bytes();
    launcher.step_with_bytes(Move::whole(x, out, bytes, &t.shape), &[x], &[out]);
    let steps = strides(&t.shape);
    let sizes = i.shape.dims().iter().zip(&steps).enumerate();
    let kernel = AlongAxis {
        indices: Indices {
            reg: indices,
            dtype: i.dtype,
        },
        updates,
        out,
        bytes,
        fold,
        reduce,
        axes: sizes
            .map(|(a, (d, s))| (*d, if a == axis { 0 } else { *s as usize }))
            .collect(),
        axis,
        n: t.shape.dims()[axis],
        stride: steps[axis] as usize,
    };
    launcher.step_with_bytes(kernel, &[indices, updates], &[out]);
    Ok(())
}

struct ScatterNd {
    updates: Reg,
    out: Reg,
    bytes: usize,
    tuples: Tuples,
    fold: Fold,
    reduce: Reduce,
}

impl Kernel for ScatterNd {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let block = self.tuples.block(run.rows);
        let (count, blocks) = (self.tuples.count(run.rows), self.tuples.blocks(run.rows));
        let n = block / self.bytes;
        let mine = match (count * n < WORTH, part) {
            (true, 0) => 0..blocks,
            (true, _) => return,
            (false, _) => split_if_worth(blocks, 1, 2, part, parts),
        };
        let (updates, out) = (run.pointer(self.updates), run.pointer(self.out));
        for at in 0..count {
            // SAFETY: `find` returns blocks of the result, of which this part owns `mine`.
            unsafe {
                let Some(to) = self.tuples.find(run, at).filter(|b| mine.contains(b)) else {
                    continue;
                };
                let update = updates.wrapping_add(at * block);
                (self.fold)(out.wrapping_add(to * block), update, n, self.reduce);
            }
        }
    }
}

fn scatter_nd(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, indices, updates], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let bytes = t.dtype.block_bytes();
    let reduce = Reduce::of(call, 0)?;
    let fold = fold_of(t.dtype, reduce).ok_or_else(|| unsupported(call))?;
    let tuples = Tuples::new(call, indices, 0).ok_or_else(|| unsupported(call))?;
    launcher.step_with_bytes(Move::whole(x, out, bytes, &t.shape), &[x], &[out]);
    let kernel = ScatterNd {
        updates,
        out,
        bytes,
        tuples,
        fold,
        reduce,
    };
    launcher.step_with_bytes(kernel, &[indices, updates], &[out]);
    Ok(())
}
