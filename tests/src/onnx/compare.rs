//! Comparison as ONNX's backend tests do it: equal dtype and shape, |actual − expected| ≤ 1e-7 + 1e-3·|expected|.

use anyhow::{Result, ensure};
use hotcell_graph::DType;

use super::case::Tensor;

const RTOL: f64 = 1e-3;
const ATOL: f64 = 1e-7;

/// Whether `actual` is what was expected. Integers and bools must be equal; NaN equals NaN.
///
/// # Errors
/// Says the first difference.
pub fn compare(actual: &Tensor, expected: &Tensor) -> Result<()> {
    ensure!(
        (actual.dtype, &actual.dims) == (expected.dtype, &expected.dims),
        "{}{:?} where {}{:?} was expected",
        actual.dtype,
        actual.dims,
        expected.dtype,
        expected.dims
    );
    ensure!(
        actual.bytes.len() == expected.bytes.len(),
        "{} bytes where {} were expected",
        actual.bytes.len(),
        expected.bytes.len()
    );
    if !expected.dtype.is_float() {
        ensure!(
            expected.dtype != DType::C64,
            "complex results are not compared"
        );
        for (i, (a, e)) in actual
            .integers()?
            .into_iter()
            .zip(expected.integers()?)
            .enumerate()
        {
            ensure!(a == e, "element {i} is {a}, not {e}");
        }
        return Ok(());
    }
    for (i, (a, e)) in actual
        .numbers()?
        .into_iter()
        .zip(expected.numbers()?)
        .enumerate()
    {
        let close = a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= ATOL + RTOL * e.abs();
        // An infinite expectation makes the tolerance infinite too.
        ensure!(
            close && (e.is_infinite() <= (a == e)),
            "element {i} is {a}, not {e}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

    use super::*;

    fn f32s(values: &[f32]) -> Tensor {
        Tensor {
            dtype: DType::F32,
            dims: vec![values.len()],
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    #[test]
    fn differences_are_found() {
        let same = |a: &[f32], e: &[f32]| compare(&f32s(a), &f32s(e)).is_ok();
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert!(same(&[1.0, nan, inf, -inf], &[1.0005, nan, inf, -inf]));
        for (a, e) in [
            (1.0, 1.002),
            (nan, 1.0),
            (1.0, nan),
            (inf, -inf),
            (1.0, inf),
            (inf, 1.0),
            (2e-7, 0.0),
        ] {
            assert!(!same(&[a], &[e]), "{a} passes for {e}");
        }
        assert!(!same(&[1.0], &[1.0, 1.0]));
        let ints = |v: u8| Tensor {
            dtype: DType::U8,
            dims: vec![1],
            bytes: vec![v],
        };
        assert!(compare(&ints(3), &ints(3)).is_ok());
        assert!(compare(&ints(3), &ints(4)).is_err());
    }
}
