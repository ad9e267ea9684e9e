//! Shapes in NumPy order (outermost axis first), with at most one symbolic row dimension.

use std::fmt;

use hotcell_proto::limits;

use crate::{dtype::DType, graph::GraphError};

/// One axis: a number, or the graph's symbolic row count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// This many.
    Fixed(usize),
    /// As many as the execution has rows, up to the graph's maximum.
    Rows,
}

impl Dim {
    /// The size when the execution has `rows` rows.
    pub fn at(self, rows: usize) -> usize {
        match self {
            Dim::Fixed(n) => n,
            Dim::Rows => rows,
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Dim::Fixed(n)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => n.fmt(f),
            Dim::Rows => f.write_str("rows"),
        }
    }
}

/// The axes of a tensor. The row dimension may only be the outermost axis, so that a prefix of a
/// buffer laid out for the maximum is the tensor of fewer rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Shape(Vec<Dim>);

impl Shape {
    /// Checks rank, size and the place of the row dimension.
    ///
    /// # Errors
    /// [`GraphError::Shape`] when one of them is out of bounds.
    pub fn new(dims: impl IntoIterator<Item = Dim>) -> Result<Self, GraphError> {
        let dims: Vec<Dim> = dims.into_iter().take(limits::MAX_RANK + 1).collect();
        if dims.len() > limits::MAX_RANK {
            return Err(GraphError::shape(format!(
                "more than {} axes",
                limits::MAX_RANK
            )));
        }
        if dims.iter().skip(1).any(|d| *d == Dim::Rows) {
            return Err(GraphError::shape(
                "only the outermost axis can be the row dimension",
            ));
        }
        let shape = Self(dims);
        // An axis of 0 must not excuse the others: whoever computes with them would overflow.
        let size = shape
            .0
            .iter()
            .try_fold(1usize, |n, d| n.checked_mul(d.at(1).max(1)));
        match size {
            Some(n) if n as u64 <= limits::MAX_ELEMENTS => Ok(shape),
            _ => Err(GraphError::shape(format!(
                "{shape} has axes of more than {} elements",
                limits::MAX_ELEMENTS
            ))),
        }
    }

    /// A shape of numbers.
    ///
    /// # Errors
    /// See [`Shape::new`].
    pub fn fixed(dims: &[usize]) -> Result<Self, GraphError> {
        Self::new(dims.iter().map(|&n| Dim::Fixed(n)))
    }

    /// `[rows, …inner]`.
    ///
    /// # Errors
    /// See [`Shape::new`].
    pub fn rows(inner: &[usize]) -> Result<Self, GraphError> {
        Self::new(std::iter::once(Dim::Rows).chain(inner.iter().map(|&n| Dim::Fixed(n))))
    }

    /// The axes.
    pub fn dims(&self) -> &[Dim] {
        &self.0
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Whether the outermost axis is the row dimension.
    pub fn is_symbolic(&self) -> bool {
        self.0.first() == Some(&Dim::Rows)
    }

    /// Size of the innermost axis; 1 for a scalar. `None` when that axis is the row dimension.
    pub fn inner(&self) -> Option<usize> {
        match self.0.last() {
            None => Some(1),
            Some(Dim::Fixed(n)) => Some(*n),
            Some(Dim::Rows) => None,
        }
    }

    /// Elements in all, `None` on overflow.
    pub fn elements(&self, rows: usize) -> Option<usize> {
        self.0
            .iter()
            .try_fold(1usize, |n, d| n.checked_mul(d.at(rows)))
    }

    /// Elements of one step along the outermost axis, `None` on overflow.
    pub fn elements_per_row(&self) -> Option<usize> {
        self.0
            .iter()
            .skip(1)
            .try_fold(1usize, |n, d| n.checked_mul(d.at(1)))
    }

    /// NumPy broadcasting of two shapes.
    ///
    /// # Errors
    /// [`GraphError::Shape`] naming both when they do not fit.
    pub fn broadcast(&self, other: &Shape) -> Result<Shape, GraphError> {
        let rank = self.rank().max(other.rank());
        let axis = |s: &Shape, i: usize| {
            (i + s.rank())
                .checked_sub(rank)
                .and_then(|j| s.0.get(j).copied())
                .unwrap_or(Dim::Fixed(1))
        };
        let dims: Option<Vec<Dim>> = (0..rank)
            .map(|i| match (axis(self, i), axis(other, i)) {
                (a, b) if a == b => Some(a),
                (Dim::Fixed(1), b) => Some(b),
                (a, Dim::Fixed(1)) => Some(a),
                _ => None,
            })
            .collect();
        match dims {
            Some(dims) => Shape::new(dims),
            None => Err(GraphError::shape(format!(
                "{self} and {other} do not broadcast"
            ))),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            d.fmt(f)?;
        }
        f.write_str("]")
    }
}

/// Dtype and shape of a tensor, stored row-major without gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Axes, outermost first.
    pub shape: Shape,
}

