//! Running sums and products, one element after the other.

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{Entry, split_if_worth, strided::around, unsupported};
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
        op: "cumsum",
        supports: fits,
        launch: cumsum,
    },
    Entry {
        op: "cumprod",
        supports: fits,
        launch: cumprod,
    },
];

/// Columns that run together.
const TILE: usize = 256;

/// A number with a running value: as wide as the number, or f32 for the formats of sixteen bits.
trait Scan: Copy + 'static {
    type Acc: Copy;
    fn start(product: bool) -> Self::Acc;
    fn add(acc: Self::Acc, value: Self) -> Self::Acc;
    fn mul(acc: Self::Acc, value: Self) -> Self::Acc;
    fn store(acc: Self::Acc) -> Self;
}

macro_rules! scan {
    ($($ty:ty => $acc:ty, $zero:expr, $one:expr, $load:expr, $add:expr, $mul:expr, $store:expr;)*) => {$(
        impl Scan for $ty {
            type Acc = $acc;
            fn start(product: bool) -> $acc { if product { $one } else { $zero } }
            fn add(acc: $acc, value: Self) -> $acc { $add(acc, $load(value)) }
            fn mul(acc: $acc, value: Self) -> $acc { $mul(acc, $load(value)) }
            fn store(acc: $acc) -> Self { $store(acc) }
        }
    )*};
}

fn same<T>(v: T) -> T {
    v
}

/// A half-precision number's bits.
#[derive(Clone, Copy)]
struct Half(u16);
/// A bfloat16 number's bits.
#[derive(Clone, Copy)]
struct Brain(u16);

scan! {
    u8 => u8, 0, 1, same, u8::wrapping_add, u8::wrapping_mul, same;
    u16 => u16, 0, 1, same, u16::wrapping_add, u16::wrapping_mul, same;
    u32 => u32, 0, 1, same, u32::wrapping_add, u32::wrapping_mul, same;
    u64 => u64, 0, 1, same, u64::wrapping_add, u64::wrapping_mul, same;
    f32 => f32, 0.0, 1.0, same, |a, b| a + b, |a, b| a * b, same;
    f64 => f64, 0.0, 1.0, same, |a, b| a + b, |a, b| a * b, same;
    Half => f32, 0.0, 1.0, |v: Half| f16_to_f32(v.0), |a, b| a + b, |a, b| a * b, |a| Half(f32_to_f16(a));
    Brain => f32, 0.0, 1.0, |v: Brain| bf16_to_f32(v.0), |a, b| a + b, |a, b| a * b, |a| Brain(f32_to_bf16(a));
}

struct Running {
    x: Reg,
    out: Reg,
    dtype: DType,
    dims: Vec<Dim>,
    axis: usize,
    product: bool,
    exclusive: bool,
    reverse: bool,
}

impl Running {
    unsafe fn scan<T: Scan>(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        if n * k == 0 {
            return;
        }
        let tiles = k.div_ceil(TILE);
        let worth = 4096 / (n * k.min(TILE));
        let range = split_if_worth(outer * tiles, 1, worth.max(2), part, parts);
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<T>(self.x, outer * n * k) };
        let mut buffer = [T::start(self.product); TILE];
        let step = if self.product { T::mul } else { T::add };
        for item in range {
            let (o, first) = (item / tiles, item % tiles * TILE);
            let width = TILE.min(k - first);
            let acc = &mut buffer[..width];
            acc.fill(T::start(self.product));
            for i in 0..n {
                let i = if self.reverse { n - 1 - i } else { i };
                let at = (o * n + i) * k + first;
                // SAFETY: every item has results of its own.
                let out = unsafe { run.slice_mut::<T>(self.out, at..at + width) };
                for ((a, v), o) in acc.iter_mut().zip(&x[at..at + width]).zip(out) {
                    let next = step(*a, *v);
                    *o = T::store(if self.exclusive { *a } else { next });
                    *a = next;
                }
            }
        }
    }
}

impl Kernel for Running {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        // SAFETY: the caller's promise; every arm names the dtype's own type.
        unsafe {
            match self.dtype {
                DType::U8 | DType::I8 => self.scan::<u8>(run, part, parts),
                DType::U16 | DType::I16 => self.scan::<u16>(run, part, parts),
                DType::U32 | DType::I32 => self.scan::<u32>(run, part, parts),
                DType::U64 | DType::I64 => self.scan::<u64>(run, part, parts),
                DType::F16 => self.scan::<Half>(run, part, parts),
                DType::BF16 => self.scan::<Brain>(run, part, parts),
                DType::F32 => self.scan::<f32>(run, part, parts),
                DType::F64 => self.scan::<f64>(run, part, parts),
                _ => {}
            }
        }
    }
}

fn fits(call: &Call<'_>) -> bool {
    call.tensor(0)
        .is_ok_and(|t| !t.dtype.is_block() && !matches!(t.dtype, DType::Bool | DType::C64))
}

fn cumsum(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    running(launcher, call, ins, outs, false)
}

fn cumprod(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    running(launcher, call, ins, outs, true)
}

fn running(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    product: bool,
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let kernel = Running {
        x,
        out,
        dtype: t.dtype,
        dims: t.shape.dims().to_vec(),
        axis: normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?,
        product,
        exclusive: call.bool(1)?,
        reverse: call.bool(2)?,
    };
    launcher.step(kernel, &[x], &[out]);
    Ok(())
}
