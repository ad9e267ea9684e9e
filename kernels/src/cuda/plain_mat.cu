// Products with weights of f32: mul_mat and mul_mat_id. Those of f16 and bf16 are in half_vec.cu and half_tile.cu.
//
// Order of summation: that of kernels/src/cpu/matmul.rs, with the same bits. Each output is one chain acc = fmaf(w_k, x_k, acc) over k in ascending
// order from +0.0; one thread has it, whatever the number of rows. No tensor cores: they round as they like.
//
// mul_mat_f32(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad):
//   w     weights [n, k], at a multiple of their size; of `experts` such matrices, close together, where `ids` is given
//   x     f32, row r at x + r · x_stride; out f32, row r at out + r · out_stride
//   further, ids, order   none and null, or as in block_vec.cu: without an order a group is a row, with one eight
// Blocks of 128 threads. gridDim.x = ⌈n / 64⌉, gridDim.y = ⌈rows / 8⌉, or `rows` with ids, or groups.
#include "chosen.cuh"

constexpr int OUTPUTS = 64, ROWS = 8, SLICE = 32, THREADS = 128;

extern "C" __global__ void __launch_bounds__(128, 7) mul_mat_f32(const float* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, int rows, Further further, const int* ids, const int* order, int experts, int used, int per_token, word64* bad) {
  __shared__ float weights[OUTPUTS][SLICE + 1], numbers[ROWS][SLICE];
  // What each row reads and makes; −1 for none.
  __shared__ int from[ROWS], to[ROWS];
  int tid = threadIdx.x, first = matrix_of(further, OUTPUTS, w, out, out_stride, n) * OUTPUTS;
  if (!rows_of_block(from, to, rows, ids, order, used, per_token)) return;
  bool wrong = !to_expert(w, size_t(n) * k, ids, to[0], experts, bad);
  // A thread has one output of half of the rows.
  int output = tid % OUTPUTS, half = tid / OUTPUTS * (ROWS / 2);
  float acc[ROWS / 2] = {};
#pragma unroll 1
  for (int slice = 0; slice < k && !wrong; slice += SLICE) {
    int width = min(SLICE, k - slice);
#pragma unroll 4
    for (int e = tid; e < OUTPUTS * SLICE; e += THREADS) {
      int o = e / SLICE, i = e % SLICE;
      weights[o][i] = first + o < n && i < width ? w[size_t(first + o) * k + slice + i] : 0.0f;
    }
    for (int e = tid; e < ROWS * SLICE; e += THREADS) {
      int r = e / SLICE, i = e % SLICE;
      numbers[r][i] = from[r] >= 0 && i < width ? x[from[r] * x_stride + slice + i] : 0.0f;
    }
    __syncthreads();
    for (int i = 0; i < width; i++) {
      float v = weights[output][i];
#pragma unroll
      for (int r = 0; r < ROWS / 2; r++) acc[r] = fmaf(v, numbers[half + r][i], acc[r]);
    }
    __syncthreads();
  }
  if (first + output >= n) return;
#pragma unroll
  for (int r = 0; r < ROWS / 2; r++)
    if (to[half + r] >= 0) out[to[half + r] * out_stride + first + output] = plain(acc[r]);
}
