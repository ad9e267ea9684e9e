//! Instructions on integers and bools.

use super::code::{Code, binary, unary};
use crate::cpu::path::CpuPath;

/// Integers with the corner cases that every backend shares.
trait Int: Copy {
    fn floor_divide(self, by: Self) -> Self;
    fn remainder(self, by: Self) -> Self;
    fn power(self, exponent: Self) -> Self;
    fn shift_left(self, by: Self) -> Self;
    fn shift_right(self, by: Self) -> Self;
    fn absolute(self) -> Self;
    fn sign(self) -> Self;
}

fn power<T: Copy>(base: T, mut exponent: u64, one: T, mul: impl Fn(T, T) -> T) -> T {
    let (mut base, mut result) = (base, one);
    while exponent != 0 {
        if exponent & 1 != 0 {
            result = mul(result, base);
        }
        base = mul(base, base);
        exponent >>= 1;
    }
    result
}

macro_rules! unsigned {
    ($($t:ident)*) => {$(
        impl Int for $t {
            #[inline(always)]
            fn floor_divide(self, by: $t) -> $t {
                self.checked_div(by).unwrap_or(0)
            }
            #[inline(always)]
            fn remainder(self, by: $t) -> $t {
                self.checked_rem(by).unwrap_or(0)
            }
            #[inline(always)]
            fn power(self, exponent: $t) -> $t {
                power(self, exponent as u64, 1, $t::wrapping_mul)
            }
            #[inline(always)]
            fn shift_left(self, by: $t) -> $t {
                let shifted = self.wrapping_shl(by as u32);
                if by < $t::BITS as $t { shifted } else { 0 }
            }
            #[inline(always)]
            fn shift_right(self, by: $t) -> $t {
                let shifted = self.wrapping_shr(by as u32);
                if by < $t::BITS as $t { shifted } else { 0 }
            }
            #[inline(always)]
            fn absolute(self) -> $t {
                self
            }
            #[inline(always)]
            fn sign(self) -> $t {
                (self != 0) as $t
            }
        }
    )*};
}
unsigned!(u8 u16 u32 u64);

macro_rules! signed {
    ($($t:ident $u:ident)*) => {$(
        impl Int for $t {
            #[inline(always)]
            fn floor_divide(self, by: $t) -> $t {
                if by == 0 {
                    return 0;
                }
                let (q, r) = (self.wrapping_div(by), self.wrapping_rem(by));
                if r != 0 && (r < 0) != (by < 0) { q - 1 } else { q }
            }
            #[inline(always)]
            fn remainder(self, by: $t) -> $t {
                if by == 0 {
                    return 0;
                }
                let r = self.wrapping_rem(by);
                if r != 0 && (r < 0) != (by < 0) { r + by } else { r }
            }
            #[inline(always)]
            fn power(self, exponent: $t) -> $t {
                if exponent < 0 {
                    return 0;
                }
                power(self, exponent as u64, 1, $t::wrapping_mul)
            }
            #[inline(always)]
            fn shift_left(self, by: $t) -> $t {
                let shifted = self.wrapping_shl(by as u32);
                if (by as $u) < $t::BITS as $u { shifted } else { 0 }
            }
            #[inline(always)]
            fn shift_right(self, by: $t) -> $t {
                let by = if (by as $u) < $t::BITS as $u { by as u32 } else { $t::BITS - 1 };
                self.wrapping_shr(by)
            }
            #[inline(always)]
            fn absolute(self) -> $t {
                self.wrapping_abs()
            }
            #[inline(always)]
            fn sign(self) -> $t {
                self.signum()
            }
        }
    )*};
}
signed!(i8 u8 i16 u16 i32 u32 i64 u64);

