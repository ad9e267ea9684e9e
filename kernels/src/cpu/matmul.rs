//! Matrix multiplication: `y[r, n] = Σ_k x[r, k] · w[n, k]`, activations `x` in `f32`, weights `w` of any
//! weight dtype as they lie in GGUF and safetensors files.
//!
//! # The order of summation
//!
//! This section defines the numerics class of the CPU device, together with the form of prepared
//! activations in [`quantize`](super::quantize). Each output is one chain that starts at `+0.0` and goes through `k` in
//! ascending order; it depends on nothing else: not on the number of rows, the tiling, the threads, the
//! output's place in a vector, nor the instruction path. Every operation, `f32(…)` of an integer among
//! them, is rounded once, to nearest even.
//!
//! - **F32, F16, BF16, F8_E4M3**: the weight is converted to `f32` exactly; `acc = fma(w_k, x_k, acc)` for every `k`. Where
//!   rectangles of weights have scales, `x_k` is the activation times the scale, rounded, or the output is multiplied
//!   ([`rectangles`]).
//! - **32-element blocks**, with `S = Σ w_q · q` exact, where `w_q` is the signed integer weight (Q4_0:
//!   nibble − 8, Q5_0: five bits − 16, Q8_0: the byte; Q4_1, Q5_1: the unsigned four or five bits), and
//!   `d`, `m` the block's scale and minimum: `acc = fma(f32(S) · da, d, acc)`; for Q4_1 and Q5_1 then
//!   `acc = fma(f32(Σ q) · da, m, acc)`. MXFP4 is one of them: `w_q` is twice the number of E2M1, `d` half of the power of two.
//! - **NVFP4**, with `S_j = Σ w_q · q` over sub-block `j` of sixteen, `w_q` twice the number of E2M1 and `d_j` half of the
//!   scale: `acc = fma(f32(S_j) · da, d_j, acc)` for `j` in 0..4; the activations are those of two blocks of 32.
//! - **Q4_K, Q5_K**, with `dot_j = Σ w_q · q` over sub-block `j` and the integers `S = Σ_j scale_j · dot_j` and
//!   `T = Σ_j min_j · Σ q_j`, exact: `acc = fma(fma(f32(S), d, −(f32(T) · dmin)), da, acc)`.
//! - **Q6_K**, with `dot_j = Σ (w_q − 32) · q` and `S = Σ_j scale_j · dot_j` exact: `acc = fma(f32(S) · d, da, acc)`.
//!
//! A NaN result has the bits `0x7fc00000`. Subnormals are computed as IEEE says (no flush to zero).
//!
//! On the path [`CpuPath::Amx`], **BF16, F8_E4M3** are summed as its instruction does (TDPBF16PS in Intel's manual of the
//! instruction set), which is another numerics class. It multiplies numbers of BF16, which weights of both are. An activation is cut
//! into three whose sum it is: its upper half, the upper half of the rest, and what is left; of what is no finite number all
//! but the first are zero. The sum starts at `+0.0` and goes through `k` in steps of 32, the last one filled with zeros, and in each
//! step through the three in this order: `even = fma(w_k, x_k, even)` over the even `k` of the step from `+0.0`, `odd` likewise, then
//! `sum = sum + (even + odd)`. Subnormals, given or computed, are zeros of their sign. Where the sum is a NaN, the output
//! is that of the first parts alone: an infinite weight times a part that is zero is no number. As for the rest, it depends on
//! nothing else.
//!
//! # Threads
//!
//! [`MulMat::run`] computes a range of outputs for all rows, allocates nothing (but with tiles, once in a thread's life, some
//! megabytes for them) and may be called by any
//! number of threads with disjoint ranges. Ranges that start at multiples of 16 are the fast ones.

use std::ops::Range;

use hotcell_graph::DType;

use super::lanes::LANES;
use super::path::{CpuPath, reads_pages};
use super::quantize::{Activation, prepare_row, scratch_bytes};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block256;
mod block32;
mod block64;
mod drive;
mod format;
mod kept;
pub mod pack;
mod place;
mod q6_k;
pub mod rectangles;
mod simd;

use drive::Job;
use format::{Format, Plain};
pub use kept::Kept;
use place::{Packed, Place, Stored};

