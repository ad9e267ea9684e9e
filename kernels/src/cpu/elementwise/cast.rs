//! Conversions between dtypes. f16 and bf16 live in registers as f32 numbers that they can hold.

use hotcell_graph::DType;

#[cfg(target_arch = "x86_64")]
use super::half;
use super::{
    code::{Code, unary},
    float::Complex,
};
use crate::cpu::{
    lanes::{self, to_odd},
    path::CpuPath,
};

/// The same for the bits of a 64-bit integer that an f64 has no room for.
#[inline(always)]
fn sticky(x: u64) -> u64 {
    let kept = (x & !0xfff) | (((x & 0xfff) != 0) as u64) << 12;
    if x >> 53 != 0 { kept } else { x }
}

#[inline(always)]
fn f16(x: f32) -> f32 {
    lanes::f16_to_f32(lanes::f32_to_f16(x))
}

#[inline(always)]
fn bf16(x: f32) -> f32 {
    lanes::bf16_to_f32(lanes::f32_to_bf16(x))
}

/// Rounds an f32 register to what a half type holds; `None` for others.
pub(super) fn round(to: DType, path: CpuPath) -> Option<Code> {
    #[cfg(target_arch = "x86_64")]
    if let Some(code) = half::round(to, path) {
        return Some(code);
    }
    match to {
        DType::F16 => unary!(wide1, path, f32 => f32, |x| f16(x)),
        DType::BF16 => unary!(wide1, path, f32 => f32, |x| bf16(x)),
        _ => None,
    }
}

/// Memory of a half type into an f32 register.
pub(super) fn widen(from: DType, path: CpuPath) -> Option<Code> {
    #[cfg(target_arch = "x86_64")]
    if let Some(code) = half::widen(from, path) {
        return Some(code);
    }
    match from {
        DType::F16 => unary!(wide1, path, u16 => f32, |x| lanes::f16_to_f32(x)),
        DType::BF16 => unary!(wide1, path, u16 => f32, |x| lanes::bf16_to_f32(x)),
        _ => None,
    }
}

/// An f32 register into memory of a half type.
pub(super) fn narrow(to: DType, path: CpuPath) -> Option<Code> {
    #[cfg(target_arch = "x86_64")]
    if let Some(code) = half::narrow(to, path) {
        return Some(code);
    }
    match to {
        DType::F16 => unary!(wide1, path, f32 => u16, |x| lanes::f32_to_f16(x)),
        DType::BF16 => unary!(wide1, path, f32 => u16, |x| lanes::f32_to_bf16(x)),
        _ => None,
    }
}

/// An op between memory of a half type, where there is such an instruction.
pub(super) fn whole(op: &str, dtype: DType, path: CpuPath) -> Option<Code> {
    #[cfg(target_arch = "x86_64")]
    return half::whole(op, dtype, path);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (op, dtype, path);
        None
    }
}

/// Copies elements of so many bytes.
pub(super) fn copy(bytes: usize, path: CpuPath) -> Option<Code> {
    match bytes {
        1 => unary!(narrow1, path, u8 => u8, |x| x),
        2 => unary!(narrow1, path, u16 => u16, |x| x),
        4 => unary!(narrow1, path, u32 => u32, |x| x),
        8 => unary!(narrow1, path, u64 => u64, |x| x),
        _ => None,
    }
}

/// From a number type to another register type; bytes of equal integers are copied.
macro_rules! from_number {
    ($($t:ident)*) => {$(
        fn $t(to: DType, path: CpuPath) -> Option<Code> {
            match to {
                DType::Bool => unary!(narrow1, path, $t => u8, |x| (x != (0 as $t)) as u8),
                DType::U8 => unary!(narrow1, path, $t => u8, |x| x as u8),
                DType::U16 => unary!(narrow1, path, $t => u16, |x| x as u16),
                DType::U32 => unary!(narrow1, path, $t => u32, |x| x as u32),
                DType::U64 => unary!(narrow1, path, $t => u64, |x| x as u64),
                DType::I8 => unary!(narrow1, path, $t => i8, |x| x as i8),
                DType::I16 => unary!(narrow1, path, $t => i16, |x| x as i16),
                DType::I32 => unary!(narrow1, path, $t => i32, |x| x as i32),
                DType::I64 => unary!(narrow1, path, $t => i64, |x| x as i64),
                DType::F32 => unary!(wide1, path, $t => f32, |x| x as f32),
                DType::F64 => unary!(wide1, path, $t => f64, |x| x as f64),
                _ => None,
            }
        }
    )*};
}
from_number!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

