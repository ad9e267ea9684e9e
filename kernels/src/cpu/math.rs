//! Elementary functions that the compiler can vectorise without changing a bit.
//!
//! The f32 functions ([`single`]) have no branches and use `mul_add` where they want a fused operation, so every
//! instruction path gives the same bits; the accuracy that `tests` holds them to stands at each.
//! Polynomials without another source are those that N. Juffa published for CUDA's and MLX's kinds of
//! vector unit. Powers ([`power`]) go through f64. The f64 functions ([`double`]) are those of the `libm` crate, plain Rust on every processor.

mod double;
pub mod power;
mod single;

#[cfg(target_arch = "x86_64")]
pub use single::exp_avx512;
pub use single::{exp, exp_down_to_normal, log, log_of_normal, softplus, softplus_power};

/// A float that elementwise ops compute with.
pub trait Real: Copy + PartialOrd {
    /// `e^x`.
    fn exp(self) -> Self;
    /// `e^x − 1`.
    fn expm1(self) -> Self;
    /// Natural logarithm.
    fn log(self) -> Self;
    /// `ln(1 + x)`.
    fn log1p(self) -> Self;
    /// Logarithm to base 2.
    fn log2(self) -> Self;
    /// Sine of radians.
    fn sin(self) -> Self;
    /// Cosine of radians.
    fn cos(self) -> Self;
    /// Tangent of radians.
    fn tan(self) -> Self;
    /// Inverse sine.
    fn asin(self) -> Self;
    /// Inverse cosine.
    fn acos(self) -> Self;
    /// Inverse tangent.
    fn atan(self) -> Self;
    /// Hyperbolic sine.
    fn sinh(self) -> Self;
    /// Hyperbolic cosine.
    fn cosh(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Inverse hyperbolic sine.
    fn asinh(self) -> Self;
    /// Inverse hyperbolic cosine.
    fn acosh(self) -> Self;
    /// Inverse hyperbolic tangent.
    fn atanh(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;
    /// Its inverse.
    fn erfinv(self) -> Self;
    /// `1 / (1 + e^−x)`.
    fn sigmoid(self) -> Self;
    /// `x · sigmoid(x)`.
    fn silu(self) -> Self;
    /// `self` to the power `y`, as C's `pow`.
    fn pow(self, y: Self) -> Self;
    /// The angle of the point (`x`, `self`).
    fn atan2(self, x: Self) -> Self;
    /// `ln(e^self + e^y)`.
    fn logaddexp(self, y: Self) -> Self;
}

/// Beyond this, an f32 angle is reduced in f64 (`sin`, `cos`, `tan` of [`Real`] are wrong there).
pub const LARGEST_ANGLE: f32 = 100_000.0;

/// Implements [`Real`] by the functions of a module.
macro_rules! real {
    ($t:ident, $functions:ident: $($one:ident)*; $($two:ident)*) => {
        impl Real for $t {
            $(
                #[inline(always)]
                fn $one(self) -> $t {
                    $functions::$one(self)
                }
            )*
            $(
                #[inline(always)]
                fn $two(self, y: $t) -> $t {
                    $functions::$two(self, y)
                }
            )*
        }
    };
}
real!(f32, single: exp expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfinv
    sigmoid silu; pow atan2 logaddexp);
real!(f64, double: exp expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfinv
    sigmoid silu; pow atan2 logaddexp);

/// `sin`, `cos` and `tan` of any angle, one at a time: what [`LARGEST_ANGLE`] excludes.
#[cold]
pub fn of_large_angle(x: f32, function: fn(f64) -> f64) -> f32 {
    function(x as f64) as f32
}
