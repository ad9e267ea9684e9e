//! Instructions on f32 (and, between conversions, f16 and bf16), f64 and c64.

use super::{
    code::{self, Binary, Code, Unary, binary, ternary, unary},
    power, softplus,
};
use std::f32::consts::FRAC_1_SQRT_2;

use crate::cpu::{
    math::{self, Real},
    path::CpuPath,
};

/// √(2/π).
const SQRT_2_PI: f32 = 0.797_884_6;

/// `a` less `b ⌊a / b⌋`, exactly but for one rounding where the signs differ. Vectors for quotients that have room in the
/// significand, one by one for the rest.
macro_rules! remainder {
    ($path:expr, $t:ident) => {{
        /// A quotient below it is off by no more than a quarter.
        const MOST: $t = (1u64 << ($t::MANTISSA_DIGITS - 2)) as $t;
        #[inline(always)]
        fn of_truncated(r: $t, b: $t) -> $t {
            let r = if (r != 0.0) & ((r < 0.0) != (b < 0.0)) { r + b } else { r };
            if r == 0.0 { r.copysign(b) } else { r }
        }
        struct Op;
        impl Binary for Op {
            type In = $t;
            type Out = $t;
            const RESCUE: bool = true;
            #[inline(always)]
            fn call(a: $t, b: $t) -> $t {
                // The nearest quotient leaves at most 3/4 b: a multiple of both units that is no longer than b, hence exact.
                let q = (a / b).round_ties_even();
                let r = q.mul_add(-b, a);
                // Also for an infinite b.
                of_truncated(if q == 0.0 { a } else { r }, b)
            }
            #[inline(always)]
            fn outside(a: $t, b: $t) -> bool {
                // Where b is 0 or a infinite, there is no number to find.
                ((a / b).abs() >= MOST) & (b != 0.0) & (a.abs() < $t::INFINITY)
            }
            fn rescue(a: $t, b: $t) -> $t {
                of_truncated(a % b, b)
            }
        }
        Some(code::wide2::<Op>($path))
    }};
}

/// A NaN on the left is taken, one on the right is what is left over.
#[inline(always)]
fn minimum<T: Real>(a: T, b: T) -> T {
    #[allow(clippy::eq_op)] // of a NaN
    let nan = a != a;
    if a < b || nan { a } else { b }
}

/// A NaN stays.
#[inline(always)]
fn clamp<T: Real>(x: T, low: T, high: T) -> T {
    #[allow(clippy::eq_op)] // of a NaN
    let nan = x != x;
    let x = if x > low || nan { x } else { low };
    minimum(x, high)
}

