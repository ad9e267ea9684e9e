// Drawing tokens on the device: the op `draw`, as ops/random.rs launches it, with the bits of kernels/src/cpu/draw.rs.
//
// draw_f32(x, temperatures, noise, out, n): of each row of `n` logits, up to 524,288, a token by its temperature and its noise (a seed's lower and upper half, branch, position).
// Temperature 0 takes the largest, the first among equals. −1 where a logit is NaN or +∞, or none weighs anything, and where there are too many: no token is made up.
// draw_among_f32(x, temperatures, noise, limits, out, n): the same among the tokens that three numbers of each row leave: the k largest logits (0: all), of these the fewest of the
// largest whose weights reach p times theirs (1: all), of these who weighs m at least (0: all). Equal logits are ordered by place. −1 as well where more than MOST may be left, unless all are.
// One block of 256 threads per row; gridDim.x = rows.
//
// Order of summation, all in f64: runs of 256 weights, each in eight lanes in ascending order (lane i has the weights of remainder i), the lanes in ascending order;
// the sums of runs in ascending order; within the run that is hit, weights in ascending order. Of those that are left, one by one in ascending order; towards p, the largest first. So a draw depends on its row and its noise alone.
#include "common.cuh"

constexpr int THREADS = 256, RUN = 256, RUNS = 2048, MOST = 256;

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

/// The largest of a row and its place, −1 if there is none; all threads get it. Whether the row is broken.
DEVICE bool largest_of(const float* x, int n, float* most_of, int* place_of, float& most, int& place) {
  int tid = threadIdx.x, broken = n > RUNS * RUN;
  most = -INFINITY_F, place = -1;
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
  return broken;
}

