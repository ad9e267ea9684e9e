// Products of many rows with weights of f16 and bf16: mul_mat and mul_mat_id in prefill.
//
// Order of summation: halves.cuh.
//
// half_tile_TYPE(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad): as mul_half_TYPE_EIGHTS in half_vec.cu, with ids only in an
// order of groups of 64.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉, or groups.
#include "half_tile.cuh"

#define KERNEL_OF(name, type, blocks)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint16_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, \
                                                                 int k, int rows, Further further, const int* ids, const int* order, int experts, int used, \
                                                                 int per_token, word64* bad) {                                                         \
    __shared__ Tile<type> tile;                                                                                                                        \
    __shared__ Rows here;                                                                                                                              \
    int first = matrix_of(further, OUTPUTS, w, out, out_stride, n) * OUTPUTS;                                                                           \
    if (!rows_of_block(here.from, here.to, rows, ids, order, used, per_token)) return;                                                                  \
    if (!to_expert(w, size_t(n) * k, ids, here.to[0], experts, bad)) k = 0;                                                                              \
    if (is_wide(w, x, x_stride, k)) product<type, true>(tile, first, w, x, x_stride, out, out_stride, n, k, here);                                      \
    else product<type, false>(tile, first, w, x, x_stride, out, out_stride, n, k, here);                                                                \
  }
KERNEL_OF(half_tile_f16, OfF16, 2)
KERNEL_OF(half_tile_bf16, OfBF16, 3)
