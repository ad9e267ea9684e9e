//! Factors, solutions and eigenvalues of one matrix in f64, by nalgebra's portable code: its order of sums depends on the sizes alone, so that
//! the bits are the same on every instruction path.
//!
//! `None`: there is no such result. Whoever calls has seen that all numbers are finite and no axis is empty, on which nalgebra would panic or
//! not end; where it iterates it may do so a bounded number of times.

use nalgebra::{Complex, DMatrix, SVD, Schur, SymmetricEigen};

/// A matrix.
pub(super) type Matrix = DMatrix<f64>;

/// What belongs to a matrix, or to two.
pub(super) type Of = fn(&[Matrix], flag: bool) -> Option<Vec<Matrix>>;

/// Where an iteration stops: at rounding.
const NEAR: f64 = f64::EPSILON;

/// Steps in which everything converges that does: some for each row, as LAPACK allows.
fn steps(n: usize) -> usize {
    30 * n.max(10)
}

/// The factor or its transpose (`upper`).
pub(super) fn cholesky(x: &[Matrix], upper: bool) -> Option<Vec<Matrix>> {
    let l = x.first()?.clone().cholesky()?.unpack();
    Some(vec![if upper { l.transpose() } else { l }])
}

/// `q` and `r`.
pub(super) fn qr(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let (mut q, mut r) = x.first()?.clone().qr().unpack();
    for i in 0..r.nrows() {
        if r[(i, i)] < 0.0 {
            r.row_mut(i).neg_mut();
            q.column_mut(i).neg_mut();
        }
    }
    Some(vec![q, r])
}

/// Places of rows, `l` and `u`.
pub(super) fn lu(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let x = x.first()?;
    let (swaps, l, u) = x.clone().lu().unpack();
    let mut places = Matrix::from_fn(x.nrows(), 1, |i, _| i as f64);
    swaps.permute_rows(&mut places);
    Some(vec![places, l, u])
}

/// The determinant.
pub(super) fn det(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let value = x.first()?.clone().lu().determinant();
    Some(vec![Matrix::from_element(1, 1, value)])
}

/// The solution of a square system.
pub(super) fn solve(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let [a, b] = x else { return None };
    Some(vec![a.clone().lu().solve(b)?])
}

/// That of a triangular one.
pub(super) fn solve_triangular(x: &[Matrix], upper: bool) -> Option<Vec<Matrix>> {
    let [a, b] = x else { return None };
    let solution = match upper {
        true => a.solve_upper_triangular(b),
        false => a.solve_lower_triangular(b),
    };
    Some(vec![solution?])
}

/// Whether the element furthest from 0, the first of equal ones, is negative.
fn turned(column: impl Iterator<Item = f64>) -> bool {
    let mut furthest = 0.0f64;
    for v in column {
        if v.abs() > furthest.abs() {
            furthest = v;
        }
    }
    furthest < 0.0
}

/// `u`, singular values, `vt`.
pub(super) fn svd(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let x = x.first()?;
    let svd = SVD::try_new_unordered(x.clone(), true, true, NEAR, steps(x.nrows().max(x.ncols())))?;
    let (u, s, vt) = (svd.u?, svd.singular_values, svd.v_t?);
    let mut order: Vec<usize> = (0..s.len()).collect();
    order.sort_by(|&i, &j| s[j].total_cmp(&s[i]));
    let signs: Vec<f64> = order
        .iter()
        .map(|&i| match turned(u.column(i).iter().copied()) {
            true => -1.0,
            false => 1.0,
        })
        .collect();
    Some(vec![
        Matrix::from_fn(u.nrows(), order.len(), |r, c| u[(r, order[c])] * signs[c]),
        Matrix::from_fn(order.len(), 1, |r, _| s[order[r]]),
        Matrix::from_fn(order.len(), vt.ncols(), |r, c| vt[(order[r], c)] * signs[r]),
    ])
}

/// Eigenvalues and eigenvectors of a symmetric matrix.
pub(super) fn eigh(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let x = x.first()?;
    let n = x.nrows();
    let symmetric = Matrix::from_fn(n, n, |r, c| x[(r.max(c), r.min(c))]);
    let found = SymmetricEigen::try_new(symmetric, NEAR, steps(n))?;
    let (values, vectors) = (found.eigenvalues, found.eigenvectors);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let sign = |&i: &usize| match turned(vectors.column(i).iter().copied()) {
        true => -1.0,
        false => 1.0,
    };
    let signs: Vec<f64> = order.iter().map(sign).collect();
    Some(vec![
        Matrix::from_fn(n, 1, |r, _| values[order[r]]),
        Matrix::from_fn(n, n, |r, c| vectors[(r, order[c])] * signs[c]),
    ])
}

type Number = Complex<f64>;

/// `|z|`, of which nothing on the way overflows or is lost.
fn size(z: Number) -> f64 {
    libm::hypot(z.re, z.im)
}

