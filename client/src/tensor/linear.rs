//! Linear algebra of the last two axes, as NumPy and SciPy have it; axes before these are a batch. A matrix without such a result, as one
//! that is singular, gives NaN. Of f32 and f64.

use hotcell_graph::{DType, op::Attribute};

use super::{
    array::{Tensor, invalid},
    made::number,
    ops::one,
};

/// How large something is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// `(Σ |x|ᵖ)^(1/p)` over the axes as one; for 0 how many are not 0, for the infinities the greatest and the least `|x|`.
    Order(f64),
    /// The root of the sum of squares: of a vector its length, of a matrix Frobenius'.
    Length,
    /// Of matrices: the sum of their singular values.
    Nuclear,
    /// Of matrices: the greatest of their singular values.
    Spectral,
}

impl Tensor {
    /// The triangular factor: `l` of `l · lᵀ`, of which only the lower triangle is read, or if `upper` `lᵀ`.
    pub fn cholesky(&self, upper: bool) -> Tensor {
        one("cholesky", &[Some(self)], vec![Attribute::Bool(upper)])
    }

    /// `q` with orthonormal columns and `r`, upper triangular with no negative number on its diagonal: `q · r` is this.
    pub fn qr(&self) -> (Tensor, Tensor) {
        let [q, r] = self.several("qr");
        (q, r)
    }

    /// Which row comes at each place (u32), and the triangular factors of the rows in this order.
    pub fn lu(&self) -> (Tensor, Tensor, Tensor) {
        let [p, l, u] = self.several("lu");
        (p, l, u)
    }

    /// The determinant.
    pub fn det(&self) -> Tensor {
        one("det", &[Some(self)], vec![])
    }

    /// The `x` of which `self · x` is `b`.
    pub fn solve(&self, b: &Tensor) -> Tensor {
        one("solve", &[Some(self), Some(b)], vec![])
    }

    /// The same for a triangular matrix: only its lower triangle is read, or if `upper` the upper one.
    pub fn solve_triangular(&self, b: &Tensor, upper: bool) -> Tensor {
        let attributes = vec![Attribute::Bool(upper)];
        one("solve_triangular", &[Some(self), Some(b)], attributes)
    }

    /// `u`, the singular values in descending order, and `vt`: `u · diag(s) · vt` is this. Of each column of `u` the element furthest
    /// from 0 is positive.
    pub fn svd(&self) -> (Tensor, Tensor, Tensor) {
        let [u, s, vt] = self.several("svd");
        (u, s, vt)
    }

    /// Eigenvalues in ascending order and eigenvectors, as columns, of a symmetric matrix of which the lower triangle is read.
    pub fn eigh(&self) -> (Tensor, Tensor) {
        let [values, vectors] = self.several("eigh");
        (values, vectors)
    }

    /// Eigenvalues and eigenvectors, as columns, of any square matrix (c64).
    pub fn eig(&self) -> (Tensor, Tensor) {
        let [values, vectors] = self.several("eig");
        (values, vectors)
    }

    fn several<const N: usize>(&self, op: &str) -> [Tensor; N] {
        let made = Tensor::apply(op, &[Some(self)], vec![]);
        made.try_into().unwrap_or_else(|made: Vec<Tensor>| {
            let none = || Tensor::wrong(None, invalid(format!("{op} has other results")));
            let wrong = made.into_iter().next().unwrap_or_else(none);
            std::array::from_fn(|_| wrong.clone())
        })
    }

    /// The identity of as many rows as these matrices have.
    fn identity(&self) -> Tensor {
        let shape = self.shape().unwrap_or_default();
        let n = shape.last().copied().unwrap_or(1);
        let one = number(1.0, self.dtype().unwrap_or(DType::F32));
        one.broadcast_to(&[n, n]).tril(0).triu(0)
    }

    /// The matrices with rows for columns.
    fn turned(&self) -> Tensor {
        let rank = self.rank().unwrap_or(0) as i64;
        let mut axes: Vec<i64> = (0..rank).collect();
        if let [.., a, b] = axes.as_mut_slice() {
            std::mem::swap(a, b);
        }
        self.transpose(&axes)
    }

    /// The inverse.
    pub fn inv(&self) -> Tensor {
        self.solve(&self.identity())
    }

    /// The inverse of a triangular matrix.
    pub fn tri_inv(&self, upper: bool) -> Tensor {
        self.solve_triangular(&self.identity(), upper)
    }

    /// The inverse of the matrix of which this is what [`Tensor::cholesky`] gives.
    pub fn cholesky_inv(&self, upper: bool) -> Tensor {
        let inverse = self.tri_inv(upper);
        match upper {
            true => inverse.matmul(&inverse.turned()),
            false => inverse.turned().matmul(&inverse),
        }
    }

    /// The pseudo-inverse (Moore and Penrose's): singular values of at most `rcond` times the greatest count as 0.
    pub fn pinv(&self, rcond: f64) -> Tensor {
        let (u, s, vt) = self.svd();
        let dtype = self.dtype().unwrap_or(DType::F32);
        let least = &s.max(&[-1], true) * &number(rcond, dtype);
        let nothing = number(0.0, dtype);
        let inverse = s.reciprocal().where_(&s.greater(&least), &nothing);
        // NaN is not small: a matrix without singular values has no pseudo-inverse.
        let inverse = s.where_(&s.is_nan(), &inverse);
        (&vt.turned() * &inverse.expand_dims(&[-2])).matmul(&u.turned())
    }

    /// How large the elements along these axes are together; no axes: all. Of matrices the axes are two.
    pub fn norm(&self, norm: Norm, axes: &[i64], keepdims: bool) -> Tensor {
        match norm {
            Norm::Length => self.square().sum(axes, keepdims).sqrt(),
            Norm::Order(p) if p == f64::INFINITY => self.abs().max(axes, keepdims),
            Norm::Order(p) if p == f64::NEG_INFINITY => self.abs().min(axes, keepdims),
            Norm::Order(p) => {
                let dtype = self.dtype().unwrap_or(DType::F32);
                let number = |v: f64| number(v, dtype);
                if p == 0.0 {
                    let there = self.not_equal(&number(0.0)).cast(dtype);
                    return there.sum(axes, keepdims);
                }
                let sum = self.abs().pow(&number(p)).sum(axes, keepdims);
                sum.pow(&number(1.0 / p))
            }
            Norm::Nuclear | Norm::Spectral => {
                let rank = self.rank().unwrap_or(0) as i64;
                let from_front = |&a: &i64| if a < 0 { a + rank } else { a };
                let two: Vec<i64> = match axes {
                    [] => vec![rank - 2, rank - 1],
                    axes => axes.iter().map(from_front).collect(),
                };
                if two.len() != 2 || axes.is_empty() && rank != 2 {
                    let what = "this norm is of matrices: name the two axes";
                    return Tensor::wrong(self.0.session.clone(), invalid(what));
                }
                let others = (0..rank).filter(|a| !two.contains(a));
                let order: Vec<i64> = others.chain(two.iter().copied()).collect();
                let (_, values, _) = self.transpose(&order).svd();
                let size = match norm {
                    Norm::Nuclear => values.sum(&[-1], false),
                    _ => values.max(&[-1], false),
                };
                match keepdims {
                    true => size.expand_dims(&two),
                    false => size,
                }
            }
        }
    }
}
