//! Methods that are made of others, and those whose result's shape depends on values: these compute what they need to know it.

use hotcell_graph::{DType, op::Attribute};
use hotcell_proto::error::{Error, Reason};

use super::{
    array::{Tensor, invalid},
    host::HostTensor,
    ops::{Reduce, one},
    session::Session,
};

impl Session {
    /// `n` numbers from `start` to `stop`, both included, as far apart.
    pub fn linspace(&self, start: f64, stop: f64, n: usize, dtype: DType) -> Tensor {
        let step = match n {
            0 | 1 => 0.0,
            n => (stop - start) / (n as f64 - 1.0),
        };
        super::ops::arange(self, start, step, n as i64, dtype)
    }

    /// `[n, m]`: 1 on and below the `k`-th diagonal, else 0.
    pub fn tri(&self, n: usize, m: usize, k: i64, dtype: DType) -> Tensor {
        self.ones(dtype, &[n, m]).tril(k)
    }

    /// `[n, m]`: 1 on the `k`-th diagonal, else 0.
    pub fn eye(&self, n: usize, m: usize, k: i64, dtype: DType) -> Tensor {
        self.tri(n, m, k, dtype).triu(k)
    }
}

/// A scalar of any session.
pub(super) fn number(value: f64, dtype: DType) -> Tensor {
    match HostTensor::from_slice(&[value], &[]) {
        Ok(data) => Tensor::host(None, data, true).cast(dtype),
        Err(error) => Tensor::wrong(None, error),
    }
}

impl Tensor {
    fn refused(&self, error: Error) -> Tensor {
        Tensor::wrong(self.0.session.clone(), error)
    }

    /// 1 where each integer says, along a new last axis of `depth`, else 0.
    pub fn one_hot(&self, depth: i64, dtype: DType) -> Tensor {
        let attributes = vec![
            Attribute::Float(0.0),
            Attribute::Float(1.0),
            Attribute::Int(depth),
            Attribute::DType(DType::I64),
        ];
        let places = one("arange", &[], attributes);
        self.expand_dims(&[-1]).equal(&places).cast(dtype)
    }

    /// Each element of one times each of another, `[a, b]`.
    pub fn outer(&self, other: &Tensor) -> Tensor {
        &self.reshape(&[-1, 1]) * &other.reshape(&[1, -1])
    }

    /// Each element times the whole of another of as many axes.
    pub fn kron(&self, other: &Tensor) -> Tensor {
        let shapes = self.shape().and_then(|a| Ok((a, other.shape()?)));
        let (a, b) = match shapes {
            Ok((a, b)) if a.len() == b.len() => (a, b),
            Ok((a, b)) => {
                let what = format!("kron takes tensors of as many axes, not {a:?} and {b:?}");
                return self.refused(invalid(what));
            }
            Err(error) => return self.refused(error),
        };
        let apart = |dims: &[usize], first: bool| -> Vec<i64> {
            let pairs = dims.iter().map(|&n| n as i64);
            let pairs = pairs.map(|n| if first { [n, 1] } else { [1, n] });
            pairs.flatten().collect()
        };
        let product = &self.reshape(&apart(&a, true)) * &other.reshape(&apart(&b, false));
        let joined: Vec<i64> = a.iter().zip(&b).map(|(a, b)| (a * b) as i64).collect();
        product.reshape(&joined)
    }

    /// Vectors as the coordinates of a grid, of one tensor's axis each, in their order (NumPy's `meshgrid` with `ij`).
    pub fn meshgrid(vectors: &[Tensor]) -> Vec<Tensor> {
        let sizes: Result<Vec<usize>, Error> = vectors.iter().map(Tensor::size).collect();
        let along = |(i, v): (usize, &Tensor)| match &sizes {
            Ok(sizes) => {
                let shape: Vec<i64> = (0..sizes.len())
                    .map(|j| if i == j { sizes[j] as i64 } else { 1 })
                    .collect();
                v.reshape(&shape).broadcast_to(sizes)
            }
            Err(error) => v.refused(error.clone()),
        };
        vectors.iter().enumerate().map(along).collect()
    }