/// The part of the table that both widths share.
macro_rules! float_table {
    ($op:expr, $path:expr, $t:ident) => {
        match $op {
            "neg" => unary!(wide1, $path, $t => $t, |x| -x),
            "abs" => unary!(wide1, $path, $t => $t, |x| x.abs()),
            "sign" => unary!(wide1, $path, $t => $t, |x| {
                // NaN and both zeros are their own sign.
                let y = if x > 0.0 { 1.0 } else { x };
                if x < 0.0 { -1.0 } else { y }
            }),
            "square" => unary!(wide1, $path, $t => $t, |x| x * x),
            "floor" => unary!(wide1, $path, $t => $t, |x| x.floor()),
            "ceil" => unary!(wide1, $path, $t => $t, |x| x.ceil()),
            "round" => unary!(wide1, $path, $t => $t, |x| x.round_ties_even()),
            "trunc" => unary!(wide1, $path, $t => $t, |x| x.trunc()),
            "sqrt" => unary!(wide1, $path, $t => $t, |x| x.sqrt()),
            "rsqrt" => unary!(wide1, $path, $t => $t, |x| 1.0 / x.sqrt()),
            "reciprocal" => unary!(wide1, $path, $t => $t, |x| 1.0 / x),
            "exp" => unary!(wide1 asks, $path, $t => $t, |x| Real::exp(x)),
            "expm1" => unary!(wide1 asks, $path, $t => $t, |x| Real::expm1(x)),
            "log" => unary!(wide1 asks, $path, $t => $t, |x| Real::log(x)),
            "log1p" => unary!(wide1 asks, $path, $t => $t, |x| Real::log1p(x)),
            "log2" => unary!(wide1 asks, $path, $t => $t, |x| Real::log2(x)),
            "asin" => unary!(wide1 asks, $path, $t => $t, |x| Real::asin(x)),
            "acos" => unary!(wide1 asks, $path, $t => $t, |x| Real::acos(x)),
            "atan" => unary!(wide1 asks, $path, $t => $t, |x| Real::atan(x)),
            "sinh" => unary!(wide1 asks, $path, $t => $t, |x| Real::sinh(x)),
            "cosh" => unary!(wide1 asks, $path, $t => $t, |x| Real::cosh(x)),
            "tanh" => unary!(wide1 asks, $path, $t => $t, |x| Real::tanh(x)),
            "asinh" => unary!(wide1 asks, $path, $t => $t, |x| Real::asinh(x)),
            "acosh" => unary!(wide1 asks, $path, $t => $t, |x| Real::acosh(x)),
            "atanh" => unary!(wide1 asks, $path, $t => $t, |x| Real::atanh(x)),
            "erf" => unary!(wide1 asks, $path, $t => $t, |x| Real::erf(x)),
            "erfinv" => unary!(wide1 asks, $path, $t => $t, |x| Real::erfinv(x)),
            "sigmoid" => unary!(wide1 asks, $path, $t => $t, |x| Real::sigmoid(x)),
            "silu" => unary!(wide1 asks, $path, $t => $t, |x| Real::silu(x)),
            "logical_not" => unary!(wide1, $path, $t => u8, |x| (x == 0.0) as u8),
            "is_nan" => unary!(wide1, $path, $t => u8, |x| x.is_nan() as u8),
            "is_inf" => unary!(wide1, $path, $t => u8, |x| x.is_infinite() as u8),
            "is_finite" => unary!(wide1, $path, $t => u8, |x| x.is_finite() as u8),
            "add" => binary!(wide2, $path, $t => $t, |a, b| a + b),
            "sub" => binary!(wide2, $path, $t => $t, |a, b| a - b),
            "mul" => binary!(wide2, $path, $t => $t, |a, b| a * b),
            "div" => binary!(wide2, $path, $t => $t, |a, b| a / b),
            // A NaN on the left is taken, one on the right is what is left over.
            "maximum" => binary!(wide2, $path, $t => $t, |a, b| if a > b || a.is_nan() { a } else { b }),
            "minimum" => binary!(wide2, $path, $t => $t, |a, b| minimum(a, b)),
            "floor_divide" => binary!(wide2, $path, $t => $t, |a, b| (a / b).floor()),
            "remainder" => remainder!($path, $t),
            "clamp" => ternary!(wide3, $path, $t => $t, |x, low, high| clamp(x, low, high)),
            "pow" => binary!(wide2, $path, $t => $t, |a, b| Real::pow(a, b)),
            "atan2" => binary!(wide2, $path, $t => $t, |a, b| Real::atan2(a, b)),
            "logaddexp" => binary!(wide2, $path, $t => $t, |a, b| Real::logaddexp(a, b)),
            "equal" => binary!(wide2, $path, $t => u8, |a, b| (a == b) as u8),
            "not_equal" => binary!(wide2, $path, $t => u8, |a, b| (a != b) as u8),
            "less" => binary!(wide2, $path, $t => u8, |a, b| (a < b) as u8),
            "less_equal" => binary!(wide2, $path, $t => u8, |a, b| (a <= b) as u8),
            "greater" => binary!(wide2, $path, $t => u8, |a, b| (a > b) as u8),
            "greater_equal" => binary!(wide2, $path, $t => u8, |a, b| (a >= b) as u8),
            "logical_and" => binary!(wide2, $path, $t => u8, |a, b| ((a != 0.0) & (b != 0.0)) as u8),
            "logical_or" => binary!(wide2, $path, $t => u8, |a, b| ((a != 0.0) | (b != 0.0)) as u8),
            "logical_xor" => binary!(wide2, $path, $t => u8, |a, b| ((a != 0.0) ^ (b != 0.0)) as u8),
            _ => None,
        }
    };
}

/// `sin`, `cos` and `tan` of f32: vectors for angles that f32 can reduce, f64 for the rest.
macro_rules! angle {
    ($path:expr, $name:ident) => {{
        struct Op;
        impl Unary for Op {
            type In = f32;
            type Out = f32;
            const RESCUE: bool = true;
            #[inline(always)]
            fn call(x: f32) -> f32 {
                Real::$name(x)
            }
            #[inline(always)]
            fn outside(x: f32) -> bool {
                x.abs() > math::LARGEST_ANGLE
            }
            fn rescue(x: f32) -> f32 {
                math::of_large_angle(x, libm::$name)
            }
        }
        Some(code::wide1::<Op>($path))
    }};
}

#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    let inner = (x * (x * x * 0.044715 + 1.0)) * SQRT_2_PI;
    x * ((Real::tanh(inner) + 1.0) * 0.5)
}