/// A real Schur form made a complex one: each block of two on the diagonal is turned until it is triangular.
fn triangular(q: Matrix, t: Matrix) -> (DMatrix<Number>, DMatrix<Number>) {
    let n = t.nrows();
    let complex = |m: Matrix| m.map(|v| Number::new(v, 0.0));
    let (mut q, mut t) = (complex(q), complex(t));
    for m in (1..n).rev() {
        let below = t[(m, m - 1)];
        if size(below) <= NEAR * (size(t[(m - 1, m - 1)]) + size(t[(m, m)])) {
            t[(m, m - 1)] = Number::new(0.0, 0.0);
            continue;
        }
        // An eigenvalue of [[a, b], [c, d]], less d; a block that is there has two that are complex.
        let (a, b, c, d) = (t[(m - 1, m - 1)], t[(m - 1, m)], below, t[(m, m)]);
        let half = (a - d) * 0.5;
        let shifted = half + root(half * half + b * c);
        let length = libm::hypot(size(shifted), size(c));
        let (cosine, sine) = (shifted / length, c / length);
        for k in m - 1..n {
            let (x, y) = (t[(m - 1, k)], t[(m, k)]);
            t[(m - 1, k)] = cosine.conj() * x + sine.conj() * y;
            t[(m, k)] = cosine * y - sine * x;
        }
        for k in 0..=m {
            let (x, y) = (t[(k, m - 1)], t[(k, m)]);
            t[(k, m - 1)] = x * cosine + y * sine;
            t[(k, m)] = y * cosine.conj() - x * sine.conj();
        }
        for k in 0..n {
            let (x, y) = (q[(k, m - 1)], q[(k, m)]);
            q[(k, m - 1)] = x * cosine + y * sine;
            q[(k, m)] = y * cosine.conj() - x * sine.conj();
        }
        t[(m, m - 1)] = Number::new(0.0, 0.0);
    }
    (q, t)
}

/// The root with the greater real part.
fn root(z: Number) -> Number {
    let length = size(z);
    let re = libm::sqrt((length + z.re).max(0.0) * 0.5);
    let im = libm::sqrt((length - z.re).max(0.0) * 0.5);
    Number::new(re, if z.im < 0.0 { -im } else { im })
}