    /// What a share `q` of the elements along an axis is below, between two of them in proportion; NaN if one is.
    pub fn quantile(&self, q: f64, axis: i64) -> Tensor {
        let sizes = self.shape().and_then(|shape| Ok((shape, self.dtype()?)));
        let (shape, dtype) = match sizes {
            Ok((shape, dtype)) => (shape, dtype),
            Err(error) => return self.refused(error),
        };
        let at = if axis < 0 {
            axis + shape.len() as i64
        } else {
            axis
        };
        let n = usize::try_from(at).ok().and_then(|i| shape.get(i));
        let n = match n {
            Some(&n) if n > 0 && (0.0..=1.0).contains(&q) => n,
            _ => {
                let what = format!("there is no quantile {q} along axis {axis} of {shape:?}");
                return self.refused(invalid(what));
            }
        };
        let x = match dtype.is_float() {
            true => self.clone(),
            false => self.cast(DType::F32),
        };
        let place = q * (n as f64 - 1.0);
        let below = (place.floor() as i64).min(n as i64 - 1);
        let above = (below + 1).min(n as i64 - 1);
        let sorted = x.sort(axis, false);
        let pick = |i: i64| sorted.narrow(axis, i, i + 1).squeeze(&[axis]);
        let (low, high) = (pick(below), pick(above));
        let share = number(place - below as f64, x.dtype().unwrap_or(DType::F32));
        // Not the difference of two infinities.
        let between = match above == below || place == below as f64 {
            true => low,
            false => &low + &(&(&high - &low) * &share),
        };
        // The greatest is NaN if one is.
        let last = pick(n as i64 - 1);
        last.where_(&last.is_nan(), &between)
    }

    /// The middle element along an axis, or the mean of the two in the middle; NaN if one is.
    pub fn median(&self, axis: i64) -> Tensor {
        self.quantile(0.5, axis)
    }

    /// With `values` at `indices` along an axis, the last of several to one place.
    pub fn put_along_axis(&self, indices: &Tensor, values: &Tensor, axis: i64) -> Tensor {
        self.scatter_along_axis(indices, values, axis, Reduce::Set)
    }

    /// The first half along an axis times the logistic function of the second.
    pub fn glu(&self, axis: i64) -> Tensor {
        let half = self.shape().ok().and_then(|shape| {
            let at = if axis < 0 {
                axis + shape.len() as i64
            } else {
                axis
            };
            Some(*shape.get(usize::try_from(at).ok()?)? as i64 / 2)
        });
        let half = half.unwrap_or_default();
        match self.split(&[half, half], axis).as_slice() {
            [a, b] => a * &b.sigmoid(),
            [wrong] => wrong.clone(),
            _ => self.refused(invalid("glu takes an axis of two halves")),
        }
    }

    /// Where elements are not 0, row by row in row-major order: i64 `[count, rank]`. This computes how many there are.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are more than `bound`; otherwise those of [`Tensor::fetch`].
    pub async fn nonzero(&self, bound: usize) -> Result<Tensor, Error> {
        let shape = self.shape()?;
        if shape.is_empty() {
            return Err(invalid("a scalar has no place to name"));
        }
        let flat = self.places_of(bound).await?.cast(DType::I64);
        let mut parts = Vec::new();
        let mut stride = shape.iter().product::<usize>();
        for &n in &shape {
            stride /= n.max(1);
            let (by, within) = (number(stride as f64, DType::I64), n.max(1) as f64);
            let index = flat.floor_divide(&by);
            parts.push(index.remainder(&number(within, DType::I64)));
        }
        Ok(Tensor::stack(&parts, 1))
    }

    /// Row-major places of elements that are not 0, u32.
    async fn places_of(&self, bound: usize) -> Result<Tensor, Error> {
        let size = self.size()?;
        let zero = number(0.0, self.dtype()?);
        let flat = self.not_equal(&zero).reshape(&[size as i64]);
        let most = bound.min(size);
        // True comes before false, and equal ones keep their order.
        let (_, places) = flat.topk(most as i64, 0, true);
        let count = flat.cast(DType::I64).sum(&[], false);
        let count = count.item::<i64>().await?;
        if count > most as i64 {
            let what = format!("{count} elements, more than the bound of {bound}");
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        Ok(places.narrow(0, 0, count))
    }

    /// Slices of an axis where `condition`, a vector, holds. This computes how many there are.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are more than `bound`; otherwise those of [`Tensor::fetch`].
    pub async fn compress(
        &self,
        condition: &Tensor,
        axis: i64,
        bound: usize,
    ) -> Result<Tensor, Error> {
        let places = condition.places_of(bound).await?;
        Ok(self.take(&places, axis))
    }

    /// The different elements in ascending order, NaN once and last. This computes how many there are.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are more than `bound`; otherwise those of [`Tensor::fetch`].
    pub async fn unique(&self, bound: usize) -> Result<Tensor, Error> {
        let size = self.size()? as i64;
        let sorted = self.reshape(&[size]).sort(0, false);
        if size < 2 {
            return match size as usize <= bound {
                true => Ok(sorted),
                false => Err(Error::new(
                    Reason::InvalidArgument,
                    format!("{size} elements, more than the bound of {bound}"),
                )),
            };
        }
        let (before, after) = (sorted.narrow(0, 0, size - 1), sorted.narrow(0, 1, size));
        let differ = after.not_equal(&before);
        let both = before.is_nan().logical_and(&after.is_nan());
        let new = differ.logical_and(&both.logical_not());
        let first = sorted.narrow(0, 0, 1);
        let first = first.equal(&first).logical_or(&first.is_nan());
        let new = Tensor::concat(&[first, new], 0);
        sorted.compress(&new, 0, bound).await
    }
}
