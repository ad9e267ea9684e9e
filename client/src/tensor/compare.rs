//! How far two tensors are apart.

use std::path::Path;

use hotcell_proto::error::{Error, Reason};

use super::{
    array::{Tensor, invalid},
    host::HostTensor,
    io::TensorFile,
};

/// What counts as equal enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Least cosine of the angle between the two as vectors.
    pub cosine: f64,
    /// Greatest absolute difference.
    pub max_abs: f64,
    /// Greatest difference relative to the reference's element.
    pub max_rel: f64,
    /// Greatest normalised mean square error.
    pub nmse: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            cosine: 0.99,
            max_abs: f64::INFINITY,
            max_rel: f64::INFINITY,
            nmse: f64::INFINITY,
        }
    }
}

/// How far a tensor is from its reference. Complex numbers are compared as what they are: differences are absolute values of
/// complex differences, and as a vector a complex tensor has two coordinates for each element.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Cosine of the angle between the two as vectors; of two zero vectors 1, of one 0.
    pub cosine: f64,
    /// Greatest absolute difference.
    pub max_abs: f64,
    /// Greatest difference relative to the reference's element; elements that are both zero differ by none.
    pub max_rel: f64,
    /// `Σ(a−b)² / Σb²`; 0 when both are zero.
    pub nmse: f64,
    /// Elements where one is NaN, or an infinity, and the other is not the same, be it in the real or in the imaginary part.
    pub mismatched: usize,
}

/// Comparisons by name.
#[derive(Clone, Debug, Default)]
pub struct Comparisons {
    /// Each tensor's, in the order of its name.
    pub by_name: Vec<(String, Result<Comparison, Error>)>,
}

impl Comparison {
    /// Compares elementwise, in f64.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when the shapes differ.
    pub fn of(ours: &HostTensor, reference: &HostTensor) -> Result<Self, Error> {
        if ours.shape() != reference.shape() {
            return Err(invalid(format!(
                "the shape is {:?}, the reference's {:?}",
                ours.shape(),
                reference.shape()
            )));
        }
        let (mut dot, mut aa, mut bb, mut difference) = (0.0, 0.0, 0.0, 0.0);
        let (mut max_abs, mut max_rel, mut mismatched) = (0.0f64, 0.0f64, 0);
        for (a, b) in ours.plain()?.into_iter().zip(reference.plain()?) {
            let (mut apart, mut size, mut strange) = ([0.0; 2], [0.0; 2], false);
            let parts = a.parts().into_iter().zip(b.parts());
            for ((a, b), (apart, size)) in parts.zip(apart.iter_mut().zip(&mut size)) {
                if !a.is_finite() || !b.is_finite() {
                    strange |= !(a == b || (a.is_nan() && b.is_nan()));
                    continue;
                }
                (*apart, *size) = (a - b, b);
                dot += a * b;
                aa += a * a;
                bb += b * b;
                difference += (a - b) * (a - b);
            }
            mismatched += usize::from(strange);
            let (d, size) = (apart[0].hypot(apart[1]), size[0].hypot(size[1]));
            max_abs = max_abs.max(d);
            if d > 0.0 {
                max_rel = max_rel.max(d / size);
            }
        }
        let cosine = match (aa > 0.0, bb > 0.0) {
            (true, true) => dot / (aa.sqrt() * bb.sqrt()),
            (false, false) => 1.0,
            _ => 0.0,
        };
        let nmse = match difference > 0.0 {
            true => difference / bb,
            false => 0.0,
        };
        Ok(Self {
            cosine,
            max_abs,
            max_rel,
            nmse,
            mismatched,
        })
    }

