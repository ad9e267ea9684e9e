//! Fourier transforms, as NumPy has them.

use hotcell_graph::{DType, op::Attribute};

use super::{
    array::{Tensor, invalid},
    ops::one,
};

impl Tensor {
    /// The transform along an axis (c64; other dtypes are cast).
    pub fn fft(&self, axis: i64) -> Tensor {
        self.transformed(axis, false)
    }

    /// The inverse transform along an axis (c64).
    pub fn ifft(&self, axis: i64) -> Tensor {
        self.transformed(axis, true)
    }

    fn transformed(&self, axis: i64, inverse: bool) -> Tensor {
        let x = match self.dtype() {
            Ok(DType::C64) | Err(_) => self.clone(),
            Ok(_) => self.cast(DType::C64),
        };
        let attributes = vec![Attribute::Int(axis), Attribute::Bool(inverse)];
        one("fft", &[Some(&x)], attributes)
    }

    /// The transform along several axes; none: all.
    pub fn fftn(&self, axes: &[i64]) -> Tensor {
        self.along(axes, Tensor::fft)
    }

    /// The inverse transform along several axes; none: all.
    pub fn ifftn(&self, axes: &[i64]) -> Tensor {
        self.along(axes, Tensor::ifft)
    }

    fn along(&self, axes: &[i64], each: fn(&Tensor, i64) -> Tensor) -> Tensor {
        let all: Vec<i64> = (0..self.rank().unwrap_or(0) as i64).collect();
        let axes = if axes.is_empty() { &all[..] } else { axes };
        axes.iter().fold(self.clone(), |x, &axis| each(&x, axis))
    }

    /// The size of an axis, counted from either end.
    fn length(&self, axis: i64) -> i64 {
        let shape = self.shape().unwrap_or_default();
        let at = if axis < 0 {
            axis + shape.len() as i64
        } else {
            axis
        };
        let n = usize::try_from(at).ok().and_then(|at| shape.get(at));
        n.map_or(0, |n| *n as i64)
    }

    /// The first half of the transform of real numbers along an axis, `n/2 + 1` of them; the rest mirrors it.
    pub fn rfft(&self, axis: i64) -> Tensor {
        let half = self.length(axis) / 2 + 1;
        self.fft(axis).narrow(axis, 0, half)
    }

    /// The real numbers (f32), `n` along an axis, of which this is the first half of the transform: what [`Tensor::rfft`] undoes.
    pub fn irfft(&self, n: i64, axis: i64) -> Tensor {
        let have = self.length(axis);
        if n < 1 || have != n / 2 + 1 {
            let what = format!(
                "irfft to {n} takes {} along axis {axis}, not {have}",
                n / 2 + 1
            );
            return Tensor::wrong(self.0.session.clone(), invalid(what));
        }
        // The other half is the first one backwards and mirrored at the real axis. Of what is its own mirror, the imaginary
        // part becomes imaginary and is dropped with all others.
        let inner = self.narrow(axis, 1, n - have + 1).flip(&[axis]).conjugate();
        let whole = match n - have {
            0 => self.clone(),
            _ => Tensor::concat(&[self.clone(), inner], axis),
        };
        whole.ifft(axis).real()
    }

    /// The real parts of c64, as f32.
    pub fn real(&self) -> Tensor {
        self.cast(DType::F32)
    }

    /// The imaginary parts of c64, as f32.
    pub fn imaginary(&self) -> Tensor {
        self.expand_dims(&[-1])
            .view(DType::F32)
            .narrow(-1, 1, 2)
            .squeeze(&[-1])
    }

    /// c64 with the imaginary parts negated.
    pub fn conjugate(&self) -> Tensor {
        let parts = [self.real(), self.imaginary().neg()];
        Tensor::stack(&parts, -1).view(DType::C64).squeeze(&[-1])
    }

    /// [`Tensor::rfft`] along the last of these axes, then [`Tensor::fft`] along the others; none: all.
    pub fn rfftn(&self, axes: &[i64]) -> Tensor {
        let all: Vec<i64> = (0..self.rank().unwrap_or(0) as i64).collect();
        let axes = if axes.is_empty() { &all[..] } else { axes };
        match axes.split_last() {
            None => self.clone(),
            Some((last, others)) => {
                let x = self.rfft(*last);
                others.iter().fold(x, |x, &axis| x.fft(axis))
            }
        }
    }

    /// What [`Tensor::rfftn`] undoes, with `n` real numbers along the last of these axes; none: all.
    pub fn irfftn(&self, n: i64, axes: &[i64]) -> Tensor {
        let all: Vec<i64> = (0..self.rank().unwrap_or(0) as i64).collect();
        let axes = if axes.is_empty() { &all[..] } else { axes };
        match axes.split_last() {
            None => self.clone(),
            Some((last, others)) => {
                let x = others.iter().fold(self.clone(), |x, &axis| x.ifft(axis));
                x.irfft(n, *last)
            }
        }
    }
}