pub(super) fn f32(op: &str, path: CpuPath) -> Option<Code> {
    match op {
        "sin" => angle!(path, sin),
        "cos" => angle!(path, cos),
        "tan" => angle!(path, tan),
        "pow" => Some(power::code(path)),
        // What `silu` and `mul` give, in one.
        "swiglu" => binary!(wide2, path, f32 => f32, |a, b| Real::silu(a) * b),
        // As their parts in the catalogue, one operation after the other.
        "gelu" => unary!(wide1 asks, path, f32 => f32, |x| {
            x * ((Real::erf(x * FRAC_1_SQRT_2) + 1.0) * 0.5)
        }),
        "gelu_tanh" => unary!(wide1 asks, path, f32 => f32, |x| gelu_tanh(x)),
        "geglu" => binary!(wide2, path, f32 => f32, |gate, up| gelu_tanh(gate) * up),
        "gelu_quick" => unary!(wide1 asks, path, f32 => f32, |x| x * Real::sigmoid(x * 1.702)),
        "softplus" => Some(softplus::code(path)),
        "silu_limit" => ternary!(wide3, path, f32 => f32, |gate, alpha, limit| {
            let gate = minimum(gate, limit);
            gate * Real::sigmoid(gate * alpha)
        }),
        "swiglu_limit" => ternary!(wide3, path, f32 => f32, |silu, up, limit| {
            silu * (clamp(up, -limit, limit) + 1.0)
        }),
        "is_close" => ternary!(wide3, path, f32 => u8, |a, b, allowed| {
            (((a - b).abs() <= allowed) & b.is_finite() | (a == b)) as u8
        }),
        "size_times_plus" => {
            ternary!(wide3, path, f32 => f32, |x, factor, term| x.abs() * factor + term)
        }
        _ => float_table!(op, path, f32),
    }
}

pub(super) fn f64(op: &str, path: CpuPath) -> Option<Code> {
    match op {
        "sin" => unary!(narrow1, path, f64 => f64, |x| Real::sin(x)),
        "cos" => unary!(narrow1, path, f64 => f64, |x| Real::cos(x)),
        "tan" => unary!(narrow1, path, f64 => f64, |x| Real::tan(x)),
        _ => float_table!(op, path, f64),
    }
}

/// A complex number as `c64` stores it.
#[derive(Clone, Copy, PartialEq)]
#[repr(C)]
pub(super) struct Complex {
    pub re: f32,
    pub im: f32,
}

impl Complex {
    #[inline(always)]
    fn mul(self, b: Complex) -> Complex {
        Complex {
            re: self.re * b.re - self.im * b.im,
            im: self.re * b.im + self.im * b.re,
        }
    }

    /// Through f64: no sum of squares of f32 leaves its range.
    #[inline(always)]
    fn div(self, b: Complex) -> Complex {
        let (ar, ai) = (self.re as f64, self.im as f64);
        let (br, bi) = (b.re as f64, b.im as f64);
        let d = br * br + bi * bi;
        Complex {
            re: ((ar * br + ai * bi) / d) as f32,
            im: ((ai * br - ar * bi) / d) as f32,
        }
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        let (re, im) = (self.re as f64, self.im as f64);
        let h = (re * re + im * im).sqrt() as f32;
        if self.re.is_infinite() || self.im.is_infinite() {
            f32::INFINITY
        } else {
            h
        }
    }
}

pub(super) fn c64(op: &str, path: CpuPath) -> Option<Code> {
    type C = Complex;
    match op {
        "neg" => unary!(narrow1, path, C => C, |x| C { re: -x.re, im: -x.im }),
        "square" => unary!(narrow1, path, C => C, |x| x.mul(x)),
        "abs" => unary!(narrow1, path, C => f32, |x| x.abs()),
        "reciprocal" => unary!(narrow1, path, C => C, |x| C { re: 1.0, im: 0.0 }.div(x)),
        "add" => {
            binary!(narrow2, path, C => C, |a, b| C { re: a.re + b.re, im: a.im + b.im })
        }
        "sub" => {
            binary!(narrow2, path, C => C, |a, b| C { re: a.re - b.re, im: a.im - b.im })
        }
        "mul" => binary!(narrow2, path, C => C, |a, b| a.mul(b)),
        "div" => binary!(narrow2, path, C => C, |a, b| a.div(b)),
        "equal" => binary!(narrow2, path, C => u8, |a, b| (a == b) as u8),
        "not_equal" => binary!(narrow2, path, C => u8, |a, b| (a != b) as u8),
        _ => None,
    }
}