    /// Whether it is within the thresholds.
    ///
    /// # Errors
    /// [`Reason::NumericsFailed`] saying which one is passed.
    pub fn check(&self, limits: &Thresholds) -> Result<(), Error> {
        let failed = |what: String| Err(Error::new(Reason::NumericsFailed, what));
        if self.mismatched > 0 {
            return failed(format!(
                "{} elements are NaN or infinite on one side only",
                self.mismatched
            ));
        }
        // NaN is within no bound.
        let below = |value: f64, limit: f64| value.is_nan() || value < limit;
        if below(self.cosine, limits.cosine) {
            return failed(format!(
                "the cosine is {}, at least {} is wanted",
                self.cosine, limits.cosine
            ));
        }
        for (what, value, limit) in [
            ("greatest difference", self.max_abs, limits.max_abs),
            ("greatest relative difference", self.max_rel, limits.max_rel),
            ("normalised square error", self.nmse, limits.nmse),
        ] {
            if below(-value, -limit) {
                return failed(format!("the {what} is {value}, at most {limit} is wanted"));
            }
        }
        Ok(())
    }
}

impl Comparisons {
    /// Whether all are within the thresholds.
    ///
    /// # Errors
    /// [`Reason::NumericsFailed`] naming the first that is not.
    pub fn check(&self, limits: &Thresholds) -> Result<(), Error> {
        for (name, comparison) in &self.by_name {
            let checked = comparison.clone().and_then(|c| c.check(limits));
            checked.map_err(|e| Error::new(e.reason(), format!("{name}: {}", e.message())))?;
        }
        Ok(())
    }
}

impl Tensor {
    /// Compares with a reference.
    ///
    /// # Errors
    /// As [`Tensor::eval`], and [`Reason::InvalidArgument`] when the shapes differ.
    pub async fn compare(&self, reference: &HostTensor) -> Result<Comparison, Error> {
        Comparison::of(&self.fetch().await?, reference)
    }

    /// Compares named tensors with those of a safetensors file. With `abort_on_error` the first one that is outside of the
    /// thresholds, missing or of another shape ends it; else all are compared and each says how it did.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`] and others when the file cannot be read; with `abort_on_error` what the first one did.
    pub async fn compare_with(
        tensors: &[(&str, Tensor)],
        file: &Path,
        limits: &Thresholds,
        abort_on_error: bool,
    ) -> Result<Comparisons, Error> {
        let file = TensorFile::open(&with_extension(file))?;
        let mut all = Comparisons::default();
        let mut ordered: Vec<&(&str, Tensor)> = tensors.iter().collect();
        ordered.sort_by_key(|(name, _)| *name);
        for (name, tensor) in ordered {
            let compared = async {
                let missing = || invalid(format!("the file has no tensor {name:?}"));
                let reference = file.get(name)?.ok_or_else(missing)?;
                tensor.compare(&reference).await
            };
            let compared = compared.await;
            if abort_on_error {
                let checked = compared.clone().and_then(|c| c.check(limits));
                checked.map_err(|e| Error::new(e.reason(), format!("{name}: {}", e.message())))?;
            }
            all.by_name.push(((*name).to_owned(), compared));
        }
        Ok(all)
    }
}

