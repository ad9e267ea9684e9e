// Drawing tokens on the device: the op `draw`, as ops/random.rs launches it, with the bits of kernels/src/cpu/draw.rs.
//
// draw_f32(x, temperatures, noise, out, n): of each row of `n` logits, up to 524,288, a token by its temperature and its noise (a seed's lower and upper half, branch, position).
// Temperature 0 takes the largest, the first among equals. −1 where a logit is NaN or +∞, or none weighs anything, and where there are too many: no token is made up.
// One block of 256 threads per row; gridDim.x = rows.
//
// Order of summation, all in f64: runs of 256 weights, each in eight lanes in ascending order (lane i has the weights of remainder i), the lanes in ascending order;
// the sums of runs in ascending order; within the run that is hit, weights in ascending order. So a draw depends on its row and its noise alone.
#include "common.cuh"

constexpr int THREADS = 256, RUN = 256, RUNS = 2048;

/// Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), as kernels/src/cpu/draw.rs has it.
DEVICE void threefry(uint32_t (&x)[2], uint32_t k0, uint32_t k1) {
  const uint32_t keys[3] = {k0, k1, 0x1BD11BDAu ^ k0 ^ k1};
  const int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x[0] += keys[0], x[1] += keys[1];
#pragma unroll
  for (int group = 0; group < 5; group++) {
#pragma unroll
    for (int round = 0; round < 4; round++) {
      int by = turns[group % 2 * 4 + round];
      x[0] += x[1];
      x[1] = (x[1] << by | x[1] >> (32 - by)) ^ x[0];
    }
    x[0] += keys[(group + 1) % 3];
    x[1] += keys[(group + 2) % 3] + uint32_t(group) + 1;
  }
}

/// In [0, 1), with 53 random bits.
DEVICE double uniform(const uint32_t* noise) {
  uint32_t x[2] = {noise[3], noise[2]};
  threefry(x, noise[0], noise[1]);
  word64 bits = word64(x[1]) << 32 | x[0];
  return double(bits >> 11) * (1.0 / 9007199254740992.0);
}

extern "C" __global__ void __launch_bounds__(256) draw_f32(const float* x, const float* temperatures, const uint32_t* noise, int* out, int n) {
  __shared__ double sums[RUNS];
  __shared__ float most_of[THREADS];
  __shared__ int place_of[THREADS];
  int tid = threadIdx.x, row = blockIdx.x, runs = (n + RUN - 1) / RUN;
  x += size_t(row) * n;
  float most = -INFINITY_F;
  int place = -1, broken = runs > RUNS;
  for (int i = tid; i < n; i += THREADS) {
    float v = x[i];
    broken |= is_nan(v) || v == INFINITY_F;
    if (v > most) most = v, place = i;
  }
  most_of[tid] = most, place_of[tid] = place;
  broken = __syncthreads_or(broken);
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (tid < half) {
      float other = most_of[tid + half];
      int at = place_of[tid + half];
      if (at >= 0 && (place_of[tid] < 0 || other > most_of[tid] || (other == most_of[tid] && at < place_of[tid]))) most_of[tid] = other, place_of[tid] = at;
    }
    __syncthreads();
  }
  most = most_of[0], place = place_of[0];
  float temperature = temperatures[row];
  if (broken || place < 0 || temperature == 0.0f) {
    if (tid == 0) out[row] = broken ? -1 : place;
    return;
  }
  auto weight = [&](int i) { return exp_f32((x[i] - most) / temperature); };
#pragma unroll 1
  for (int run = tid; run < runs; run += THREADS) {
    double lanes[8] = {};
    int end = min((run + 1) * RUN, n);
#pragma unroll 1
    for (int i = run * RUN; i < end; i += 8) {
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (i + j < end) lanes[j] += double(weight(i + j));
    }
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += lanes[j];
    sums[run] = sum;
  }
  __syncthreads();
  if (tid != 0) return;
  double total = 0.0;
  for (int run = 0; run < runs; run++) total += sums[run];
  double target = uniform(noise + size_t(row) * 4) * total, before = 0.0, start = 0.0;
  int chosen = -1;
  for (int run = 0; run < runs; run++) {
    if (!(sums[run] > 0.0)) continue;
    chosen = run, start = before;
    if (target < before + sums[run]) break;
    before += sums[run];
  }
  int token = -1, end = min((chosen + 1) * RUN, n);
  double sum = start;
#pragma unroll 1
  for (int i = max(chosen, 0) * RUN; i < end; i++) {
    double w = double(weight(i));
    if (!(w > 0.0)) continue;
    sum += w;
    token = i;
    if (target < sum) break;
  }
  out[row] = token;
}