fn bools(to: DType, path: CpuPath) -> Option<Code> {
    match to {
        DType::F32 => unary!(narrow1, path, u8 => f32, |x| (x != 0) as u8 as f32),
        DType::F64 => unary!(narrow1, path, u8 => f64, |x| (x != 0) as u8 as f64),
        DType::U8 | DType::I8 => unary!(narrow1, path, u8 => u8, |x| (x != 0) as u8),
        DType::U16 | DType::I16 => unary!(narrow1, path, u8 => u16, |x| (x != 0) as u16),
        DType::U32 | DType::I32 => unary!(narrow1, path, u8 => u32, |x| (x != 0) as u32),
        DType::U64 | DType::I64 => unary!(narrow1, path, u8 => u64, |x| (x != 0) as u64),
        _ => None,
    }
}

fn number(from: DType, to: DType, path: CpuPath) -> Option<Code> {
    match from {
        DType::Bool => bools(to, path),
        DType::U8 => u8(to, path),
        DType::U16 => u16(to, path),
        DType::U32 => u32(to, path),
        DType::U64 => u64(to, path),
        DType::I8 => i8(to, path),
        DType::I16 => i16(to, path),
        DType::I32 => i32(to, path),
        DType::I64 => i64(to, path),
        DType::F16 | DType::BF16 | DType::F32 => f32(to, path),
        DType::F64 => f64(to, path),
        _ => None,
    }
}

/// The instructions that take a register of one dtype to one of another; none when the register serves as it is.
/// What becomes f16 or bf16 is still to be rounded, but once. `None`: not between plain dtypes.
pub(super) fn steps(from: DType, to: DType, path: CpuPath) -> Option<Vec<(Code, DType)>> {
    let half = |d: DType| matches!(d, DType::F16 | DType::BF16);
    if from == to {
        return Some(vec![]);
    }
    if to == DType::C64 {
        let mut steps = steps(from, DType::F32, path)?;
        let code = unary!(narrow1, path, f32 => Complex, |x| Complex { re: x, im: 0.0 });
        steps.push((code?, to));
        return Some(steps);
    }
    if from == DType::C64 {
        if to == DType::Bool {
            let code =
                unary!(narrow1, path, Complex => u8, |x| ((x.re != 0.0) | (x.im != 0.0)) as u8);
            return Some(vec![(code?, to)]);
        }
        let code = unary!(narrow1, path, Complex => f32, |x| x.re);
        let mut all = vec![(code?, DType::F32)];
        all.extend(steps(DType::F32, to, path)?);
        return Some(all);
    }
    if !half(to) {
        if half(from) && to == DType::F32 {
            return Some(vec![]);
        }
        return Some(vec![(number(from, to, path)?, to)]);
    }
    let code = match from {
        DType::F16 | DType::BF16 | DType::F32 => return Some(vec![]),
        DType::F64 => unary!(wide1, path, f64 => f32, |x| to_odd(x)),
        DType::U32 => unary!(narrow1, path, u32 => f32, |x| to_odd(x as f64)),
        DType::I32 => unary!(narrow1, path, i32 => f32, |x| to_odd(x as f64)),
        DType::U64 => unary!(narrow1, path, u64 => f32, |x| to_odd(sticky(x) as f64)),
        DType::I64 => unary!(narrow1, path, i64 => f32, |x| {
            let y = to_odd(sticky(x.unsigned_abs()) as f64);
            if x < 0 { -y } else { y }
        }),
        _ => number(from, DType::F32, path),
    };
    Some(vec![(code?, DType::F32)])
}