/// `.safetensors` may be left out.
fn with_extension(file: &Path) -> std::path::PathBuf {
    match file.extension() {
        Some(e) if e == "safetensors" => file.to_owned(),
        _ => {
            let mut name = file.as_os_str().to_owned();
            name.push(".safetensors");
            name.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(a: &[f32], b: &[f32]) -> Comparison {
        let t = |v: &[f32]| HostTensor::from_slice(v, &[v.len()]).unwrap();
        Comparison::of(&t(a), &t(b)).unwrap()
    }

    #[test]
    fn distances_are_those_of_the_definitions() {
        let c = compare(&[3.0, 4.0], &[4.0, 3.0]);
        assert!((c.cosine - 24.0 / 25.0).abs() < 1e-12);
        assert_eq!((c.max_abs, c.nmse), (1.0, 2.0 / 25.0));
        assert!((c.max_rel - 1.0 / 3.0).abs() < 1e-12);
        assert!(c.check(&Thresholds::default()).is_err());
        let limits = Thresholds {
            cosine: 0.95,
            ..Default::default()
        };
        assert!(c.check(&limits).is_ok());
        assert!(
            c.check(&Thresholds {
                max_rel: 0.3,
                ..limits
            })
            .is_err()
        );
    }

    #[test]
    fn nan_on_one_side_fails_whatever_the_thresholds() {
        let loose = Thresholds {
            cosine: -1.0,
            ..Default::default()
        };
        assert!(
            compare(&[f32::NAN, 1.0], &[f32::NAN, 1.0])
                .check(&loose)
                .is_ok()
        );
        assert!(
            compare(&[f32::NAN, 1.0], &[2.0, 1.0])
                .check(&loose)
                .is_err()
        );
        assert!(
            compare(&[f32::INFINITY], &[f32::NEG_INFINITY])
                .check(&loose)
                .is_err()
        );
        // Nothing like a nonzero vector; and zero like zero.
        assert!(
            compare(&[0.0, 0.0], &[1.0, 0.0])
                .check(&Thresholds::default())
                .is_err()
        );
        assert!(
            compare(&[0.0], &[0.0])
                .check(&Thresholds::default())
                .is_ok()
        );
    }

    #[test]
    fn complex_numbers_differ_by_both_parts() {
        let compare = |a: &[[f32; 2]], b: &[[f32; 2]]| {
            let t = |v: &[[f32; 2]]| HostTensor::from_slice(v, &[v.len()]).unwrap();
            Comparison::of(&t(a), &t(b)).unwrap()
        };
        let loose = Thresholds {
            cosine: -1.0,
            ..Default::default()
        };
        // Equal real parts are no equal numbers.
        let c = compare(&[[3.0, 4.0]], &[[3.0, -4.0]]);
        assert_eq!((c.max_abs, c.max_rel, c.nmse), (8.0, 1.6, 64.0 / 25.0));
        assert_eq!((c.cosine, c.mismatched), ((9.0 - 16.0) / 25.0, 0));
        assert!(c.check(&Thresholds::default()).is_err());
        // A difference has the size of a complex number, not of its greater part.
        let c = compare(&[[3.0, 4.0]], &[[0.0, 0.0]]);
        assert_eq!((c.max_abs, c.cosine), (5.0, 0.0));
        let same = [[1.0, f32::NAN], [f32::INFINITY, 2.0]];
        let c = compare(&same, &same);
        assert!(c.check(&Thresholds::default()).is_ok(), "{c:?}");
        for other in [
            [[1.0, 0.0], [f32::INFINITY, 2.0]],
            [[f32::NAN, f32::NAN], [f32::INFINITY, 2.0]],
            [[1.0, f32::NAN], [f32::NEG_INFINITY, 2.0]],
        ] {
            let (one, two) = (compare(&same, &other), compare(&other, &same));
            assert_eq!((one.mismatched, two.mismatched), (1, 1), "{other:?}");
            assert!(one.check(&loose).is_err() && two.check(&loose).is_err());
        }
        // What is beside an infinity counts as well.
        let c = compare(&[[f32::INFINITY, 2.0]], &[[f32::INFINITY, 3.0]]);
        assert_eq!((c.max_abs, c.mismatched), (1.0, 0));
        // A real tensor is one whose imaginary parts are zeros.
        let real = HostTensor::from_slice(&[1.0f32], &[1]).unwrap();
        let complex = HostTensor::from_slice(&[[1.0f32, 1.0]], &[1]).unwrap();
        assert_eq!(Comparison::of(&real, &complex).unwrap().max_abs, 1.0);
    }

    #[test]
    fn shapes_must_agree() {
        let a = HostTensor::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
        let b = HostTensor::from_slice(&[1.0f32, 2.0], &[1, 2]).unwrap();
        assert_eq!(
            Comparison::of(&a, &b).unwrap_err().reason(),
            Reason::InvalidArgument
        );
    }
}