/// The sums of the weights of all runs, for all threads.
template <class Weight> DEVICE void sums_of(const Weight& weight, int n, double* sums) {
  int runs = (n + RUN - 1) / RUN;
#pragma unroll 1
  for (int run = threadIdx.x; run < runs; run += THREADS) {
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
}

DEVICE double total_of(const double* sums, int n) {
  double total = 0.0;
  for (int run = 0; run < (n + RUN - 1) / RUN; run++) total += sums[run];
  return total;
}

/// Where the sum of all weights passes the noise. One thread.
template <class Weight> DEVICE int draw_of_all(const Weight& weight, int n, const double* sums, double noise) {
  double target = noise * total_of(sums, n), before = 0.0, start = 0.0;
  int chosen = -1;
  for (int run = 0; run < (n + RUN - 1) / RUN; run++) {
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
  return token;
}

extern "C" __global__ void __launch_bounds__(256) draw_f32(const float* x, const float* temperatures, const uint32_t* noise, int* out, int n) {
  __shared__ double sums[RUNS];
  __shared__ float most_of[THREADS];
  __shared__ int place_of[THREADS];
  int row = blockIdx.x, place;
  float most, temperature = temperatures[row];
  x += size_t(row) * n;
  bool broken = largest_of(x, n, most_of, place_of, most, place);
  if (broken || place < 0 || temperature == 0.0f) {
    if (threadIdx.x == 0) out[row] = broken ? -1 : place;
    return;
  }
  auto weight = [&](int i) { return exp_f32((x[i] - most) / temperature); };
  sums_of(weight, n, sums);
  if (threadIdx.x == 0) out[row] = draw_of_all(weight, n, sums, uniform(noise + size_t(row) * 4));
}

/// A logit as a number that is the larger the larger it is; both zeros are one. 0: minus infinity.
DEVICE uint32_t order_of(float v) {
  if (!(v > -INFINITY_F)) return 0;
  uint32_t bits = __float_as_uint(v == 0.0f ? 0.0f : v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// Sorts MOST numbers, the largest first. All threads.
DEVICE void sort_down(word64* all) {
  int tid = threadIdx.x;
  for (int size = 2; size <= MOST; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      int other = tid ^ step;
      if (other > tid) {
        word64 a = all[tid], b = all[other];
        bool down = (tid & size) == 0;
        if (down ? a < b : a > b) all[tid] = b, all[other] = a;
      }
      __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256) draw_among_f32(const float* x, const float* temperatures, const uint32_t* noise, const float* limits, int* out, int n) {
  __shared__ double sums[RUNS];
  __shared__ float most_of[THREADS], weight_of[MOST];
  __shared__ int place_of[THREADS];
  __shared__ word64 best[MOST];
  __shared__ unsigned counts[256], equal_in[THREADS / 32];
  __shared__ uint32_t floor_key;
  __shared__ int wanted, possible, found, equals;
  __shared__ double total_all, least_all;
  int tid = threadIdx.x, row = blockIdx.x, place;
  float most, temperature = temperatures[row];
  float k = limits[size_t(row) * 3], p = limits[size_t(row) * 3 + 1], m = limits[size_t(row) * 3 + 2];
  x += size_t(row) * n;
  bool broken = largest_of(x, n, most_of, place_of, most, place);
  // Not a number: no limit.
  int largest = k >= 1.0f && k < float(n) ? int(k) : 0;
  bool some = largest > 0 && largest < n;
  if (broken || place < 0 || temperature == 0.0f || largest == 1) {
    if (tid == 0) out[row] = broken ? -1 : place;
    return;
  }
  auto weight = [&](int i) { return exp_f32((x[i] - most) / temperature); };
  bool all = !some && !(p < 1.0f) && !(m > 0.0f);
  if (!some) sums_of(weight, n, sums);
  if (all || (some && largest > MOST)) {
    if (tid == 0) out[row] = all ? draw_of_all(weight, n, sums, uniform(noise + size_t(row) * 4)) : -1;
    return;
  }
  if (tid == 0) {
    total_all = some ? 0.0 : total_of(sums, n);
    least_all = some || !(p < 1.0f) ? 0.0 : (1.0 - double(p)) * total_all / (double(n) * 1.001);
  }
  // The smallest of the MOST largest, digit by digit, and how many of its like are among them.
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[tid] = 0;
    __syncthreads();
    for (int i = tid; i < n; i += THREADS) {
      uint32_t key = order_of(x[i]);
      if (key != 0 && (key & mask) == prefix) atomicAdd(&counts[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (tid == 0) {
      if (shift == 24) {
        possible = 0;
        for (int digit = 0; digit < 256; digit++) possible += int(counts[digit]);
        wanted = min(possible, MOST);
      }
      int digit = 255;
      while (digit > 0 && int(counts[digit]) < wanted) wanted -= int(counts[digit--]);
      floor_key = prefix | uint32_t(digit) << shift;
      found = equals = 0;
    }
    __syncthreads();
    prefix = floor_key, mask |= 0xffu << shift;
  }
  best[tid] = 0;
  __syncthreads();
  for (int first = 0; first < n; first += THREADS) {
    int i = first + tid;
    uint32_t key = i < n ? order_of(x[i]) : 0;
    if (!__syncthreads_or(key != 0 && key >= prefix)) continue;
    bool equal = key != 0 && key == prefix;
    unsigned like = __ballot_sync(ALL, equal);
    if (tid % 32 == 0) equal_in[tid / 32] = __popc(like);
    __syncthreads();
    int before = equals;
    for (int warp = 0; warp < tid / 32; warp++) before += int(equal_in[warp]);
    before += __popc(like & ((1u << tid % 32) - 1u));
    if (key > prefix || (equal && before < wanted)) {
      int at = atomicAdd(&found, 1);
      if (at < MOST) best[at] = word64(key) << 32 | (0xffffffffu - unsigned(i));
    }
    __syncthreads();
    if (tid == 0)
      for (int warp = 0; warp < THREADS / 32; warp++) equals += int(equal_in[warp]);
    __syncthreads();
  }
  sort_down(best);
  int count = min(found, MOST), id = int(0xffffffffu - unsigned(best[tid]));
  weight_of[tid] = tid < count ? weight(id) : 0.0f;
  __syncthreads();
  // By place, the last first; behind them their places among the largest.
  best[tid] = tid < count ? word64(id + 1) << 32 | unsigned(tid) : 0;
  __syncthreads();
  sort_down(best);
  if (tid != 0) return;
  int left = some ? min(largest, count) : count;
  bool full = possible > MOST;
  double total = total_all, least = least_all, share = double(p);
  if (some)
    for (int i = count - 1; i >= 0; i--)
      if (int(unsigned(best[i])) < left) total += double(weight_of[unsigned(best[i])]);
  float last = weight_of[count - 1];
  if (p < 1.0f) {
    double sum = 0.0;
    bool reached = false;
    for (int i = 0; i < left && !reached; i++) {
      double w = double(weight_of[i]);
      if (!(w >= least)) continue;
      sum += w;
      if (sum >= share * total) left = i + 1, reached = true;
    }
    // Others may be needed.
    if (!some && full && !reached && double(last) * 1.001 >= least) left = -1;
  } else if (!some && full && double(last) * 1.001 >= double(m)) left = -1;
  auto is_left = [&](word64 entry) {
    float w = weight_of[unsigned(entry)];
    return int(unsigned(entry)) < left && double(w) >= least && (!(m > 0.0f) || w >= m);
  };
  double sum_left = 0.0;
  for (int i = count - 1; i >= 0; i--)
    if (is_left(best[i])) sum_left += double(weight_of[unsigned(best[i])]);
  double target = uniform(noise + size_t(row) * 4) * sum_left, sum = 0.0;
  int token = -1;
  for (int i = count - 1; i >= 0; i--) {
    double w = double(weight_of[unsigned(best[i])]);
    if (!is_left(best[i]) || !(w > 0.0)) continue;
    sum += w;
    token = int(best[i] >> 32) - 1;
    if (target < sum) break;
  }
  out[row] = token;
}