impl TensorSpec {
    /// Checks that block types fill whole blocks along the innermost axis.
    ///
    /// # Errors
    /// [`GraphError::Shape`] when they do not.
    pub fn new(dtype: DType, shape: Shape) -> Result<Self, GraphError> {
        let whole = shape.inner().is_some_and(|n| dtype.row_bytes(n).is_some());
        // A block type has an innermost axis even where a block is one number.
        let whole = whole && shape.rank() > 0;
        if dtype.is_block() && !whole {
            return Err(GraphError::shape(format!(
                "{dtype} needs an innermost axis that is a multiple of {}, not {shape}",
                dtype.block_len()
            )));
        }
        Ok(Self { dtype, shape })
    }

    /// Bytes for `rows` rows, `None` past the limit of elements.
    pub fn bytes(&self, rows: usize) -> Option<usize> {
        let n = self.shape.elements(rows)?;
        (n as u64 <= limits::MAX_ELEMENTS).then_some(())?;
        self.dtype.row_bytes(n)
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// A paged KV cache of one layer, a resource with ordered effects.
///
/// Keys and values are `[blocks, kv_heads, block_len, head_dim]` each, keys first. A *slot* is
/// `block · block_len + place`. Of a block dtype, each head of a token is whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheSpec {
    /// How entries are rounded: one of [`CacheSpec::DTYPES`].
    pub dtype: DType,
    /// Blocks in all.
    pub blocks: usize,
    /// Tokens per block.
    pub block_len: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl CacheSpec {
    /// What a cache can store.
    pub const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];

    /// Bytes of keys and values together, `None` on overflow, for a dtype a cache cannot have, or for heads that are no
    /// whole blocks of it.
    pub fn bytes(&self) -> Option<usize> {
        self.half_bytes()?.checked_mul(2)
    }

    /// Bytes of the keys alone; the values start there.
    pub fn half_bytes(&self) -> Option<usize> {
        if !Self::DTYPES.contains(&self.dtype) {
            return None;
        }
        self.dtype.row_bytes(self.head_dim)?;
        let n = self
            .blocks
            .checked_mul(self.block_len)?
            .checked_mul(self.kv_heads)?
            .checked_mul(self.head_dim)?;
        (n as u64 <= limits::MAX_ELEMENTS).then_some(())?;
        self.dtype.row_bytes(n)
    }

    /// Slots in all; saturates, a size that [`CacheSpec::bytes`] accepts cannot overflow.
    pub fn slots(&self) -> usize {
        self.blocks.saturating_mul(self.block_len)
    }
}

impl fmt::Display for CacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "cache {}[{}, {}, {}, {}]",
            self.dtype, self.blocks, self.kv_heads, self.block_len, self.head_dim
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        let s = |d: &[usize]| Shape::fixed(d).unwrap();
        assert_eq!(s(&[3, 1]).broadcast(&s(&[4])).unwrap(), s(&[3, 4]));
        assert_eq!(
            Shape::rows(&[4]).unwrap().broadcast(&s(&[4])).unwrap(),
            Shape::rows(&[4]).unwrap()
        );
        assert_eq!(
            Shape::rows(&[4]).unwrap().broadcast(&s(&[1, 1])).unwrap(),
            Shape::rows(&[4]).unwrap()
        );
        assert!(Shape::rows(&[4]).unwrap().broadcast(&s(&[2, 4])).is_err());
        assert!(s(&[3]).broadcast(&s(&[4])).is_err());
    }

    #[test]
    fn sizes_are_checked() {
        assert!(Shape::fixed(&[usize::MAX, 2]).is_err());
        assert!(Shape::fixed(&[1; 9]).is_err());
        assert!(Shape::new([Dim::Fixed(2), Dim::Rows]).is_err());
        assert!(TensorSpec::new(DType::Q4_0, Shape::fixed(&[2, 33]).unwrap()).is_err());
        assert!(TensorSpec::new(DType::Q4_0, Shape::new([Dim::Rows]).unwrap()).is_err());
        let spec = CacheSpec {
            dtype: DType::F16,
            blocks: usize::MAX,
            block_len: 2,
            kv_heads: 1,
            head_dim: 1,
        };
        assert_eq!(spec.bytes(), None);
        let bytes = |dtype, head_dim| {
            let spec = CacheSpec {
                dtype,
                blocks: 3,
                block_len: 2,
                kv_heads: 5,
                head_dim,
            };
            spec.bytes()
        };
        assert_eq!(bytes(DType::BF16, 48), Some(2 * 3 * 2 * 5 * 48 * 2));
        assert_eq!(bytes(DType::Q8_0, 64), Some(2 * 3 * 2 * 5 * 2 * 34));
        assert_eq!(bytes(DType::Q8_0, 48), None);
        assert_eq!(bytes(DType::Q4_0, 64), None);
    }
}
