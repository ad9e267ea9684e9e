// Products of two activations: matmul, as ops/gemm.rs launches it.
//
// Order of summation: that of kernels/src/cpu/gemm.rs, with the same bits. Each output is one chain acc = fma(a_ik, b_kj, acc) over k in ascending order from +0.0, of f64 in
// f64, of the rest in f32, whose elements are converted exactly and whose sum is rounded once; one thread has it, whatever the shapes. No tensor cores: they round as
// they like.
#include "generic.cuh"

/// Matrices `a` [m, k] and `b` [k, n], close together, equal to `words` of ops/gemm.rs. A product takes a matrix of each: of axes before the last two, outermost first, the
/// size, and whether an operand has it or repeats along it.
struct Product {
  word64 m, n, k, products, axes, sizes[8], in_a[8], in_b[8];
};

constexpr int THREADS = 256, COLUMNS = 64, EACH = 8, ROWS = THREADS / COLUMNS * EACH, SLICE = 32;

struct Single {
  typedef float Number;
  DEVICE float add(float a, float b, float acc) { return fmaf(a, b, acc); }
  DEVICE float tidy(float x) { return plain(x); }
};
struct OfF32 : Single, F32 {};
struct OfF16 : Single, F16 {};
struct OfBF16 : Single, BF16 {};
struct OfF64 {
  typedef double Number;
  typedef double Stored;
  DEVICE double load(const double* x) { return *x; }
  DEVICE void store(double* to, double x) { *to = x; }
  DEVICE double add(double a, double b, double acc) { return fma(a, b, acc); }
  DEVICE double tidy(double x) { return x != x ? __longlong_as_double(0x7ff8000000000000) : x; }
};

/// A block has tiles of 32 rows and 64 columns, and goes on by the whole grid; a thread has eight rows of a column.
template <class E> DEVICE void multiplied(const typename E::Stored* a, const typename E::Stored* b, typename E::Stored* out, const Product& p) {
  typedef typename E::Number Number;
  __shared__ Number left[ROWS][SLICE], right[SLICE][COLUMNS];
  int tid = threadIdx.x, column = tid % COLUMNS, row = tid / COLUMNS * EACH;
  word64 down = (p.m + ROWS - 1) / ROWS, across = (p.n + COLUMNS - 1) / COLUMNS;
  for (word64 tile = blockIdx.x; tile < p.products * down * across; tile += gridDim.x) {
    word64 band = tile / across, product = band / down, i0 = (band - product * down) * ROWS, j0 = (tile - band * across) * COLUMNS;
    word64 of_a = 0, of_b = 0, stride_a = 1, stride_b = 1, rest = product;
#pragma unroll 1
    for (int axis = int(p.axes) - 1; axis >= 0; axis--) {
      word64 before = rest / p.sizes[axis], at = rest - before * p.sizes[axis];
      rest = before;
      if (p.in_a[axis]) of_a += at * stride_a, stride_a *= p.sizes[axis];
      if (p.in_b[axis]) of_b += at * stride_b, stride_b *= p.sizes[axis];
    }
    const typename E::Stored *from_a = a + of_a * p.m * p.k, *from_b = b + of_b * p.k * p.n;
    Number acc[EACH] = {};
#pragma unroll 1
    for (word64 k0 = 0; k0 < p.k; k0 += SLICE) {
      int width = int(min(p.k - k0, word64(SLICE)));
      for (int e = tid; e < ROWS * SLICE; e += THREADS) {
        word64 i = i0 + e / SLICE, k = k0 + e % SLICE;
        left[e / SLICE][e % SLICE] = i < p.m && k < p.k ? E::load(from_a + i * p.k + k) : Number(0);
      }
      for (int e = tid; e < SLICE * COLUMNS; e += THREADS) {
        word64 k = k0 + e / COLUMNS, j = j0 + e % COLUMNS;
        right[e / COLUMNS][e % COLUMNS] = k < p.k && j < p.n ? E::load(from_b + k * p.n + j) : Number(0);
      }
      __syncthreads();
#pragma unroll(sizeof(Number) == 8 ? 1 : 4)
      for (int k = 0; k < width; k++) {
        Number v = right[k][column];
#pragma unroll
        for (int r = 0; r < EACH; r++) acc[r] = E::add(left[row + r][k], v, acc[r]);
      }
      __syncthreads();
    }
    if (j0 + column >= p.n) continue;
#pragma unroll
    for (int r = 0; r < EACH; r++) {
      word64 i = i0 + row + r;
      if (i < p.m) E::store(out + (product * p.m + i) * p.n + j0 + column, E::tidy(acc[r]));
    }
  }
}

#define KERNEL_OF(name, type)                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const type::Stored* a, const type::Stored* b, type::Stored* out, Product p) { \
    multiplied<type>(a, b, out, p);                                                                                                                         \
  }
KERNEL_OF(matmul_f32, OfF32)
KERNEL_OF(matmul_f16, OfF16)
KERNEL_OF(matmul_bf16, OfBF16)
KERNEL_OF(matmul_f64, OfF64)
