//! Reductions: which there are, and what each folds with for each dtype.

use hotcell_graph::{
    DType,
    op::{Call, ValueSpec},
};

use super::{
    Entry,
    keys::{BF16_INFINITY, F16_INFINITY},
    reduce::Site,
    reducers as r, statistics as st, unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Launcher, Reg},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "reduce_sum",
        supports: plain,
        launch: sum,
    },
    Entry {
        op: "reduce_prod",
        supports: plain,
        launch: product,
    },
    Entry {
        op: "reduce_max",
        supports: ordered,
        launch: max,
    },
    Entry {
        op: "reduce_min",
        supports: ordered,
        launch: min,
    },
    Entry {
        op: "reduce_any",
        supports: ordered,
        launch: any,
    },
    Entry {
        op: "reduce_all",
        supports: ordered,
        launch: all,
    },
    Entry {
        op: "variance",
        supports: narrow_float,
        launch: variance,
    },
    Entry {
        op: "standard_deviation",
        supports: narrow_float,
        launch: deviation,
    },
    Entry {
        op: "logsumexp",
        supports: narrow_float,
        launch: logsumexp,
    },
];

fn dtype(call: &Call<'_>) -> Option<DType> {
    match call.inputs.first() {
        Some(ValueSpec::Tensor(t)) => Some(t.dtype),
        _ => None,
    }
}

fn plain(call: &Call<'_>) -> bool {
    dtype(call).is_some_and(|d| !d.is_block())
}

/// Whether f32 is enough to compute in; the rest is decomposed.
pub(super) fn narrow_float(call: &Call<'_>) -> bool {
    dtype(call).is_some_and(|d| matches!(d, DType::F32 | DType::F16 | DType::BF16))
}

/// Whether the input's elements have an order.
pub(super) fn ordered(call: &Call<'_>) -> bool {
    dtype(call).is_some_and(|d| !d.is_block() && d != DType::C64)
}

fn site<'a, 'b>(
    launcher: &'a mut Launcher,
    call: &'a Call<'b>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(DType, Site<'a, 'b>), DeviceError> {
    let (&[x], &[out], Some(dtype)) = (ins, outs, dtype(call)) else {
        return Err(unsupported(call));
    };
    let site = Site {
        launcher,
        call,
        x,
        out,
        needs_one: false,
    };
    Ok((dtype, site))
}

fn sum(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::Bool => site.reduce(r::SumBool {}),
        DType::U8 => site.reduce(r::SumU8 {}),
        DType::I8 => site.reduce(r::SumI8 {}),
        DType::U16 => site.reduce(r::SumU16 {}),
        DType::I16 => site.reduce(r::SumI16 {}),
        DType::U32 | DType::I32 => site.reduce(r::Sum32 {}),
        DType::U64 | DType::I64 => site.reduce(r::Sum64 {}),
        DType::F16 => site.reduce(r::SumF16),
        DType::BF16 => site.reduce(r::SumBf16),
        DType::F32 => site.reduce(r::SumF32),
        DType::F64 => site.reduce(r::SumF64),
        DType::C64 => site.reduce(r::SumC64),
        _ => Err(unsupported(call)),
    }
}

fn product(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::Bool => site.reduce(r::ProdBool {}),
        DType::U8 => site.reduce(r::ProdU8 {}),
        DType::I8 => site.reduce(r::ProdI8 {}),
        DType::U16 => site.reduce(r::ProdU16 {}),
        DType::I16 => site.reduce(r::ProdI16 {}),
        DType::U32 | DType::I32 => site.reduce(r::Prod32 {}),
        DType::U64 | DType::I64 => site.reduce(r::Prod64 {}),
        DType::F16 => site.reduce(r::ProdF16),
        DType::BF16 => site.reduce(r::ProdBf16),
        DType::F32 => site.reduce(r::ProdF32),
        DType::F64 => site.reduce(r::ProdF64),
        DType::C64 => site.reduce(r::ProdC64),
        _ => Err(unsupported(call)),
    }
}

