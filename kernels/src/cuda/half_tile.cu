// Products of many rows with weights of f16 and bf16: mul_mat in prefill.
//
// Order of summation: halves.cuh.
//
// half_tile_TYPE(w, x, x_stride, out, out_stride, n, k, rows, further): as mul_mat_f32 in plain_mat.cu, without experts.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉.
#include "half_tile.cuh"

#define KERNEL_OF(name, type, blocks)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint16_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, \
                                                                 int k, int rows, Further further) {                                                   \
    __shared__ Tile<type> tile;                                                                                                                        \
    int first = matrix_of(further, OUTPUTS, w, out, out_stride, n) * OUTPUTS;                                                                           \
    if (is_wide(w, x, x_stride, k)) product<type, true>(tile, first, w, x, x_stride, out, out_stride, n, k, rows);                                      \
    else product<type, false>(tile, first, w, x, x_stride, out, out_stride, n, k, rows);                                                                \
  }
KERNEL_OF(half_tile_f16, OfF16, 2)
KERNEL_OF(half_tile_bf16, OfBF16, 3)
