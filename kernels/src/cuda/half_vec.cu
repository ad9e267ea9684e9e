// Products of few rows with weights of f16 and bf16: mul_mat in decode, mul_mat_id.
//
// Order of summation: halves.cuh. A block has sixteen outputs, and each of its eight warps a range of `k`.
//
// mul_half_TYPE_EIGHTS(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad): as mul_mat_f32 in plain_mat.cu, with
//   EIGHTS · 8 rows that share a reading of the weights. With ids one eight.
// Blocks of 256 threads. gridDim.x = ⌈n / 16⌉ of all matrices, gridDim.y = ⌈rows / (8 · EIGHTS)⌉, or `rows` with ids, or groups.
#include "half_vec.cuh"

#define KERNEL_OF(name, type, eights)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, eights == 1 ? 3 : 2) name(const uint16_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, \
                                                            int rows, Further further, const int* ids, const int* order, int experts, int used,       \
                                                            int per_token, word64* bad) {                                                             \
    product<type, eights>(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad);                            \
  }
KERNEL_OF(mul_half_f16_1, OfF16, 1)
KERNEL_OF(mul_half_f16_2, OfF16, 2)
KERNEL_OF(mul_half_f16_4, OfF16, 4)
KERNEL_OF(mul_half_bf16_1, OfBF16, 1)
KERNEL_OF(mul_half_bf16_2, OfBF16, 2)
KERNEL_OF(mul_half_bf16_4, OfBF16, 4)
