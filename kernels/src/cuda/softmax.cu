// Softmax of rows, and the first largest of a row.
//
// Order of summation: that of kernels/src/cpu/ops/softmax.rs, with the same bits: sixteen lanes in ascending order, then by distance 8, 4, 2, 1. So a row's bits depend on
// the row alone. One block of 256 threads per row; gridDim.x = rows.
#include "common.cuh"

constexpr int THREADS = 256, LANES = 16, TILE = 2048;

/// ln(x) as the libm crate's logf, which is FreeBSD's.
DEVICE float log_of_sum(float x) {
  uint32_t bits = __float_as_uint(x);
  int k = 0;
  if (bits < 0x00800000u || bits >> 31) {
    if (bits << 1 == 0) return -INFINITY_F;
    if (bits >> 31) return quiet_nan();
    k -= 25;
    x *= 33554432.0f;
    bits = __float_as_uint(x);
  } else if (bits >= 0x7f800000u) {
    return x;
  } else if (bits == 0x3f800000u) {
    return 0.0f;
  }
  bits += 0x3f800000u - 0x3f3504f3u;
  k += int(bits >> 23) - 0x7f;
  x = __uint_as_float((bits & 0x007fffffu) + 0x3f3504f3u);
  float f = x - 1.0f, s = f / (2.0f + f), z = s * s, w = z * z;
  float odd = w * (0.40000972152f + w * 0.24279078841f), even = z * (0.66666662693f + w * 0.28498786688f);
  float r = even + odd, half = 0.5f * f * f, dk = float(k);
  return s * (half + r) + dk * 9.0580006145e-06f - half + f + dk * 6.9313812256e-01f;
}

// softmax_TYPE(x, out, n, log): of rows of `n` numbers, close together, of f32, f16 or bf16; computed in f32, rounded once. With `log` its natural logarithm. Where all of a
// row is −∞, and where it has a NaN, the row is NaN. `out` may be `x`.
template <class E> DEVICE void soften(const typename E::Stored* x, typename E::Stored* out, int n, bool log) {
  __shared__ float room[THREADS / 32], tile[TILE];
  int tid = threadIdx.x;
  x += size_t(blockIdx.x) * n;
  out += size_t(blockIdx.x) * n;
  float most = -INFINITY_F, sum = 0.0f;
  for (int i = tid; i < n; i += THREADS) most = larger(most, E::load(x + i));
  most = block_max<THREADS>(most, room);
  // Exponentials by all threads, their sums by one for each lane.
  for (int start = 0; start < n; start += TILE) {
    int count = min(TILE, n - start);
    for (int i = tid; i < count; i += THREADS) tile[i] = exp_f32(E::load(x + start + i) - most);
    __syncthreads();
    if (tid < LANES) {
      for (int i = tid; i < count; i += LANES) sum += tile[i];
    }
    __syncthreads();
  }
  if (tid < 32) {
    for (int d = LANES / 2; d > 0; d >>= 1) sum += __shfl_down_sync(ALL, sum, d, LANES);
    if (tid == 0) room[0] = sum;
  }
  __syncthreads();
  sum = room[0];
  float under = log ? log_of_sum(sum) : sum;
  for (int i = tid; i < n; i += THREADS) {
    float v = E::load(x + i) - most;
    E::store(out + i, is_nan(sum) ? quiet_nan() : log ? v - under : exp_f32(v) / under);
  }
}

#define KERNEL_OF(name, type)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) name(const type::Stored* x, type::Stored* out, int n, int log) {       \
    soften<type>(x, out, n, log != 0);                                                                                     \
  }
KERNEL_OF(softmax_f32, F32)
KERNEL_OF(softmax_f16, F16)
KERNEL_OF(softmax_bf16, BF16)

/// out[r] = the place of the largest of row r (greedy sampling), the lowest among equals, as kernels of the CPU's sampler choose; −1 where a number of the
/// row is NaN or +∞, or where all are −∞: then no token may be made up.
extern "C" __global__ void __launch_bounds__(256) greedy_f32(const float* x, int* out, int n) {
  __shared__ float most_of[THREADS / 32];
  __shared__ int place_of[THREADS / 32];
  x += size_t(blockIdx.x) * n;
  float most = -INFINITY_F;
  int place = -1, broken = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float v = x[i];
    broken |= is_nan(v) || v == INFINITY_F;
    if (v > most) most = v, place = i;
  }
  auto take = [&](float other, int at) {
    if (at >= 0 && (place < 0 || other > most || (other == most && at < place))) most = other, place = at;
  };
  for (int d = 16; d > 0; d >>= 1) {
    float other = __shfl_xor_sync(ALL, most, d);
    int at = __shfl_xor_sync(ALL, place, d);
    take(other, at);
  }
  broken = __syncthreads_or(broken);
  if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most, place_of[threadIdx.x / 32] = place;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < THREADS / 32; i++) take(most_of[i], place_of[i]);
    out[blockIdx.x] = broken ? -1 : place;
  }
}