/// The revision of the order of summation above. Part of the numerics class: whoever changes a bit of any
/// output raises it.
pub const KERNEL_REVISION: u32 = 8;

/// One multiplication: weights, activations and their sizes.
#[derive(Clone, Copy, Debug)]
pub struct MulMat<'a> {
    /// The weights' dtype.
    pub dtype: DType,
    /// The whole weight matrix, rows of `k` one after the other, at any alignment.
    pub w: &'a [u8],
    /// Whether `w` is as [`pack::pack`] makes it.
    pub packed: bool,
    /// The length of a row of weights and of a row of activations; whole blocks for block dtypes.
    pub k: usize,
    /// The activations, row after row. Read for plain dtypes only; otherwise may be empty.
    pub x: &'a [f32],
    /// Elements from one row of `x` to the next.
    pub x_stride: usize,
    /// For block dtypes, `rows` rows of [`scratch_bytes`] each, made by
    /// [`prepare_row`]; empty for plain dtypes.
    pub prepared: &'a [u8],
    /// The number of rows of activations.
    pub rows: usize,
}

impl<'a> MulMat<'a> {
    /// The same of some of the rows.
    ///
    /// # Panics
    ///
    /// When it has fewer.
    pub fn of_rows(self, rows: Range<usize>) -> Self {
        let from = |start: usize, all: usize| (rows.start * start).min(all);
        MulMat {
            x: &self.x[from(self.x_stride, self.x.len())..],
            prepared: &self.prepared
                [from(scratch_bytes(self.dtype, self.k), self.prepared.len())..],
            rows: rows.len().min(self.rows - rows.start),
            ..self
        }
    }

    /// Computes the outputs `n` of every row: `out[r · out_stride + j]` for each `j` in `n`.
    ///
    /// # Panics
    ///
    /// When `dtype` is no weight dtype, `k` is not whole blocks, or `w`, `x` or `prepared` are shorter than the
    /// sizes say. All of it is known when a plan is made.
    ///
    /// # Safety
    ///
    /// `out.add(r * out_stride + j)` is valid for reads and writes for every row `r` below `rows` and every `j` in `n`, and no
    /// other thread touches these elements meanwhile.
    pub unsafe fn run(&self, path: CpuPath, n: Range<usize>, out: *mut f32, out_stride: usize) {
        // SAFETY: the caller's promise. Nothing was kept.
        unsafe { self.run_keeping(path, n, (out, out_stride), &mut Kept::default()) }
    }

    /// [`Self::run`], for some of the outputs after others: what the path makes of activations is kept in the thread's memory from
    /// one call to the next with the same `kept`, if it fits there at once and nothing was made of other activations since.
    ///
    /// # Panics
    ///
    /// As [`Self::run`].
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    pub unsafe fn run_keeping(
        &self,
        path: CpuPath,
        n: Range<usize>,
        (out, out_stride): (*mut f32, usize),
        kept: &mut Kept<'a>,
    ) {
        let MulMat {
            dtype,
            w,
            packed,
            k,
            x,
            x_stride,
            prepared,
            rows,
        } = *self;
        if n.is_empty() || rows == 0 {
            return;
        }
        let stride = dtype.row_bytes(k);
        let needed = stride.and_then(|stride| stride.checked_mul(n.end));
        assert!(
            needed.is_some_and(|needed| needed <= w.len()),
            "weights {dtype} [{}, {k}]",
            n.end
        );
        let (x, x_stride) = match Activation::of(dtype) {
            Activation::F32 => {
                let needed = (rows - 1)
                    .checked_mul(x_stride)
                    .and_then(|last| last.checked_add(k));
                assert!(
                    needed.is_some_and(|needed| needed <= x.len()),
                    "activations [{rows}, {k}]"
                );
                (x.as_ptr().cast(), x_stride * size_of::<f32>())
            }
            Activation::Q8 | Activation::Q8K => {
                let row = scratch_bytes(dtype, k);
                let needed = row.checked_mul(rows);
                assert!(
                    needed.is_some_and(|needed| needed <= prepared.len()),
                    "prepared [{rows}, {k}]"
                );
                (prepared.as_ptr(), row)
            }
        };
        let stride = stride.unwrap_or_default();
        let mut job = |n| Job {
            w: w.as_ptr(),
            stride,
            k,
            n,
            x,
            x_stride,
            rows,
            room: drive::room(),
            kept: &raw mut kept.brought,
            pages: reads_pages(),
            out,
            out_stride,
        };
        // The rows after the last whole panel are as in the file.
        let panels = match packed {
            true => w.len().checked_div(stride).unwrap_or(0) / LANES * LANES,
            false => 0,
        };
        let (whole, rest) = (n.start..n.end.min(panels), n.start.max(panels)..n.end);
        // SAFETY: the path is available (`kernels` looked); the slices cover what the sizes name, which
        // was just asserted, and packed panels are whole; the outputs are the caller's promise.
        unsafe {
            let kernels = kernels(path, dtype);
            if !whole.is_empty() {
                let aligned = whole.start.is_multiple_of(LANES) && whole.end.is_multiple_of(LANES);
                assert!(aligned && pack::packs(dtype, panels, k), "packed {whole:?}");
                (kernels.packed)(&job(whole));
            }
            if !rest.is_empty() {
                (kernels.stored)(&job(rest));
            }
        }
    }
}

