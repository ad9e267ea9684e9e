//! Linear algebra of the last two axes: factors, solutions, eigenvalues. Axes before these are a batch.
//!
//! A matrix that has no such result gives one of NaN alone, and so does one that holds NaN or an infinity: among many in a batch, one must not
//! end the others' computation. Whoever has to know asks whether the result is finite.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, OpRow, ops,
        rules::{Specs, Values, cast_to, common, dtype_error, size_of, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

/// Rows and columns at most where work grows with a matrix's cube: seconds on one core.
const LARGEST: usize = 1024;
/// Where it takes many such sweeps.
const LARGEST_OF_SWEEPS: usize = 512;

ops! {
    /// The lower triangular `l` with positive diagonal of which `l · lᵀ` is `x`, symmetric and positive definite, of which only the lower
    /// triangle is read (NumPy's `cholesky`); `upper`: `lᵀ`. NaN where `x` is not positive definite. At most 1024 rows.
    cholesky(x; upper: Bool) -> one { shapes: "[…, n, n]", dtypes: "f32, f64 → x", effect: Effect::None, infer: cholesky_spec, decompose: None }

    /// `x = q · r`: `q` with orthonormal columns, `r` upper triangular with no negative number on its diagonal (NumPy's `qr` up to these
    /// signs), `k` the smaller of `m` and `n`. At most 1024 rows and columns.
    qr(x;) -> two { shapes: "[…, m, n] → [m, k], [k, n]", dtypes: "f32, f64 → x, twice", effect: Effect::None, infer: qr_spec, decompose: None }

    /// `x[p] = l · u` with partial pivoting: `p` says which row of `x` comes at each place, `l` is lower triangular with ones on its diagonal,
    /// `u` upper triangular, `k` the smaller of `m` and `n` (SciPy's `lu` with `p_indices` says where each row of `x` went). At most 1024 rows and
    /// columns.
    lu(x;) -> many { shapes: "[…, m, n] → [m], [m, k], [k, n]", dtypes: "f32, f64 → u32, x, x", effect: Effect::None, infer: lu_spec, decompose: None }

    /// The determinant (NumPy's `det`). At most 1024 rows.
    det(x;) -> one { shapes: "[…, n, n] → […]", dtypes: "f32, f64 → x", effect: Effect::None, infer: det_spec, decompose: None }

    /// The `x` of which `a · x` is `b` (NumPy's `solve`). NaN where a pivot is 0. At most 1024 rows and columns.
    solve(a, b;) -> one { shapes: "[…, n, n], […, n, k] → broadcast(…), [n, k]", dtypes: "f32, f64 → promote(a, b)", effect: Effect::None, infer: solve_spec, decompose: Some(solve_alike) }

    /// The `x` of which `a · x` is `b`, `a` being triangular: only its lower triangle is read, or if `upper` the upper one (SciPy's
    /// `solve_triangular`). NaN where 0 is on the diagonal. At most 1024 rows and columns.
    solve_triangular(a, b; upper: Bool) -> one { shapes: "[…, n, n], […, n, k] → broadcast(…), [n, k]", dtypes: "f32, f64 → promote(a, b)", effect: Effect::None, infer: solve_spec, decompose: Some(solve_triangular_alike) }

    /// `x = u · diag(s) · vt`: `u` with orthonormal columns, `vt` with orthonormal rows, `s` descending, none negative, `k` the smaller of `m` and `n`
    /// (NumPy's `svd` without `full_matrices`). Of each column of `u` the element furthest from 0, the first of equal ones, is positive.
    /// At most 512 rows and columns.
    svd(x;) -> many { shapes: "[…, m, n] → [m, k], [k], [k, n]", dtypes: "f32, f64 → x, three times", effect: Effect::None, infer: svd_spec, decompose: None }

    /// Eigenvalues, ascending, and orthonormal eigenvectors, one in each column, of a symmetric matrix of which only the lower triangle is
    /// read (NumPy's `eigh`). Of each vector the element furthest from 0, the first of equal ones, is positive. At most 512 rows.
    eigh(x;) -> two { shapes: "[…, n, n] → [n], [n, n]", dtypes: "f32, f64 → x, twice", effect: Effect::None, infer: eigh_spec, decompose: None }

    /// Eigenvalues, ascending by real and then by imaginary part, and eigenvectors of length 1, one in each column, of any square matrix
    /// (NumPy's `eig`). Of each vector the element furthest from 0, the first of equal ones, is a positive real number; a matrix without a basis of
    /// eigenvectors has vectors that are almost parallel. At most 512 rows.
    eig(x;) -> two { shapes: "[…, n, n] → [n], [n, n]", dtypes: "f32, f64 → c64, twice", effect: Effect::None, infer: eig_spec, decompose: None }
}

/// A batch of matrices.
struct Matrices {
    dtype: DType,
    before: Vec<Dim>,
    m: usize,
    n: usize,
}

impl Matrices {
    fn of(call: &Call<'_>, i: usize, largest: usize) -> Result<Self, GraphError> {
        let t = call.tensor(i)?;
        if !matches!(t.dtype, DType::F32 | DType::F64) {
            return Err(dtype_error(call, t.dtype));
        }
        let [before @ .., m, n] = t.shape.dims() else {
            let name = call.input_name(i);
            return Err(call.error(format_args!(
                "{name} {} must have the two axes of a matrix",
                t.shape
            )));
        };
        let size = |dim: &Dim| size_of(call, *dim, "that of a matrix");
        let (m, n) = (size(m)?, size(n)?);
        if !(1..=largest).contains(&m) || !(1..=largest).contains(&n) {
            return Err(call.error(format_args!(
                "matrices of {m} rows and {n} columns; both must be between 1 and {largest}"
            )));
        }
        Ok(Self {
            dtype: t.dtype,
            before: before.to_vec(),
            m,
            n,
        })
    }

    fn square(call: &Call<'_>, i: usize, largest: usize) -> Result<Self, GraphError> {
        let x = Self::of(call, i, largest)?;
        match x.m == x.n {
            true => Ok(x),
            false => Err(call.error(format_args!(
                "{} must be square, not of {} rows and {} columns",
                call.input_name(i),
                x.m,
                x.n
            ))),
        }
    }

    /// The smaller of the two axes.
    fn k(&self) -> usize {
        self.m.min(self.n)
    }

    /// As many of these sizes.
    fn spec(&self, dtype: DType, sizes: &[usize]) -> Result<TensorSpec, GraphError> {
        let sizes = sizes.iter().copied().map(Dim::Fixed);
        let shape = Shape::new(self.before.iter().copied().chain(sizes))?;
        TensorSpec::new(dtype, shape)
    }
}

fn cholesky_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::square(call, 0, LARGEST)?;
    Ok(vec![x.spec(x.dtype, &[x.n, x.n])?])
}