/// What integers and bools, as bytes, have in common.
macro_rules! common {
    ($op:expr, $path:expr, $t:ident) => {
        match $op {
            "logical_not" => unary!(narrow1, $path, $t => u8, |x| (x == 0) as u8),
            "is_nan" | "is_inf" => unary!(narrow1, $path, $t => u8, |_x| 0),
            "is_finite" => unary!(narrow1, $path, $t => u8, |_x| 1),
            "maximum" => binary!(narrow2, $path, $t => $t, |a, b| a.max(b)),
            "minimum" => binary!(narrow2, $path, $t => $t, |a, b| a.min(b)),
            "equal" => binary!(narrow2, $path, $t => u8, |a, b| (a == b) as u8),
            "not_equal" => binary!(narrow2, $path, $t => u8, |a, b| (a != b) as u8),
            "less" => binary!(narrow2, $path, $t => u8, |a, b| (a < b) as u8),
            "less_equal" => binary!(narrow2, $path, $t => u8, |a, b| (a <= b) as u8),
            "greater" => binary!(narrow2, $path, $t => u8, |a, b| (a > b) as u8),
            "greater_equal" => binary!(narrow2, $path, $t => u8, |a, b| (a >= b) as u8),
            "logical_and" => binary!(narrow2, $path, $t => u8, |a, b| ((a != 0) & (b != 0)) as u8),
            "logical_or" => binary!(narrow2, $path, $t => u8, |a, b| ((a | b) != 0) as u8),
            "logical_xor" => binary!(narrow2, $path, $t => u8, |a, b| ((a != 0) ^ (b != 0)) as u8),
            "bitwise_and" => binary!(narrow2, $path, $t => $t, |a, b| a & b),
            "bitwise_or" => binary!(narrow2, $path, $t => $t, |a, b| a | b),
            "bitwise_xor" => binary!(narrow2, $path, $t => $t, |a, b| a ^ b),
            _ => None,
        }
    };
}

macro_rules! int_tables {
    ($($t:ident)*) => {$(
        pub(super) fn $t(op: &str, path: CpuPath) -> Option<Code> {
            match op {
                "floor" | "ceil" | "round" | "trunc" => unary!(narrow1, path, $t => $t, |x| x),
                "neg" => unary!(narrow1, path, $t => $t, |x| x.wrapping_neg()),
                "abs" => unary!(narrow1, path, $t => $t, |x| x.absolute()),
                "sign" => unary!(narrow1, path, $t => $t, |x| x.sign()),
                "square" => unary!(narrow1, path, $t => $t, |x| x.wrapping_mul(x)),
                "bitwise_not" => unary!(narrow1, path, $t => $t, |x| !x),
                "add" => binary!(narrow2, path, $t => $t, |a, b| a.wrapping_add(b)),
                "sub" => binary!(narrow2, path, $t => $t, |a, b| a.wrapping_sub(b)),
                "mul" => binary!(narrow2, path, $t => $t, |a, b| a.wrapping_mul(b)),
                "floor_divide" => binary!(narrow2, path, $t => $t, |a, b| a.floor_divide(b)),
                "remainder" => binary!(narrow2, path, $t => $t, |a, b| a.remainder(b)),
                "pow" => binary!(narrow2, path, $t => $t, |a, b| a.power(b)),
                "left_shift" => binary!(narrow2, path, $t => $t, |a, b| a.shift_left(b)),
                "right_shift" => binary!(narrow2, path, $t => $t, |a, b| a.shift_right(b)),
                _ => common!(op, path, $t),
            }
        }
    )*};
}
int_tables!(u8 u16 u32 u64 i8 i16 i32 i64);

/// Bools are bytes; any that is not 0 counts as true.
pub(super) fn bools(op: &str, path: CpuPath) -> Option<Code> {
    match op {
        "bitwise_not" => unary!(narrow1, path, u8 => u8, |x| (x == 0) as u8),
        "abs" | "sign" => unary!(narrow1, path, u8 => u8, |x| (x != 0) as u8),
        "maximum" | "bitwise_or" => bools("logical_or", path),
        "minimum" | "bitwise_and" => bools("logical_and", path),
        "not_equal" | "bitwise_xor" => bools("logical_xor", path),
        "equal" => binary!(narrow2, path, u8 => u8, |a, b| ((a != 0) == (b != 0)) as u8),
        "less" => binary!(narrow2, path, u8 => u8, |a, b| ((a == 0) & (b != 0)) as u8),
        "less_equal" => binary!(narrow2, path, u8 => u8, |a, b| ((a == 0) | (b != 0)) as u8),
        "greater" => binary!(narrow2, path, u8 => u8, |a, b| ((a != 0) & (b == 0)) as u8),
        "greater_equal" => binary!(narrow2, path, u8 => u8, |a, b| ((a != 0) | (b == 0)) as u8),
        _ => common!(op, path, u8),
    }
}