/// How a path takes the rows of a product.
#[derive(Clone, Copy, Debug)]
pub struct AtOnce {
    /// Rows that a thread multiplies at a time for as many outputs as may be.
    pub rows: usize,
    /// Whether what it makes of so many rows' activations is [`Kept`] from some outputs to others.
    pub keeps: bool,
}

/// For a path that makes something of the activations itself, in rows of `k`.
pub fn rows_at_once(path: CpuPath, dtype: DType, k: usize) -> Option<AtOnce> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if path == CpuPath::Amx && path.is_available() {
        let (rows, keeps) = match Activation::of(dtype) {
            Activation::Q8 => (amx::int8::rows(k), true),
            Activation::Q8K => (amx::scaled::rows(k), true),
            Activation::F32 if sums_by_tiles(path, dtype) => amx::bf16::rows(k),
            Activation::F32 => return None,
        };
        return (rows > 0).then_some(AtOnce { rows, keeps });
    }
    let _ = (path, dtype, k);
    None
}

/// Whether products with these weights are summed in the order of [`CpuPath::Amx`] on a path, and not in that of all others.
pub fn sums_by_tiles(path: CpuPath, dtype: DType) -> bool {
    path == CpuPath::Amx && path.is_available() && matches!(dtype, DType::BF16 | DType::F8E4M3)
}

/// The whole product on this thread, with its own scratch: `x` is `[rows, k]`, the result `[rows, n]`.
/// For tests and one-off uses; plans call [`prepare_row`] and [`MulMat::run`].
///
/// # Panics
///
/// When the lengths of `w` and `x` are not `n` and whole rows of `k`, or `dtype` is no weight dtype.
pub fn mul_mat(
    path: CpuPath,
    dtype: DType,
    w: &[u8],
    n: usize,
    x: &[f32],
    rows: usize,
    k: usize,
) -> Vec<f32> {
    assert_eq!(x.len(), rows * k, "activations [{rows}, {k}]");
    let row = scratch_bytes(dtype, k);
    let mut prepared = vec![0; rows * row];
    if row > 0 {
        for (x, scratch) in x.chunks_exact(k).zip(prepared.chunks_exact_mut(row)) {
            prepare_row(path, dtype, x, scratch);
        }
    }
    let mut out = vec![0.0; rows * n];
    let product = MulMat {
        dtype,
        w,
        packed: false,
        k,
        x,
        x_stride: k,
        prepared: &prepared,
        rows,
    };
    // SAFETY: `out` has n outputs for each row and is not shared.
    unsafe { product.run(path, 0..n, out.as_mut_ptr(), n) };
    out
}

/// Does a job; see [`drive::run`] for what must hold.
type Kernel = unsafe fn(&Job);

/// The kernels of a dtype on a path, for weights as stored and for packed ones.
struct Kernels {
    stored: Kernel,
    packed: Kernel,
}

macro_rules! formats {
    ($($dtype:ident => $format:ty, $tiles:ident;)*) => {
        /// The kernels of a dtype on a path that the processor has.
        fn kernels(path: CpuPath, dtype: DType) -> Kernels {
            match dtype {
                $(DType::$dtype => $tiles::<$format>(path),)*
                _ => panic!("{dtype} is no weight dtype"),
            }
        }
        $(const _: () = assert!(
            <$format>::BYTES * DType::$dtype.block_len() == <$format>::LEN * DType::$dtype.block_bytes()
        );)*
        /// How the rows of a dtype are cut to be packed.
        fn cut_of(dtype: DType) -> Option<pack::Cut> {
            match dtype {
                $(DType::$dtype => Some(pack::Cut::of::<$format>()),)*
                _ => None,
            }
        }
    };
}

