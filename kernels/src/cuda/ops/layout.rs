//! Where elements are: shapes and strides as the generic kernels take them (`generic.cuh`).

use hotcell_graph::{DType, Shape, shape::Dim};

use crate::cuda::gpu::Grid;

/// Axes of a [`Layout`] at most.
const AXES: usize = 8;

/// Operands of a [`Layout`] at most.
const OPERANDS: usize = 4;

/// Blocks of a generic kernel at most: enough to fill any device several times over.
const MOST_BLOCKS: u64 = 4096;

/// How kernels name a real dtype: by its place (`elements.cuh`).
pub(super) fn code(dtype: DType) -> Option<u32> {
    let place = DType::REAL.iter().position(|d| *d == dtype)?;
    u32::try_from(place).ok()
}

/// Elements, and the strides of up to four operands, in elements. Neighbouring axes along which all operands go on are one.
pub(super) struct Layout {
    dims: Vec<u64>,
    strides: Vec<[i64; OPERANDS]>,
}

impl Layout {
    /// All elements of a shape; of each operand the stride along each axis. `None` for more axes than there can be.
    pub fn new(dims: &[usize], operands: &[Vec<i64>]) -> Option<Self> {
        if dims.len() > AXES || operands.len() > OPERANDS {
            return None;
        }
        let mut all = Self {
            dims: Vec::new(),
            strides: Vec::new(),
        };
        for (axis, &dim) in dims.iter().enumerate() {
            let mut strides = [0; OPERANDS];
            for (stride, operand) in strides.iter_mut().zip(operands) {
                *stride = *operand.get(axis)?;
            }
            all.push(dim as u64, strides);
        }
        Some(all)
    }

    fn push(&mut self, dim: u64, strides: [i64; OPERANDS]) {
        if dim == 1 {
            return;
        }
        if let (Some(before), Some(last)) = (self.dims.last_mut(), self.strides.last_mut()) {
            let mut both = last.iter().zip(&strides);
            if both.all(|(outer, inner)| inner.checked_mul(dim as i64) == Some(*outer)) {
                *before = before.saturating_mul(dim);
                *last = strides;
                return;
            }
        }
        self.dims.push(dim);
        self.strides.push(strides);
    }

    /// How many elements there are.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// As the kernels take it, by value.
    pub fn words(&self) -> Vec<u64> {
        let mut words = vec![self.elements(), self.dims.len() as u64];
        let dim = |axis: usize| self.dims.get(axis).copied().unwrap_or(1);
        words.extend((0..AXES).map(dim));
        for operand in 0..OPERANDS {
            let stride = |axis: usize| self.strides.get(axis).map_or(0, |s| s[operand]);
            words.extend((0..AXES).map(|axis| stride(axis) as u64));
        }
        words
    }
}

/// Sizes of the axes for some rows.
pub(super) fn dims_at(shape: &Shape, rows: usize) -> Vec<usize> {
    shape.dims().iter().map(|d: &Dim| d.at(rows)).collect()
}

/// Elements before, along and after an axis.
pub(super) fn around(dims: &[usize], axis: usize) -> Option<[u64; 3]> {
    let product = |dims: &[usize]| {
        let mut sizes = dims.iter();
        sizes.try_fold(1u64, |n, &d| n.checked_mul(d as u64))
    };
    let (before, rest) = dims.split_at_checked(axis)?;
    let (&n, after) = rest.split_first()?;
    Some([product(before)?, n as u64, product(after)?])
}

/// Strides of a tensor that lies close together.
pub(super) fn contiguous(dims: &[usize]) -> Vec<i64> {
    let mut stride = 1i64;
    let mut strides: Vec<i64> = dims
        .iter()
        .rev()
        .map(|&dim| {
            let here = stride;
            stride = stride.saturating_mul(dim as i64);
            here
        })
        .collect();
    strides.reverse();
    strides
}

/// Strides of such a tensor along the axes of a shape that it broadcasts to.
pub(super) fn broadcast(from: &[usize], to: &[usize]) -> Vec<i64> {
    let own = contiguous(from);
    let missing = to.len().saturating_sub(from.len());
    let inner = from.iter().zip(own);
    let inner = inner.map(|(&dim, stride)| if dim == 1 { 0 } else { stride });
    std::iter::repeat_n(0, missing).chain(inner).collect()
}

/// The grid of a generic kernel for so many elements.
pub(super) fn grid(elements: u64) -> Grid {
    grid_of(elements.div_ceil(256))
}

/// The grid of a kernel that would have a block of 256 threads for each of so many parts, and goes on by the whole grid.
pub(super) fn grid_of(parts: u64) -> Grid {
    let blocks = parts.min(MOST_BLOCKS);
    Grid {
        blocks: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
        threads: [256, 1, 1],
        shared: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_know_the_dtypes_by_the_same_numbers() {
        let source = include_str!("../elements.cuh");
        let (_, list) = source.split_once("enum Dtype : unsigned {").unwrap();
        let (list, _) = list.split_once('}').unwrap();
        let names: Vec<String> = list.split(',').map(|n| n.trim().to_lowercase()).collect();
        let ours: Vec<String> = DType::REAL.iter().map(|d| format!("of_{d}")).collect();
        assert_eq!(names, ours);
    }

    #[test]
    fn axes_along_which_all_go_on_are_one() {
        let whole = contiguous(&[4, 5, 6]);
        assert_eq!(whole, [30, 6, 1]);
        let layout = Layout::new(&[4, 5, 6], &[whole.clone(), whole.clone()]).unwrap();
        assert_eq!(layout.dims, [120]);
        let row = broadcast(&[6], &[4, 5, 6]);
        assert_eq!(row, [0, 0, 1]);
        let layout = Layout::new(&[4, 5, 6], &[whole.clone(), row]).unwrap();
        assert_eq!(layout.dims, [20, 6]);
        let column = broadcast(&[4, 1, 1], &[4, 5, 6]);
        let layout = Layout::new(&[4, 5, 6], &[whole, column]).unwrap();
        assert_eq!(layout.dims, [4, 30]);
        assert_eq!(layout.elements(), 120);
        assert_eq!(layout.words().len(), 2 + AXES + OPERANDS * AXES);
        assert_eq!(Layout::new(&[], &[vec![]]).unwrap().elements(), 1);
        assert_eq!(Layout::new(&[3, 0], &[vec![0, 1]]).unwrap().elements(), 0);
    }
}
