// What tensor cores do at most by the instructions of ptx.cuh: chains of them on registers, beside which nothing is loaded. For benchmarks.
//
// peak_TYPE(out, rounds): each warp does rounds · CHAINS instructions. Blocks of 256 threads; `out` has a number for each thread of the grid.
#include "ptx.cuh"

/// Chains of a warp, so that none waits for another.
constexpr int CHAINS = 8;

extern "C" __global__ void __launch_bounds__(256) peak_bf16(float* out, int rounds) {
  // Ones, so that sums grow and are no special numbers.
  const unsigned ones = 0x3f803f80u, a[1][4] = {{ones, ones, ones, ones}}, b[1][2] = {{ones, ones}};
  float sums[CHAINS][4] = {};
#pragma unroll 1
  for (int round = 0; round < rounds; round++) {
#pragma unroll
    for (int chain = 0; chain < CHAINS; chain++) mma_bf16(sums[chain], a, b);
  }
  float sum = 0.0f;
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++) sum += sums[chain][0] + sums[chain][3];
  out[size_t(blockIdx.x) * 256 + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256) peak_s8(float* out, int rounds) {
  const unsigned ones = 0x01010101u, a[4] = {ones, ones, ones, ones}, b[2] = {ones, ones};
  int sums[CHAINS][4] = {};
#pragma unroll 1
  for (int round = 0; round < rounds; round++) {
#pragma unroll
    for (int chain = 0; chain < CHAINS; chain++) mma_s8(sums[chain], a, b);
  }
  int sum = 0;
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++) sum += sums[chain][0] + sums[chain][3];
  out[size_t(blockIdx.x) * 256 + threadIdx.x] = float(sum);
}
