//! Sorting along an axis: sort, argsort and topk.
//!
//! Elements become integers of the same order with their place below: all keys differ, so an unstable sort of
//! them is a stable sort of the elements.

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    index::copy_block,
    keys::{BF16_INFINITY, F16_INFINITY, F32_INFINITY, F64_INFINITY, order16, order32, order64},
    reductions::ordered,
    split_if_worth,
    strided::around,
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "sort",
        supports: fits,
        launch: sort,
    },
    Entry {
        op: "argsort",
        supports: fits,
        launch: argsort,
    },
    Entry {
        op: "topk",
        supports: fits,
        launch: topk,
    },
];

/// An element's rank above its place.
trait Packed: Copy + Ord + 'static {
    fn pack(order: i64, flip: i64, place: u32) -> Self;
    fn place(self) -> usize;
}

/// For dtypes of at most 32 bits.
impl Packed for u64 {
    #[inline(always)]
    fn pack(order: i64, flip: i64, place: u32) -> Self {
        let key = (order ^ flip) as u32 ^ (1 << 31);
        u64::from(key) << 32 | u64::from(place)
    }

    #[inline(always)]
    fn place(self) -> usize {
        self as u32 as usize
    }
}

/// For dtypes of 64 bits.
impl Packed for u128 {
    #[inline(always)]
    fn pack(order: i64, flip: i64, place: u32) -> Self {
        let key = (order ^ flip) as u64 ^ (1 << 63);
        u128::from(key) << 32 | u128::from(place)
    }

    #[inline(always)]
    fn place(self) -> usize {
        self as u32 as usize
    }
}

struct Sort {
    x: Reg,
    /// Where sorted values go.
    values: Option<Reg>,
    /// Where their places go.
    places: Option<Reg>,
    /// The keys of every line.
    keys: Reg,
    dtype: DType,
    dims: Vec<Dim>,
    axis: usize,
    /// 0: ascending; −1: descending.
    flip: i64,
    /// So many of each line, all when `None`.
    count: Option<usize>,
}

impl Sort {
    /// Fills `keys` with the keys of a line that starts at `x` and has a distance of `k` elements.
    ///
    /// # Safety
    /// The line's elements lie there and nobody writes them.
    unsafe fn load<P: Packed>(&self, x: *const u8, k: usize, keys: &mut [P]) {
        /// # Safety
        /// As for the method, with elements of type `T`.
        unsafe fn line<T: Copy, P: Packed>(
            x: *const u8,
            k: usize,
            flip: i64,
            keys: &mut [P],
            order: impl Fn(T) -> i64,
        ) {
            for (i, key) in keys.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let value = unsafe { x.cast::<T>().wrapping_add(i * k).read_unaligned() };
                *key = P::pack(order(value), flip, i as u32);
            }
        }
        let flip = self.flip;
        let half = |infinity| move |v: i16| order16(v, infinity, 0).into();
        // SAFETY: the caller's promise; every arm names the dtype's own type.
        unsafe {
            match self.dtype {
                DType::Bool => line(x, k, flip, keys, |v: u8| (v != 0).into()),
                DType::U8 => line(x, k, flip, keys, |v: u8| v.into()),
                DType::U16 => line(x, k, flip, keys, |v: u16| v.into()),
                DType::U32 => line(x, k, flip, keys, |v: u32| (v ^ (1 << 31)) as i32 as i64),
                DType::U64 => line(x, k, flip, keys, |v: u64| (v ^ (1 << 63)) as i64),
                DType::I8 => line(x, k, flip, keys, |v: i8| v.into()),
                DType::I16 => line(x, k, flip, keys, |v: i16| v.into()),
                DType::I32 => line(x, k, flip, keys, |v: i32| v.into()),
                DType::I64 => line(x, k, flip, keys, |v: i64| v),
                DType::F16 => line(x, k, flip, keys, half(F16_INFINITY)),
                DType::BF16 => line(x, k, flip, keys, half(BF16_INFINITY)),
                DType::F32 => line(x, k, flip, keys, |v: i32| {
                    order32(v, F32_INFINITY, 0).into()
                }),
                _ => line(x, k, flip, keys, |v: i64| order64(v, F64_INFINITY, 0)),
            }
        }
    }

    unsafe fn sort<P: Packed>(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        let count = self.count.map_or(n, |count| count.min(n));
        if count == 0 {
            return;
        }
        let lines = outer.saturating_mul(k);
        let worth = 2048 / n.max(1);
        let range = split_if_worth(lines, 1, worth.max(2), part, parts);
        let bytes = self.dtype.block_bytes();
        for line in range {
            if run.stopped() {
                return;
            }
            let (o, q) = (line / k, line % k);
            let x = run.pointer(self.x).wrapping_add((o * n * k + q) * bytes);
            // SAFETY: the line lies in the tensor; its keys are this part's alone.
            let keys = unsafe {
                let keys = run.slice_mut::<P>(self.keys, line * n..(line + 1) * n);
                self.load(x, k, keys);
                keys
            };
            if count < n {
                keys.select_nth_unstable(count - 1);
            }
            keys[..count].sort_unstable();
            let first = o * count * k + q;
            for (i, key) in keys[..count].iter().enumerate() {
                let (to, place) = (first + i * k, key.place());
                // SAFETY: places are below `n`; the results have `count` elements per line, and
                // every line has results of its own.
                unsafe {
                    if let Some(values) = self.values {
                        let value = x.wrapping_add(place * k * bytes);
                        let to = run.pointer(values).wrapping_add(to * bytes);
                        copy_block(value, to, bytes);
                    }
                    if let Some(places) = self.places {
                        run.slice_mut::<u32>(places, to..to + 1)[0] = place as u32;
                    }
                }
            }
        }
    }
}