formats! {
    F32  => Plain<format::F32, 1>, on_path;
    F16  => Plain<format::F16, 2>, on_path;
    BF16 => Plain<format::BF16, 2>, on_bf16;
    F8E4M3 => Plain<format::E4M3, 4>, on_bf16;
    Q4_0 => block32::Nibbles<false, false>, on_tiles;
    Q4_1 => block32::Nibbles<false, true>, on_tiles;
    Q5_0 => block32::Nibbles<true, false>, on_tiles;
    Q5_1 => block32::Nibbles<true, true>, on_tiles;
    Q8_0 => block32::Bytes, on_tiles;
    Q4K  => block256::Mixed<false>, on_scaled_tiles;
    Q5K  => block256::Mixed<true>, on_scaled_tiles;
    Q6K  => q6_k::Six, on_scaled_tiles;
    MXFP4 => block32::Mxfp4, on_tiles;
    NVFP4 => block64::Nvfp4, on_tiles;
}

/// Those of a dtype whose weights are numbers of BF16, which AMX multiplies.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn on_bf16<F: amx::bf16::OfBF16>(path: CpuPath) -> Kernels {
    match path {
        CpuPath::Amx if path.is_available() => Kernels {
            stored: amx::bf16::run::<F, Stored>,
            packed: amx::bf16::run::<F, Packed>,
        },
        _ => on_path::<F>(path),
    }
}

/// Those of a block dtype whose exact dots AMX makes.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn on_tiles<F: amx::tiled::Tiled>(path: CpuPath) -> Kernels {
    match path {
        CpuPath::Amx if path.is_available() => Kernels {
            stored: amx::int8::run::<F, Stored>,
            packed: amx::int8::run::<F, Packed>,
        },
        _ => on_path::<F>(path),
    }
}

/// Those of a block dtype with integer scales, which go into the tiles.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn on_scaled_tiles<F: amx::scaled::Scaled>(path: CpuPath) -> Kernels {
    match path {
        CpuPath::Amx if path.is_available() => Kernels {
            stored: amx::scaled::run::<F, Stored>,
            packed: amx::scaled::run::<F, Packed>,
        },
        _ => on_path::<F>(path),
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
use {on_path as on_bf16, on_path as on_tiles, on_path as on_scaled_tiles};

fn on_path<F: Format>(path: CpuPath) -> Kernels {
    #[cfg(target_arch = "x86_64")]
    if path == CpuPath::AvxVnni && path.is_available() && !F::PLAIN {
        return Kernels {
            stored: on_avx_vnni::<F, Stored>,
            packed: on_avx_vnni::<F, Packed>,
        };
    }
    match path.vectors() {
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx512Vnni => Kernels {
            stored: on_avx512::<F, Stored>,
            packed: on_avx512::<F, Packed>,
        },
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx2 => Kernels {
            stored: on_avx2::<F, Stored>,
            packed: on_avx2::<F, Packed>,
        },
        _ => Kernels {
            stored: on_portable::<F, Stored>,
            packed: on_portable::<F, Packed>,
        },
    }
}

/// # Safety
///
/// As for [`drive::run`], which includes that the processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
// Kernels by tiles call it for few rows, and need no copy of all of it.
#[inline(never)]
unsafe fn on_avx512<F: Format, W: Place>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe { drive::run::<avx512::Avx512, F, W>(job) }
}

/// # Safety
///
/// As for [`drive::run`], which includes that the processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn on_avx2<F: Format, W: Place>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe { drive::run::<avx2::Avx2, F, W>(job) }
}

/// # Safety
///
/// As for [`drive::run`], which includes that the processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
unsafe fn on_avx_vnni<F: Format, W: Place>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe { drive::run::<avx2::AvxVnni, F, W>(job) }
}

/// # Safety
///
/// As for [`drive::run`].
unsafe fn on_portable<F: Format, W: Place>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe { drive::run::<simd::Portable, F, W>(job) }
}