/// Eigenvalues and eigenvectors, their real and imaginary parts side by side.
pub(super) fn eig(x: &[Matrix], _: bool) -> Option<Vec<Matrix>> {
    let x = x.first()?;
    let n = x.nrows();
    // The greatest number near 1, exactly, so that nothing overflows or is lost.
    let shift = match x.amax() {
        most if most > 0.0 => libm::ilogb(most),
        _ => 0,
    };
    let scaled = x.map(|v| libm::scalbn(v, -shift));
    let schur = Schur::try_new(scaled, NEAR, steps(n))?;
    let (q, t) = schur.unpack();
    // Of these the two of a pair have the same real part, and real ones no imaginary one, which the order goes by.
    let (q, t) = triangular(q, t);
    let least = NEAR;
    let snapped = |z: Number| -> Number {
        match z.im.abs() <= 64.0 * least {
            true => Number::new(z.re, 0.0),
            false => z,
        }
    };
    let mut values: Vec<Number> = (0..n).map(|i| snapped(t[(i, i)])).collect();
    for i in 1..n {
        let (a, b) = (values[i - 1], values[i]);
        if a.im != 0.0 && a.im * b.im < 0.0 && size(a - b.conj()) <= 64.0 * n as f64 * least {
            values[i] = a.conj();
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| {
        let (a, b) = (values[i], values[j]);
        a.re.total_cmp(&b.re).then(a.im.total_cmp(&b.im))
    });
    let mut vectors = Matrix::zeros(n, 2 * n);
    for (column, &k) in order.iter().enumerate() {
        let vector = eigenvector(&q, &t, k, least);
        for (row, v) in vector.into_iter().enumerate() {
            vectors[(row, 2 * column)] = v.re;
            vectors[(row, 2 * column + 1)] = v.im;
        }
    }
    let parts = |r: usize, c: usize| {
        let v = values[order[r]];
        libm::scalbn(if c == 0 { v.re } else { v.im }, shift)
    };
    Some(vec![Matrix::from_fn(n, 2, parts), vectors])
}

/// The one that belongs to place `k` of the diagonal: (t − tₖₖ)·y = 0 from below, then `q · y`. Where two eigenvalues are the same the
/// difference is taken to be `least`, as LAPACK does.
fn eigenvector(q: &DMatrix<Number>, t: &DMatrix<Number>, k: usize, least: f64) -> Vec<Number> {
    let mut y = vec![Number::new(0.0, 0.0); k + 1];
    y[k] = Number::new(1.0, 0.0);
    for i in (0..k).rev() {
        let sum = (i + 1..=k).fold(Number::new(0.0, 0.0), |sum, j| sum + t[(i, j)] * y[j]);
        let mut apart = t[(i, i)] - t[(k, k)];
        if size(apart) < least {
            apart = Number::new(least, 0.0);
        }
        y[i] = -sum / apart;
        // Kept within bounds: only the direction counts.
        let greatest = y[i..].iter().map(|v| size(*v)).fold(0.0, f64::max);
        if greatest > 1e100 {
            y.iter_mut().for_each(|v| *v /= greatest);
        }
    }
    let n = q.nrows();
    let mut vector: Vec<Number> = (0..n)
        .map(|r| (0..=k).fold(Number::new(0.0, 0.0), |sum, j| sum + q[(r, j)] * y[j]))
        .collect();
    let length = libm::sqrt(vector.iter().map(|v| v.norm_sqr()).sum());
    let mut furthest = Number::new(1.0, 0.0);
    let mut far = 0.0;
    for v in &vector {
        // A little more than equal: the two of a pair of equal ones differ by rounding.
        if size(*v) > far * (1.0 + 1e-9) {
            (furthest, far) = (*v, size(*v));
        }
    }
    let turn = furthest.conj() / size(furthest) / length;
    vector.iter_mut().for_each(|v| *v *= turn);
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without a pattern, the same each time.
    fn some(m: usize, n: usize) -> Matrix {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        Matrix::from_fn(m, n, |_, _| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        })
    }

    #[track_caller]
    fn near(a: &Matrix, b: &Matrix) {
        assert_eq!(a.shape(), b.shape());
        let error = (a - b).norm();
        assert!(error <= 1e-10 * (1.0 + b.norm()), "{error} {a} {b}");
    }

    #[test]
    fn factors_give_back_what_they_are_of() {
        for (m, n) in [(1, 1), (2, 2), (5, 3), (3, 5), (17, 17), (40, 9), (9, 40)] {
            let x = [some(m, n)];
            let f = qr(&x, false).unwrap();
            near(&(&f[0] * &f[1]), &x[0]);
            assert!((0..m.min(n)).all(|i| f[1][(i, i)] >= 0.0));
            let f = lu(&x, false).unwrap();
            let rows = Matrix::from_fn(m, n, |r, c| x[0][(f[0][(r, 0)] as usize, c)]);
            near(&(&f[1] * &f[2]), &rows);
            let f = svd(&x, false).unwrap();
            let s = Matrix::from_diagonal(&f[1].column(0).into_owned());
            near(&(&f[0] * s * &f[2]), &x[0]);
            near(
                &(f[0].transpose() * &f[0]),
                &Matrix::identity(m.min(n), m.min(n)),
            );
        }
    }

    #[test]
    fn eigenvectors_are_scaled_by_their_eigenvalues() {
        let companion =
            Matrix::from_row_slice(3, 3, &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        let turn = Matrix::from_row_slice(2, 2, &[0.0, -1.0, 1.0, 0.0]);
        let defective = Matrix::from_row_slice(2, 2, &[2.0, 1.0, 0.0, 2.0]);
        let more = [
            some(7, 7),
            some(24, 24),
            some(1, 1),
            Matrix::identity(4, 4),
            Matrix::zeros(3, 3),
        ];
        for x in [companion, turn, defective].into_iter().chain(more) {
            let n = x.nrows();
            let f = eig(std::slice::from_ref(&x), false).unwrap();
            let whole = |m: &Matrix| {
                DMatrix::from_fn(m.nrows(), m.ncols() / 2, |r, c| {
                    Number::new(m[(r, 2 * c)], m[(r, 2 * c + 1)])
                })
            };
            let (values, vectors) = (whole(&f[0]), whole(&f[1]));
            let left = x.map(|v| Number::new(v, 0.0)) * &vectors;
            let right = DMatrix::from_fn(n, n, |r, c| vectors[(r, c)] * values[(c, 0)]);
            assert!((left - right).norm() < 1e-10, "{x} {values} {vectors}");
            let ones = (0..n).all(|c| (vectors.column(c).norm() - 1.0).abs() < 1e-12);
            assert!(ones, "{vectors}");
            let sum: Number = values.iter().sum();
            assert!(size(sum - Number::new(x.trace(), 0.0)) < 1e-10, "{values}");
        }
    }

    #[test]
    fn what_is_not_there_is_none() {
        let singular = Matrix::from_row_slice(2, 2, &[1.0, 2.0, 2.0, 4.0]);
        let b = Matrix::identity(2, 2);
        assert!(solve(&[singular.clone(), b.clone()], false).is_none());
        assert!(cholesky(&[-&b], false).is_none());
        let triangular = Matrix::from_row_slice(2, 2, &[1.0, 0.0, 5.0, 0.0]);
        assert!(solve_triangular(&[triangular, b], false).is_none());
        assert_eq!(det(&[singular], false).unwrap()[0][(0, 0)], 0.0);
    }
}