fn max(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, 0)
}

fn min(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, -1)
}

/// `flip`: 0 for the largest, −1 for the smallest element.
fn extreme(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    flip: i8,
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let site = Site {
        needs_one: true,
        ..site
    };
    let (f8, f16, f32, f64) = (flip, i16::from(flip), i32::from(flip), i64::from(flip));
    let half = |infinity: i16, nan| r::MaxHalf {
        flip: f16,
        infinity,
        nan,
    };
    match dtype {
        DType::Bool if flip == 0 => site.reduce(r::Any8 { mask: u8::MAX }),
        DType::Bool => site.reduce(r::All8 { mask: u8::MAX }),
        DType::U8 => site.reduce(r::Max8 { flip: f8 ^ i8::MIN }),
        DType::I8 => site.reduce(r::Max8 { flip: f8 }),
        DType::U16 => site.reduce(r::Max16 {
            flip: f16 ^ i16::MIN,
        }),
        DType::I16 => site.reduce(r::Max16 { flip: f16 }),
        DType::U32 => site.reduce(r::Max32 {
            flip: f32 ^ i32::MIN,
        }),
        DType::I32 => site.reduce(r::Max32 { flip: f32 }),
        DType::U64 => site.reduce(r::Max64 {
            flip: f64 ^ i64::MIN,
        }),
        DType::I64 => site.reduce(r::Max64 { flip: f64 }),
        DType::F16 => site.reduce(half(F16_INFINITY, 0x7e00)),
        DType::BF16 => site.reduce(half(BF16_INFINITY, 0x7fc0)),
        DType::F32 => site.reduce(r::MaxF32 { flip: f32 }),
        DType::F64 => site.reduce(r::MaxF64 { flip: f64 }),
        _ => Err(unsupported(call)),
    }
}

/// The bits of an element of a dtype that make it other than zero.
fn nonzero_mask(dtype: DType) -> u64 {
    match dtype {
        DType::F16 | DType::BF16 => 0x7fff,
        DType::F32 => 0x7fff_ffff,
        DType::F64 => 0x7fff_ffff_ffff_ffff,
        _ => u64::MAX,
    }
}

fn any(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let mask = nonzero_mask(dtype);
    match dtype.block_bytes() {
        1 => site.reduce(r::Any8 { mask: mask as u8 }),
        2 => site.reduce(r::Any16 { mask: mask as u16 }),
        4 => site.reduce(r::Any32 { mask: mask as u32 }),
        8 => site.reduce(r::Any64 { mask }),
        _ => Err(unsupported(call)),
    }
}

fn all(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let mask = nonzero_mask(dtype);
    match dtype.block_bytes() {
        1 => site.reduce(r::All8 { mask: mask as u8 }),
        2 => site.reduce(r::All16 { mask: mask as u16 }),
        4 => site.reduce(r::All32 { mask: mask as u32 }),
        8 => site.reduce(r::All64 { mask }),
        _ => Err(unsupported(call)),
    }
}

fn variance(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    spread(launcher, call, ins, outs, false)
}

fn deviation(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    spread(launcher, call, ins, outs, true)
}

fn spread(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    root: bool,
) -> Result<(), DeviceError> {
    let ddof = call.int(2)? as f64;
    let wanted = st::Wanted { ddof, root };
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::F16 => site.reduce(st::SpreadF16 { wanted }),
        DType::BF16 => site.reduce(st::SpreadBf16 { wanted }),
        DType::F32 => site.reduce(st::SpreadF32 { wanted }),
        _ => Err(unsupported(call)),
    }
}

fn logsumexp(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::F16 => site.reduce(st::LogSumExpF16 {}),
        DType::BF16 => site.reduce(st::LogSumExpBf16 {}),
        DType::F32 => site.reduce(st::LogSumExpF32 {}),
        _ => Err(unsupported(call)),
    }
}
