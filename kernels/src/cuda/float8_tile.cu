// Products of many rows with weights of e4m3: mul_mat, mul_mat_scaled and their likes with experts in prefill.
//
// Order of summation: halves.cuh.
//
// float8_tile(w, x, x_stride, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales): as mul_float8_EIGHTS in float8_vec.cu, with ids only in
// an order of groups of 64.
// A block of 128 threads has 128 outputs of 64 rows. gridDim.x = ⌈n / 128⌉ of all matrices, or more, gridDim.y = ⌈rows / 64⌉, or groups.
#include "half_tile.cuh"

#define KERNEL_OF(name, type)                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 2) name(const uint8_t* w, const float* x, long long x_stride, float* out, long long out_stride, int n, \
                                                            int k, int rows, Further further, const int* ids, const int* order, int experts, int used, \
                                                            int per_token, word64* bad, Scales scales) {                                               \
    __shared__ Room room;                                                                                                                              \
    auto place = [&] { return place_of_block(Share<type>{w, out, out_stride, n, 0, 0, 0}, further, !ids); };                                           \
    auto rows_of = [&](const Share<type>& of) { return rows_of_block(room.rows.from, room.rows.to, rows, ids, order, used, per_token, of.down); };     \
    auto values_of = [&](Share<type>& of, const float*& values) {                                                                                      \
      if (!to_expert(of.w, size_t(of.n) * k, ids, room.rows.to[0], experts, bad)) return false;                                                        \
      values = scales.of(of.number);                                                                                                                   \
      if (values) to_expert(values, size_t(scales.each), ids, room.rows.to[0], experts, bad);                                                          \
      return true;                                                                                                                                     \
    };                                                                                                                                                 \
    product<type>(room, place, rows_of, values_of, x, x_stride, k, scales);                                                                            \
  }
KERNEL_OF(float8_tile, OfE4M3)
