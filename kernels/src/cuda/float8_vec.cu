// Products of few rows with weights of e4m3: mul_mat, mul_mat_scaled in decode, mul_mat_id, mul_mat_id_scaled.
//
// Order of summation: halves.cuh. A block has sixteen outputs, and each of its eight warps a range of `k`.
//
// mul_float8_EIGHTS(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales): as mul_mat_f32 in plain_mat.cu, with
//   EIGHTS · 8 rows that share a reading of the weights. With ids one eight.
// Blocks of 256 threads. gridDim.x = ⌈n / 16⌉ of all matrices, gridDim.y = ⌈rows / (8 · EIGHTS)⌉, or `rows` with ids, or groups.
#include "half_vec.cuh"

#define KERNEL_OF(name, eights)                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, eights == 1 ? 3 : 2) name(const uint8_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, \
                                                            int rows, Further further, const int* ids, const int* order, int experts, int used,       \
                                                            int per_token, word64* bad, Scales scales) {                                              \
    product<OfE4M3, eights>(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales);                  \
  }
KERNEL_OF(mul_float8_1, 1)
KERNEL_OF(mul_float8_2, 2)
KERNEL_OF(mul_float8_4, 4)
