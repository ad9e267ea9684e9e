//! Multiplication of two activations: `out[i, j] = Σ_k a[i, k] · b[k, j]`, all row-major.
//!
//! # The order of summation
//!
//! Each output is one chain that starts at `+0.0` and goes through `k` in ascending order,
//! `acc = fma(a_ik, b_kj, acc)`, in f64 for f64 and in f32 for f32, f16 and bf16, whose elements are converted
//! exactly and whose sum is rounded once at the end. It depends on nothing else: not on the number of rows
//! or columns, the blocking, the threads nor the instruction path; it is also the order in which
//! [`matmul`](super::matmul) sums plain weights, but on the path of AMX. c64 has four such steps per `k`:
//! `re = fma(−a.im, b.im, fma(a.re, b.re, re))`, `im = fma(a.im, b.re, fma(a.re, b.im, im))`.
//! A NaN result has the bits of the quiet NaN without payload. A sum of nothing is `+0.0`.
//!
//! # How
//!
//! Both operands are packed into panels that are read in a straight line, `b` in blocks for the second and third
//! level of cache, `a` for the second, and multiplied tile by tile in registers (Goto and van de Geijn's
//! scheme, as in BLIS). Few rows read `b` where it lies, once; few columns are the weights' kernel with
//! the operands exchanged. Packed blocks lie in scratch memory of the caller: nothing is allocated.

use std::ops::Range;

use half::{bf16, f16};
use hotcell_graph::DType;

use super::{matmul::MulMat, path::CpuPath};

mod block;
mod complex;
mod grid;
mod kernels;
mod vector;

pub use grid::{Grid, Unit};

use block::{Block, PackColumns, PackRows, RUN, Round, Sweep};
pub(super) use kernels::Kernels;
use kernels::{TILE_COLUMNS, TILE_ROWS};
pub(super) use vector::{Element, Number};

/// Depth of a packed block.
const DEPTH: usize = 384;
/// Rows of `a` that are packed at a time.
const ROWS: usize = 10 * TILE_ROWS;
/// Columns of `b` that are packed at a time.
const COLUMNS: usize = 16 * TILE_COLUMNS;
/// Rows for which a packed block of `b` is used before the next one takes its place.
const OUTER: usize = 8 * ROWS;
/// Up to so many rows, `b` is read where it lies.
const FEW_ROWS: usize = 12;
/// Columns of a sweep: the sums should stay in the first two levels of cache.
const SWEEP: usize = 2048;
/// Up to so many columns, the weights' kernel is better.
const FEW_COLUMNS: usize = 12;

/// Sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Dtype of both operands and the result: f32, f64, f16, bf16 or c64.
    pub dtype: DType,
    /// Rows of `a` and of the result.
    pub m: usize,
    /// Columns of `b` and of the result.
    pub n: usize,
    /// Columns of `a` and rows of `b`.
    pub k: usize,
}

/// Where operands and result of a product lie.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// The first byte of `a`, at any alignment.
    pub a: *const u8,
    /// The first byte of `b`, at any alignment.
    pub b: *const u8,
    /// The first byte of the result, aligned as its dtype wants.
    pub out: *mut u8,
}

/// Whether there is a product of this dtype.
pub const fn is_gemm_dtype(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::C64
    )
}

/// The `b` of a product, or what is to be packed in its place.
pub(super) trait Columns<T: Element> {
    /// Writes the given rows and columns into panels; see [`PackColumns`].
    ///
    /// # Safety
    ///
    /// The operand is valid; the panels have room.
    unsafe fn pack(
        &self,
        kernels: &Kernels<T>,
        k: Range<usize>,
        n: Range<usize>,
        into: *mut T::Sum,
    );
}

/// A `b` that lies in memory.
struct Matrix<T> {
    at: *const T,
    stride: usize,
}

impl<T: Element> Columns<T> for Matrix<T> {
    unsafe fn pack(
        &self,
        kernels: &Kernels<T>,
        k: Range<usize>,
        n: Range<usize>,
        into: *mut T::Sum,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            (kernels.pack_columns)(&PackColumns {
                from: self.at.add(k.start * self.stride + n.start),
                stride: self.stride,
                columns: n.len(),
                k: k.len(),
                tile: kernels.tile.1,
                into,
            });
        }
    }
}

/// Sizes of the pieces of scratch memory, in sums.
struct Pieces {
    a: usize,
    b: usize,
    c: usize,
}

impl Gemm {
    const fn sum_bytes(&self) -> usize {
        match self.dtype {
            DType::F64 => 8,
            _ => 4,
        }
    }

    /// Whether sums are wider than results, so that they need a place of their own.
    const fn rounds(&self) -> bool {
        matches!(self.dtype, DType::F16 | DType::BF16)
    }

    fn few_columns(&self) -> bool {
        self.n <= FEW_COLUMNS && self.dtype != DType::F64
    }