fn qr_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::of(call, 0, LARGEST)?;
    Ok(vec![
        x.spec(x.dtype, &[x.m, x.k()])?,
        x.spec(x.dtype, &[x.k(), x.n])?,
    ])
}

fn lu_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::of(call, 0, LARGEST)?;
    Ok(vec![
        x.spec(DType::U32, &[x.m])?,
        x.spec(x.dtype, &[x.m, x.k()])?,
        x.spec(x.dtype, &[x.k(), x.n])?,
    ])
}

fn det_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::square(call, 0, LARGEST)?;
    Ok(vec![x.spec(x.dtype, &[])?])
}

fn svd_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::of(call, 0, LARGEST_OF_SWEEPS)?;
    Ok(vec![
        x.spec(x.dtype, &[x.m, x.k()])?,
        x.spec(x.dtype, &[x.k()])?,
        x.spec(x.dtype, &[x.k(), x.n])?,
    ])
}

fn eigh_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::square(call, 0, LARGEST_OF_SWEEPS)?;
    Ok(vec![
        x.spec(x.dtype, &[x.n])?,
        x.spec(x.dtype, &[x.n, x.n])?,
    ])
}

fn eig_spec(call: &Call<'_>) -> Specs {
    let x = Matrices::square(call, 0, LARGEST_OF_SWEEPS)?;
    Ok(vec![
        x.spec(DType::C64, &[x.n])?,
        x.spec(DType::C64, &[x.n, x.n])?,
    ])
}

