// Products of many rows with weights of e4m3: mul_mat, mul_mat_scaled in prefill.
//
// Order of summation: halves.cuh.
//
// float8_tile(w, x, x_stride, out, out_stride, n, k, rows, further, scales): as mul_mat_f32 in plain_mat.cu, without experts.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉.
#include "half_tile.cuh"

#define KERNEL_OF(name, type, blocks)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint8_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, \
                                                                 int k, int rows, Further further, Scales scales) {                                    \
    __shared__ Tile<type> tile;                                                                                                                        \
    int number, first = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;                                                           \
    const float* values = led_to<const float>(scales.values[number]);                                                                                  \
    if (is_wide(w, x, x_stride, k)) product<type, true>(tile, first, w, x, x_stride, out, out_stride, n, k, rows, scales, values);                      \
    else product<type, false>(tile, first, w, x, x_stride, out, out_stride, n, k, rows, scales, values);                                                \
  }
KERNEL_OF(float8_tile, OfE4M3, 2)