    fn packed_pieces(&self) -> Pieces {
        let (m, n) = (self.m.min(OUTER), self.n.min(COLUMNS));
        let k = self.k.min(DEPTH);
        Pieces {
            a: m.min(ROWS).next_multiple_of(TILE_ROWS) * k.next_multiple_of(RUN),
            b: k * n.next_multiple_of(TILE_COLUMNS),
            c: if self.rounds() { m * n } else { 0 },
        }
    }

    /// Bytes of scratch memory that each part needs for this product, and for any of fewer rows.
    pub fn scratch_bytes(&self) -> usize {
        if self.dtype == DType::C64 {
            return 0;
        }
        let Pieces { a, b, c } = self.packed_pieces();
        let line = |sums: usize| (sums * self.sum_bytes()).next_multiple_of(64);
        let packed = line(a) + line(b) + line(c);
        let sweep = if self.rounds() {
            line(FEW_ROWS.min(self.m) * SWEEP.min(self.n))
        } else {
            0
        };
        let few = if self.few_columns() {
            line(self.n * self.k) + line(self.n * OUTER.min(self.m))
        } else {
            0
        };
        packed.max(sweep).max(few)
    }

    /// Computes the results in `rows` and `columns`.
    ///
    /// # Panics
    ///
    /// When the dtype is none of a product ([`is_gemm_dtype`]); known when a plan is made.
    ///
    /// # Safety
    ///
    /// Operands and result are valid for the sizes, which hold `rows` and `columns`; nobody else touches these
    /// results meanwhile. `scratch` has [`Gemm::scratch_bytes`] bytes for this thread alone, at the alignment of a
    /// cache line.
    pub unsafe fn run(
        &self,
        path: CpuPath,
        at: Operands,
        rows: Range<usize>,
        columns: Range<usize>,
        scratch: *mut u8,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 => self.typed::<f32>(path, at, rows, columns, scratch),
                DType::F64 => self.typed::<f64>(path, at, rows, columns, scratch),
                DType::F16 => self.typed::<f16>(path, at, rows, columns, scratch),
                DType::BF16 => self.typed::<bf16>(path, at, rows, columns, scratch),
                DType::C64 => complex::product(path, self, at, rows, columns),
                dtype => panic!("{dtype} cannot be multiplied"),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Gemm::run`], and `T` is the dtype.
    unsafe fn typed<T: Element>(
        &self,
        path: CpuPath,
        at: Operands,
        rows: Range<usize>,
        columns: Range<usize>,
        scratch: *mut u8,
    ) {
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        // SAFETY: the caller's promise; the first row is `rows.start`.
        unsafe {
            let a = at.a.cast::<T>().add(rows.start * self.k);
            let out = at.out.cast::<T>().add(rows.start * self.n);
            if self.k == 0 {
                for row in 0..rows.len() {
                    // Zero bits are +0.0 in every dtype.
                    out.add(row * self.n + columns.start)
                        .write_bytes(0, columns.len());
                }
            } else if self.few_columns() {
                self.few::<T>(path, a, at.b.cast(), out, rows.len(), columns, scratch);
            } else if rows.len() <= FEW_ROWS {
                self.sweep(path, a, at.b.cast(), out, rows.len(), columns, scratch);
            } else {
                let b = Matrix {
                    at: at.b.cast::<T>(),
                    stride: self.n,
                };
                self.packed(path, a, &b, out, rows.len(), columns, scratch);
            }
        }
    }

    /// The blocked product.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::run`]; `a` and `out` begin at the first row.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn packed<T: Element>(
        &self,
        path: CpuPath,
        a: *const T,
        b: &impl Columns<T>,
        out: *mut T,
        rows: usize,
        columns: Range<usize>,
        scratch: *mut u8,
    ) {
        let kernels = Kernels::<T>::of(path);
        let pieces = self.packed_pieces();
        let line = |sums: usize| (sums * size_of::<T::Sum>()).next_multiple_of(64);
        // SAFETY: the scratch memory has room for the three pieces; every block stays within its piece, and
        // all pointers within what the caller promised.
        unsafe {
            let packed_a = scratch.cast::<T::Sum>();
            let packed_b = scratch.add(line(pieces.a)).cast::<T::Sum>();
            let sums = scratch
                .add(line(pieces.a) + line(pieces.b))
                .cast::<T::Sum>();
            for j in columns.clone().step_by(COLUMNS) {
                let width = (columns.end - j).min(COLUMNS);
                for i in (0..rows).step_by(OUTER) {
                    let outer = (rows - i).min(OUTER);
                    let result = out.add(i * self.n + j);
                    let (c, stride) = match self.rounds() {
                        true => (sums, width),
                        false => (result.cast(), self.n),
                    };
                    for k in (0..self.k).step_by(DEPTH) {
                        let depth = (self.k - k).min(DEPTH);
                        b.pack(&kernels, k..k + depth, j..j + width, packed_b);
                        for block in (0..outer).step_by(ROWS) {
                            let height = (outer - block).min(ROWS);
                            (kernels.pack_rows)(&PackRows {
                                from: a.add((i + block) * self.k + k),
                                stride: self.k,
                                rows: height,
                                k: depth,
                                tile: kernels.tile.0,
                                into: packed_a,
                            });
                            (kernels.block)(&Block {
                                a: packed_a,
                                b: packed_b,
                                c: c.add(block * stride),
                                stride,
                                rows: height,
                                columns: width,
                                k: depth,
                                first: k == 0,
                                last: k + depth == self.k,
                            });
                        }
                    }
                    if self.rounds() {
                        (kernels.round)(&Round {
                            from: sums,
                            from_stride: stride,
                            to: result,
                            to_stride: self.n,
                            rows: outer,
                            columns: width,
                        });
                    }
                }
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Gemm::packed`], with at most [`FEW_ROWS`] rows.
    #[allow(clippy::too_many_arguments)]
    unsafe fn sweep<T: Element>(
        &self,
        path: CpuPath,
        a: *const T,
        b: *const T,
        out: *mut T,
        rows: usize,
        columns: Range<usize>,
        scratch: *mut u8,
    ) {
        let kernels = Kernels::<T>::of(path);
        // SAFETY: the caller's promise; sums of the widest sweep fit into the scratch memory.
        unsafe {
            for j in columns.clone().step_by(SWEEP) {
                let width = (columns.end - j).min(SWEEP);
                let result = out.add(j);
                let (c, c_stride) = match self.rounds() {
                    true => (scratch.cast(), width),
                    false => (result.cast(), self.n),
                };
                (kernels.sweep)(&Sweep {
                    a,
                    a_stride: self.k,
                    b: b.add(j),
                    b_stride: self.n,
                    c,
                    c_stride,
                    rows,
                    columns: width,
                    k: self.k,
                });
                if self.rounds() {
                    (kernels.round)(&Round {
                        from: c,
                        from_stride: width,
                        to: result,
                        to_stride: self.n,
                        rows,
                        columns: width,
                    });
                }
            }
        }
    }

    /// The rows of `a` as weights and the columns of `b` as activations.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::packed`], with at most [`FEW_COLUMNS`] columns; not f64.
    #[allow(clippy::too_many_arguments)]
    unsafe fn few<T: Element>(
        &self,
        path: CpuPath,
        a: *const T,
        b: *const T,
        out: *mut T,
        rows: usize,
        columns: Range<usize>,
        scratch: *mut u8,
    ) {
        let (k, n) = (self.k, columns.len());
        // SAFETY: the scratch memory has room for the columns and their sums; the rest is the caller's promise.
        unsafe {
            let x = scratch.cast::<T::Sum>();
            let sums = scratch.add((self.n * k * size_of::<T::Sum>()).next_multiple_of(64));
            for (j, column) in columns.clone().enumerate() {
                for kk in 0..k {
                    let value = b.add(kk * self.n + column).read_unaligned();
                    x.add(j * k + kk).write(value.widen());
                }
            }
            for i in (0..rows).step_by(OUTER) {
                let height = (rows - i).min(OUTER);
                let weights = a.add(i * k).cast::<u8>();
                let product = MulMat {
                    dtype: self.dtype,
                    w: std::slice::from_raw_parts(weights, height * k * size_of::<T>()),
                    packed: false,
                    k,
                    x: std::slice::from_raw_parts(x.cast::<f32>(), n * k),
                    x_stride: k,
                    prepared: &[],
                    rows: n,
                };
                // In the order of every other product here, which is not that of tiles.
                product.run(path.vectors(), 0..height, sums.cast(), height);
                for row in 0..height {
                    for (j, column) in columns.clone().enumerate() {
                        let sum = *sums.cast::<T::Sum>().add(j * height + row);
                        out.add((i + row) * self.n + column)
                            .write_unaligned(T::narrow(sum));
                    }
                }
            }
        }
    }
}

/// The whole product on this thread, with its own scratch: for tests and one-off uses; plans call [`Gemm::run`].
///
/// # Panics
///
/// When the dtype is none of a product, or `a` and `b` do not have the sizes.
pub fn matmul(path: CpuPath, gemm: Gemm, a: &[u8], b: &[u8]) -> Vec<u8> {
    let Gemm { dtype, m, n, k } = gemm;
    assert!(is_gemm_dtype(dtype), "{dtype} cannot be multiplied");
    let bytes = dtype.block_bytes();
    assert_eq!(
        (a.len(), b.len()),
        (m * k * bytes, k * n * bytes),
        "{gemm:?}"
    );
    // Whole words, so that results and scratch are aligned.
    let mut out = vec![0u64; (m * n * bytes).div_ceil(8)];
    let mut scratch = vec![0u64; gemm.scratch_bytes() / 8 + 8];
    let at = Operands {
        a: a.as_ptr(),
        b: b.as_ptr(),
        out: out.as_mut_ptr().cast(),
    };
    let scratch = scratch.as_mut_ptr().cast::<u8>();
    // SAFETY: the sizes were just checked; aligning skips less than the 64 bytes added.
    unsafe {
        let scratch = scratch.add(scratch.align_offset(64));
        gemm.run(path, at, 0..m, 0..n, scratch);
        std::slice::from_raw_parts(out.as_ptr().cast::<u8>(), m * n * bytes).to_vec()
    }
}