fn solve_spec(call: &Call<'_>) -> Specs {
    let a = Matrices::square(call, 0, LARGEST)?;
    let mut b = Matrices::of(call, 1, LARGEST)?;
    if a.n != b.m {
        return Err(call.error(format_args!(
            "b must have {} rows, as a has, not {}",
            a.n, b.m
        )));
    }
    let batch = |x: &Matrices| Shape::new(x.before.iter().copied());
    let both = batch(&a)?.broadcast(&batch(&b)?);
    b.before = both.map_err(|e| call.error(e))?.dims().to_vec();
    let dtype = a.dtype.promote(b.dtype);
    let dtype = dtype.ok_or_else(|| dtype_error(call, b.dtype))?;
    // Both are given the whole batch on the way.
    b.spec(dtype, &[a.n, a.n])?;
    Ok(vec![b.spec(dtype, &[b.m, b.n])?])
}

fn solve_alike(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    alike(&solve, graph, inputs, attributes)
}

fn solve_triangular_alike(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    alike(&solve_triangular, graph, inputs, attributes)
}

/// The row itself, its inputs of one dtype and one batch.
fn alike(
    row: &'static OpRow,
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let &[a, b] = inputs else {
        return Err(GraphError::NoResult);
    };
    let dtype = common(graph, inputs)?;
    let shapes = [spec_of(graph, a)?.shape, spec_of(graph, b)?.shape];
    let batch = |shape: &Shape| {
        let dims = shape.dims();
        Shape::new(dims[..dims.len().saturating_sub(2)].iter().copied())
    };
    let both = batch(&shapes[0])?.broadcast(&batch(&shapes[1])?)?;
    let mut same = Vec::new();
    for (&value, shape) in inputs.iter().zip(&shapes) {
        let value = cast_to(graph, value, dtype)?;
        let dims = shape.dims();
        let matrix = dims[dims.len().saturating_sub(2)..].iter();
        let whole = Shape::new(both.dims().iter().chain(matrix).copied())?;
        same.push(match *shape == whole {
            true => value,
            false => graph.broadcast_to(value, whole)?,
        });
    }
    // Alike already, it has no other meaning.
    if same == inputs {
        return Err(GraphError::NoResult);
    }
    graph.apply(row, same, attributes.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, table, yes};

    #[test]
    fn factors_have_the_sizes_of_their_matrices() {
        table(
            &cholesky,
            &[
                (&["f32[rows, 3, 3]"], &[yes(false)], "f32[rows, 3, 3]"),
                (&["f32[3, 4]"], &[yes(false)], "!square"),
                (&["f16[3, 3]"], &[yes(false)], "!f16"),
                (&["f32[rows, 3]"], &[yes(false)], "!row dimension"),
                (&["f32[3]"], &[yes(false)], "!two axes"),
                (&["f32[0, 0]"], &[yes(false)], "!between 1"),
                (&["f32[1025, 1025]"], &[yes(false)], "!1024"),
            ],
        );
        table(
            &qr,
            &[(&["f64[2, 5, 3]"], &[], "f64[2, 5, 3] f64[2, 3, 3]")],
        );
        table(&lu, &[(&["f32[3, 5]"], &[], "u32[3] f32[3, 3] f32[3, 5]")]);
        table(&det, &[(&["f32[4, 3, 3]"], &[], "f32[4]")]);
        table(
            &svd,
            &[
                (&["f32[5, 3]"], &[], "f32[5, 3] f32[3] f32[3, 3]"),
                (&["f32[513, 3]"], &[], "!512"),
            ],
        );
        table(&eigh, &[(&["f64[3, 3]"], &[], "f64[3] f64[3, 3]")]);
        table(&eig, &[(&["f64[7, 3, 3]"], &[], "c64[7, 3] c64[7, 3, 3]")]);
    }

    #[test]
    fn solutions_broadcast_the_batch() {
        table(
            &solve,
            &[
                (&["f32[3, 3]", "f64[2, 3, 4]"], &[], "f64[2, 3, 4]"),
                (
                    &["f32[2, 3, 3]", "f32[rows, 1, 3, 4]"],
                    &[],
                    "f32[rows, 2, 3, 4]",
                ),
                (&["f32[3, 3]", "f32[4, 3]"], &[], "!3 rows"),
                (&["f32[2, 3, 3]", "f32[4, 3, 1]"], &[], "!"),
                (&["f32[3, 3]", "i32[3, 3]"], &[], "!i32"),
            ],
        );
        decomposes(&solve, &["f32[3, 3]", "f64[2, 3, 4]"], &[]);
        decomposes(
            &solve_triangular,
            &["f32[2, 3, 3]", "f32[rows, 1, 3, 4]"],
            &[yes(true)],
        );
    }
}
