//! Elementary functions of f64: those of the `libm` crate, and what it lacks.

pub(super) use libm::{
    acos, asin, asinh, atan, atan2, atanh, cos, cosh, erf, exp, expm1, log, log1p, log2, pow, sin,
    sinh, tan, tanh,
};

/// By Halley's steps from Winitzki's estimate; in the tails on `erfc`, which keeps its digits there.
pub(super) fn erfinv(x: f64) -> f64 {
    let a = x.abs();
    if a >= 1.0 || a.is_nan() || a == 0.0 {
        return match a {
            1.0 => f64::INFINITY.copysign(x),
            0.0 => x,
            _ => f64::NAN,
        };
    }
    let l = libm::log1p(-a * a);
    let b = 2.0 / (std::f64::consts::PI * 0.147) + 0.5 * l;
    let mut y = libm::sqrt(libm::sqrt(b * b - l / 0.147) - b);
    if a < 1e-8 {
        y = a * 0.886_226_925_452_758; // √π / 2
    }
    for _ in 0..4 {
        let wrong = if a < 0.5 {
            libm::erf(y) - a
        } else {
            (1.0 - a) - libm::erfc(y)
        };
        let u = wrong / (std::f64::consts::FRAC_2_SQRT_PI * libm::exp(-y * y));
        y -= u / (1.0 + y * u);
    }
    y.copysign(x)
}

/// libm's goes on below 1.
pub(super) fn acosh(x: f64) -> f64 {
    if x < 1.0 { f64::NAN } else { libm::acosh(x) }
}

pub(super) fn sigmoid(x: f64) -> f64 {
    let e = exp(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + exp(-x))
}

pub(super) fn logaddexp(x: f64, y: f64) -> f64 {
    let high = if x > y || x.is_nan() { x } else { y };
    let sum = high + log1p(exp(-(x - y).abs()));
    // Equal infinities have no difference.
    if x == y {
        x + std::f64::consts::LN_2
    } else {
        sum
    }
}
