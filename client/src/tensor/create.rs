//! Tensors out of nothing.

use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::{error::Error, limits};

use super::{
    array::{Tensor, invalid, of_graph},
    host::{Element, HostTensor},
    recipe::Recipe,
    recover::again,
    session::Session,
};

impl Session {
    /// A tensor of these elements, row-major. They travel when they are first needed.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are not as many as the shape says.
    pub fn tensor<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Tensor, Error> {
        Ok(self.host(HostTensor::from_slice(values, shape)?))
    }

    /// A tensor of this process's bytes. They travel when they are first needed.
    pub fn host(&self, data: HostTensor) -> Tensor {
        Tensor::host(Some(self.clone()), data, false)
    }

    /// A scalar.
    pub fn scalar<T: Element>(&self, value: T) -> Tensor {
        match HostTensor::from_slice(&[value], &[]) {
            Ok(data) => Tensor::host(Some(self.clone()), data, true),
            Err(error) => Tensor::wrong(Some(self.clone()), error),
        }
    }

    /// A tensor whose elements all are `value`.
    pub fn full<T: Element>(&self, value: T, shape: &[usize]) -> Tensor {
        self.scalar(value).broadcast_to(shape)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, dtype: DType, shape: &[usize]) -> Tensor {
        self.scalar(0u8).cast(dtype).broadcast_to(shape)
    }

    /// A tensor of ones.
    pub fn ones(&self, dtype: DType, shape: &[usize]) -> Tensor {
        self.scalar(1u8).cast(dtype).broadcast_to(shape)
    }

    /// `start, start + step, …` below `stop` (above it for a negative step).
    pub fn arange(&self, start: f64, stop: f64, step: f64, dtype: DType) -> Tensor {
        let length = ((stop - start) / step).ceil();
        if !length.is_finite() || length > limits::MAX_ELEMENTS as f64 {
            let what = format!("arange({start}, {stop}, {step}) has no end");
            return Tensor::wrong(Some(self.clone()), invalid(what));
        }
        super::ops::arange(self, start, step, length.max(0.0) as i64, dtype)
    }

    /// The key of a seed, for random ops: `u32[2]`, the seed's high and low half (as MLX's `random.key`).
    pub fn random_key(&self, seed: u64) -> Tensor {
        match HostTensor::from_slice(&[(seed >> 32) as u32, seed as u32], &[2]) {
            Ok(data) => self.host(data),
            Err(error) => Tensor::wrong(Some(self.clone()), error),
        }
    }

    /// A tensor of zeros that has its memory on the worker at once.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`] or [`Reason::OutOfMemory`].
    pub async fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let shape = Shape::fixed(shape).map_err(|e| of_graph(&e))?;
        let spec = TensorSpec::new(dtype, shape).map_err(|e| of_graph(&e))?;
        let (remote, spec) = again!(self, at => self.zeros_at(&at, &spec))?;
        self.note(&remote, |_| Recipe::zeros(&spec));
        Ok(self.tensor_at(remote, spec, "zeros"))
    }
}
