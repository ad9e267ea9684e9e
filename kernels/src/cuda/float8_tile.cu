// Products of many rows with weights of e4m3: mul_mat, mul_mat_scaled and their likes with experts in prefill.
//
// Order of summation: halves.cuh.
//
// float8_tile(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales): as mul_float8_EIGHTS in float8_vec.cu, with ids only in
// an order of groups of 64.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉, or groups.
#include "half_tile.cuh"

#define KERNEL_OF(name, type, blocks)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint8_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, \
                                                                 int k, int rows, Further further, const int* ids, const int* order, int experts, int used, \
                                                                 int per_token, word64* bad, Scales scales) {                                          \
    __shared__ Tile<type> tile;                                                                                                                        \
    __shared__ Rows here;                                                                                                                              \
    int number, first = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;                                                           \
    const float* values = scales.of(number);                                                                                  \
    if (!rows_of_block(here.from, here.to, rows, ids, order, used, per_token)) return;                                                                  \
    if (!to_expert(w, size_t(n) * k, ids, here.to[0], experts, bad)) k = 0, values = nullptr;                                                            \
    if (values) to_expert(values, size_t(scales.each), ids, here.to[0], experts, bad);                                                                  \
    if (is_wide(w, x, x_stride, k)) product<type, true>(tile, first, w, x, x_stride, out, out_stride, n, k, here, scales, values);                      \
    else product<type, false>(tile, first, w, x, x_stride, out, out_stride, n, k, here, scales, values);                                                \
  }
KERNEL_OF(float8_tile, OfE4M3, 2)
