// Activations as the products with block types read them: int8 per block, as kernels/src/cpu/quantize.rs makes them, bit by bit.
//
// Of rows `x` f32 [rows, k], `stride` numbers apart: `q` i8 [rows, k] (at a multiple of 16), `da` f32 [rows, k / LEN] (what a unit of q stands for) and `sums`
// i32 [rows, k / 32] (Σ q over each 32). LEN is 32 for quantize_q8 (da rounded to half precision) and 256 for quantize_q8k. k is whole blocks of LEN.
// A warp makes a block. Blocks of 256 threads, gridDim.x = ⌈rows · k / LEN / 8⌉.
#include "common.cuh"

/// The largest absolute value of a warp's numbers as bits, which order like integers, with inf and NaN above every number.
DEVICE unsigned warp_top(unsigned top) {
  for (int d = 16; d > 0; d >>= 1) top = max(top, __shfl_xor_sync(ALL, top, d));
  return top;
}

/// `inverse` is what x is multiplied by, 0 where all q are 0; the result is da before any rounding.
DEVICE float scale_of(unsigned top, float& inverse) {
  float amax = __uint_as_float(top);
  inverse = 127.0f / amax;
  if (top >= 0x7f800000u) {
    inverse = 0.0f;
    return quiet_nan();
  }
  if (!(inverse < INFINITY_F)) {
    inverse = 0.0f;
    return 0.0f;
  }
  return amax / 127.0f;
}

DEVICE int rounded(float x, float inverse) {
  if (inverse == 0.0f) return 0;
  float v = rintf(x * inverse);
  return int(v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v);
}

extern "C" __global__ void __launch_bounds__(256) quantize_q8(const float* x, long long stride, signed char* q, float* da, int* sums, int rows, int k) {
  int blocks = k / 32, lane = threadIdx.x % 32;
  long long number = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  // The same for a whole warp.
  if (number >= (long long)rows * blocks) return;
  long long row = number / blocks;
  int block = int(number % blocks);
  float v = x[row * stride + block * 32 + lane], inverse;
  float scale = scale_of(warp_top(__float_as_uint(v) & 0x7fffffffu), inverse);
  int mine = rounded(v, inverse), sum = mine;
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(ALL, sum, d);
  q[number * 32 + lane] = (signed char)mine;
  if (lane == 0) {
    da[number] = half_to_f32(f32_to_half(scale));
    sums[number] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(256) quantize_q8k(const float* x, long long stride, signed char* q, float* da, int* sums, int rows, int k) {
  int blocks = k / 256, lane = threadIdx.x % 32;
  long long number = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  if (number >= (long long)rows * blocks) return;
  long long row = number / blocks;
  int block = int(number % blocks);
  const float* from = x + row * stride + block * 256;
  unsigned top = 0;
  float inverse;
  for (int j = 0; j < 8; j++) top = max(top, __float_as_uint(from[32 * j + lane]) & 0x7fffffffu);
  float scale = scale_of(warp_top(top), inverse);
  for (int j = 0; j < 8; j++) {
    int mine = rounded(from[32 * j + lane], inverse), sum = mine;
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(ALL, sum, d);
    q[number * 256 + 32 * j + lane] = (signed char)mine;
    if (lane == 0) sums[number * 8 + j] = sum;
  }
  if (lane == 0) da[number] = scale;
}
