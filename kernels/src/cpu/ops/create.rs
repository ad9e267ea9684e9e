//! Tensors out of nothing: literals and ranges.

use hotcell_graph::{DType, op::Call};

use super::{Entry, always, movement::result, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{f32_to_bf16, f32_to_f16, to_odd},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "literal",
        supports: always,
        launch: literal,
    },
    Entry {
        op: "arange",
        supports: counts,
        launch: arange,
    },
];

struct Literal {
    data: Vec<u8>,
    out: Reg,
}

impl Kernel for Literal {
    unsafe fn run(&self, run: &Run<'_>, part: usize, _: usize) {
        if part == 0 {
            // SAFETY: the launch compared the sizes; only part 0 writes.
            let out = unsafe { run.slice_mut::<u8>(self.out, 0..self.data.len()) };
            out.copy_from_slice(&self.data);
        }
    }
}

fn literal(
    launcher: &mut Launcher,
    call: &Call<'_>,
    _: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[out] = outs else {
        return Err(unsupported(call));
    };
    let (dtype, shape) = result(call)?;
    // The bytes on the wire are little-endian, as is every machine this runs on.
    let data = call.bytes(2)?.to_vec();
    let bytes = shape.elements(0).and_then(|n| dtype.row_bytes(n));
    if bytes != Some(data.len()) {
        return Err(unsupported(call));
    }
    launcher.step(Literal { data, out }, &[], &[out]);
    Ok(())
}

struct Arange {
    start: f64,
    step: f64,
    n: usize,
    dtype: DType,
    out: Reg,
}

impl Arange {
    /// # Safety
    /// As for [`Kernel::run`]; `T` must be the dtype's type.
    unsafe fn fill<T>(&self, run: &Run<'_>, part: usize, parts: usize, cast: impl Fn(f64) -> T) {
        let range = split_if_worth(self.n, 64, 4096, part, parts);
        let first = range.start;
        // SAFETY: the result has `n` elements of this type; parts write elements of their own.
        let out = unsafe { run.slice_mut::<T>(self.out, range) };
        for (i, o) in out.iter_mut().enumerate() {
            *o = cast(self.start + (first + i) as f64 * self.step);
        }
    }
}

fn counts(call: &Call<'_>) -> bool {
    use DType::{BF16, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    let dtype = call.dtype(3);
    dtype.is_ok_and(|d| {
        matches!(
            d,
            U8 | U16 | U32 | U64 | I8 | I16 | I32 | I64 | F16 | BF16 | F32 | F64
        )
    })
}

impl Kernel for Arange {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        // SAFETY: the caller's promise; every arm names the dtype's own type.
        unsafe {
            match self.dtype {
                DType::U8 => self.fill(run, part, parts, |v| v as u8),
                DType::U16 => self.fill(run, part, parts, |v| v as u16),
                DType::U32 => self.fill(run, part, parts, |v| v as u32),
                DType::U64 => self.fill(run, part, parts, |v| v as u64),
                DType::I8 => self.fill(run, part, parts, |v| v as i8),
                DType::I16 => self.fill(run, part, parts, |v| v as i16),
                DType::I32 => self.fill(run, part, parts, |v| v as i32),
                DType::I64 => self.fill(run, part, parts, |v| v as i64),
                DType::F16 => self.fill(run, part, parts, |v| f32_to_f16(to_odd(v))),
                DType::BF16 => self.fill(run, part, parts, |v| f32_to_bf16(to_odd(v))),
                DType::F32 => self.fill(run, part, parts, |v| v as f32),
                DType::F64 => self.fill(run, part, parts, |v| v),
                _ => {}
            }
        }
    }
}

fn arange(
    launcher: &mut Launcher,
    call: &Call<'_>,
    _: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[out] = outs else {
        return Err(unsupported(call));
    };
    let (dtype, shape) = result(call)?;
    let kernel = Arange {
        start: call.float(0)?,
        step: call.float(1)?,
        n: shape.elements(0).ok_or_else(|| unsupported(call))?,
        dtype,
        out,
    };
    launcher.step(kernel, &[], &[out]);
    Ok(())
}
