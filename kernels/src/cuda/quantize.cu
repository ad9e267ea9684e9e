// Activations as the products with block types read them: int8 per block, as kernels/src/cpu/quantize.rs makes them, bit by bit.
//
// Of rows `x` f32 [rows, k], `stride` numbers apart: `q` i8 [rows, k] (at a multiple of 16), `da` f32 [rows, k / LEN] (what a unit of q stands for) and `sums`
// i32 [rows, k / 32] (Σ q over each 32). LEN is 32 for quantize_q8 (da rounded to half precision) and 256 for quantize_q8k. k is whole blocks of LEN.
// A warp makes a block. Blocks of 256 threads, gridDim.x = ⌈rows · k / LEN / 8⌉.
#include "quantize.cuh"

extern "C" __global__ void __launch_bounds__(256) quantize_q8(const float* x, long long stride, signed char* q, float* da, int* sums, int rows, int k) {
  int blocks = k / 32;
  long long number = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  // The same for a whole warp.
  if (number >= (long long)rows * blocks) return;
  put_32({q, da, sums}, x[number / blocks * stride + number % blocks * 32 + threadIdx.x % 32], number);
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
