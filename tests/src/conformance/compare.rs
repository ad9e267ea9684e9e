//! Whether what was computed is what should have been.

use hotcell_graph::{DType, dtype::Kind};

pub use hotcell_client::debug::{rounds_others, tolerance};

use super::Check;

/// One real number of an element: a complex one has two.
fn number(dtype: DType, bytes: &[u8]) -> f64 {
    let two = |b: &[u8]| b.try_into().map(u16::from_le_bytes).unwrap_or_default();
    match dtype {
        DType::F16 => f64::from(half(two(bytes))),
        DType::BF16 => f64::from(f32::from_bits(u32::from(two(bytes)) << 16)),
        DType::F64 => bytes.try_into().map(f64::from_le_bytes).unwrap_or_default(),
        _ => bytes
            .try_into()
            .map(|b| f64::from(f32::from_le_bytes(b)))
            .unwrap_or_default(),
    }
}

/// The value of an f16, written out so that it does not share code with what is tested.
fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    sign * match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + mantissa) * 2f32.powi(exponent - 25),
    }
}

/// The smallest number above zero: no result can be nearer than that.
fn least(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
        DType::F64 => f64::from_bits(1),
        _ => 2f64.powi(-149),
    }
}

/// Says how `got` differs from `want` by more than the check allows; the bytes are row-major tensors of `dtype`.
///
/// # Errors
/// The difference, for people.
pub fn difference(
    dtype: DType,
    check: Check,
    limit: f64,
    got: &[u8],
    want: &[u8],
) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{} bytes instead of {}", got.len(), want.len()));
    }
    let real = matches!(dtype.kind(), Kind::Float | Kind::Complex);
    let size = if dtype == DType::C64 {
        4
    } else {
        dtype.block_bytes()
    };
    if !real {
        return match got
            .chunks(size)
            .zip(want.chunks(size))
            .position(|(a, b)| a != b)
        {
            None => Ok(()),
            Some(i) => Err(format!(
                "element {i} is {} instead of {} ({} differ)",
                integer(dtype, got, i),
                integer(dtype, want, i),
                got.chunks(size)
                    .zip(want.chunks(size))
                    .filter(|(a, b)| a != b)
                    .count()
            )),
        };
    }
    let decode =
        |bytes: &[u8]| -> Vec<f64> { bytes.chunks(size).map(|b| number(dtype, b)).collect() };
    let (a, b) = (decode(got), decode(want));
    let (mut wrong, mut first) = (0, None);
    for (i, (&x, &y)) in a.iter().zip(&b).enumerate() {
        let same = x == y && x.is_sign_negative() == y.is_sign_negative();
        let close = match check {
            Check::Exact => same || (x.is_nan() && y.is_nan()),
            // Infinities and NaN must be where they should; numbers are compared below, or here one by one.
            _ if !x.is_finite() || !y.is_finite() => x == y || (x.is_nan() && y.is_nan()),
            Check::Each => {
                let d = (x - y).abs();
                d <= least(dtype) || d <= limit.sqrt() * y.abs()
            }
            Check::Together => true,
        };
        if !close {
            wrong += 1;
            first.get_or_insert((i, x, y));
        }
    }
    if let Some((i, x, y)) = first {
        return Err(format!(
            "element {i} is {x:e} instead of {y:e} ({wrong} differ)"
        ));
    }
    if check != Check::Together {
        return Ok(());
    }
    let finite = || a.iter().zip(&b).filter(|(_, y)| y.is_finite());
    // Scaled, so that squares of an f64 do not overflow.
    let scale = finite().fold(0.0, |m: f64, (_, y)| m.max(y.abs()));
    let scale = if scale > 0.0 { scale } else { 1.0 };
    let squares: f64 = finite().map(|(_, y)| (y / scale).powi(2)).sum();
    let errors: f64 = finite().map(|(x, y)| (x / scale - y / scale).powi(2)).sum();
    if errors <= limit * squares {
        return Ok(());
    }
    let worst = a
        .iter()
        .zip(&b)
        .enumerate()
        .filter(|(_, (_, y))| y.is_finite())
        .max_by(|(_, (p, q)), (_, (r, s))| (*p - *q).abs().total_cmp(&(*r - *s).abs()));
    let (i, (x, y)) = worst.unwrap_or((0, (&0.0, &0.0)));
    Err(format!(
        "error {:e}, more than {limit:e}; worst is element {i}, {x:e} instead of {y:e}",
        errors / squares
    ))
}

/// Element `i` as an integer, for messages.
fn integer(dtype: DType, bytes: &[u8], i: usize) -> i128 {
    let size = dtype.block_bytes();
    let raw = bytes.get(i * size..(i + 1) * size).unwrap_or_default();
    let bits = raw.iter().rev().fold(0i128, |n, &b| n << 8 | i128::from(b));
    let negative = dtype.kind() == Kind::Signed && bits >> (8 * size - 1) & 1 == 1;
    if negative {
        bits - (1i128 << (8 * size))
    } else {
        bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn differences_are_seen() {
        let want = f32s(&[1.0, -0.0, f32::NAN, f32::INFINITY, 1e-30]);
        let ok = |check, values: &[f32]| {
            difference(DType::F32, check, 1e-7, &f32s(values), &want).is_ok()
        };
        for check in [Check::Exact, Check::Each, Check::Together] {
            assert!(ok(check, &[1.0, -0.0, -f32::NAN, f32::INFINITY, 1e-30]));
            assert!(!ok(check, &[1.0, -0.0, 0.0, f32::INFINITY, 1e-30]));
            assert!(!ok(check, &[1.0, -0.0, f32::NAN, f32::MAX, 1e-30]));
            assert!(!ok(
                check,
                &[f32::NAN, -0.0, f32::NAN, f32::INFINITY, 1e-30]
            ));
            assert!(!ok(check, &[1.01, -0.0, f32::NAN, f32::INFINITY, 1e-30]));
            assert!(!ok(check, &[1.0, -0.0, f32::NAN, f32::INFINITY]));
        }
        assert!(!ok(
            Check::Exact,
            &[1.0, 0.0, f32::NAN, f32::INFINITY, 1e-30]
        ));
        assert!(ok(Check::Each, &[1.0, 0.0, f32::NAN, f32::INFINITY, 1e-30]));
        assert!(!ok(
            Check::Each,
            &[1.0, 0.0, f32::NAN, f32::INFINITY, 2e-30]
        ));
        assert!(ok(
            Check::Together,
            &[1.0, 0.0, f32::NAN, f32::INFINITY, 2e-30]
        ));
        assert!(difference(DType::I8, Check::Together, 1.0, &[255], &[254]).is_err());
        let halves = |a: u16, b: u16| {
            difference(
                DType::F16,
                Check::Each,
                5e-5,
                &a.to_le_bytes(),
                &b.to_le_bytes(),
            )
            .is_ok()
        };
        // 1 and its neighbour; 1 and 1.0625; the smallest number and zero; 65504 and infinity.
        assert!(halves(0x3c00, 0x3c01) && !halves(0x3c00, 0x3c40));
        assert!(halves(1, 0) && !halves(0x7bff, 0x7c00));
    }

    #[test]
    fn halves_have_their_values() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x3555, 0.333_251_95),
        ] {
            assert_eq!(half(bits), value);
        }
        assert!(half(0x7e00).is_nan() && half(0xfc00) == f32::NEG_INFINITY);
    }
}