impl Kernel for Sort {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.dtype.block_bytes() <= 4 {
                self.sort::<u64>(run, part, parts);
            } else {
                self.sort::<u128>(run, part, parts);
            }
        }
    }
}

/// Ordered elements, along an axis that u32 counts.
fn fits(call: &Call<'_>) -> bool {
    let counts = |d: &Dim| match d {
        Dim::Fixed(n) => u32::try_from(*n).is_ok(),
        Dim::Rows => true,
    };
    ordered(call)
        && call
            .tensor(0)
            .is_ok_and(|t| t.shape.dims().iter().all(counts))
}

fn sort(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[out] = outs else {
        return Err(unsupported(call));
    };
    let descending = call.bool(1)?;
    step(launcher, call, ins, (Some(out), None), 0, descending, None)
}

fn argsort(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[out] = outs else {
        return Err(unsupported(call));
    };
    let descending = call.bool(1)?;
    step(launcher, call, ins, (None, Some(out)), 0, descending, None)
}

fn topk(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[values, places] = outs else {
        return Err(unsupported(call));
    };
    let count = call.int(0)?.max(0) as usize;
    let to = (Some(values), Some(places));
    step(launcher, call, ins, to, 1, call.bool(2)?, Some(count))
}

/// `axis`: which attribute says the axis.
fn step(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    (values, places): (Option<Reg>, Option<Reg>),
    axis: usize,
    descending: bool,
    count: Option<usize>,
) -> Result<(), DeviceError> {
    let &[x] = ins else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let axis = normal_axis(call.int(axis)?, t.shape.rank()).ok_or_else(|| unsupported(call))?;
    let longest = t.shape.dims().get(axis).map(|d| d.at(launcher.max_rows));
    if longest.is_none_or(|n| u32::try_from(n).is_err()) {
        return Err(unsupported(call));
    }
    let key = if t.dtype.block_bytes() <= 4 {
        size_of::<u64>()
    } else {
        size_of::<u128>()
    };
    let room = t.shape.elements(launcher.max_rows);
    let room = room.and_then(|n| n.checked_mul(key));
    let keys = launcher.scratch(room.ok_or_else(|| unsupported(call))?);
    let kernel = Sort {
        x,
        values,
        places,
        keys,
        dtype: t.dtype,
        dims: t.shape.dims().to_vec(),
        axis,
        flip: if descending { -1 } else { 0 },
        count,
    };
    let writes: Vec<Reg> = [Some(keys), values, places].into_iter().flatten().collect();
    launcher.step(kernel, &[x], &writes);
    Ok(())
}
