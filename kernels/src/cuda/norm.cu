// Norms of rows. One block of 256 threads per row, gridDim.x = rows (any number); no dynamic shared memory.
//
// Order of summation: thread i has the elements i, i + 256, … in ascending order, by fmaf where squares are summed; then
// common.cuh's block_sum. So a row's bits depend on the row alone.
#include "quantize.cuh"

constexpr int THREADS = 256;

/// Elements that a thread keeps, of rows that are no longer than their multiple.
constexpr int FEW = 16, MANY = 32;

/// What is done with each result besides: nothing, or what products with block types read, of which the row is whole blocks. All threads of a block come with
/// theirs at once: `at` is where the first thread's first one is, and `n` how many there are.
struct Nothing {
  template <int KEPT> DEVICE void put(const Nothing&, const float (&)[KEPT], size_t, int, unsigned*) {}
};
struct Of32 : Numbers {
  template <int KEPT> DEVICE void put(const Of32& to, const float (&y)[KEPT], size_t at, int n, unsigned*) {
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      int i = int(threadIdx.x) + j * THREADS;
      if (i < n) put_32(to, y[j], (at + i) / 32);
    }
  }
};
struct Of256 : Numbers {
  template <int KEPT> DEVICE void put(const Of256& to, const float (&y)[KEPT], size_t at, int n, unsigned* room) {
    int tid = threadIdx.x, warp = tid / 32;
    // Who read them is done.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      unsigned top = warp_top(__float_as_uint(y[j]) & 0x7fffffffu);
      if (tid % 32 == 0) room[j * (THREADS / 32) + warp] = top;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < KEPT; j++)
      if (j * THREADS < n) put_of_256(to, y[j], at / 256 + j, room + j * (THREADS / 32));
  }
};

/// Reads the same row again, where it is too long to be kept.
template <class Use> DEVICE void each(int n, const Use& use) {
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += THREADS) use(i);
}

/// Norms a row of `x`, plus `y` if there is one, whose sum goes to `sum` then; a weight may be null.
template <int KEPT, class To> DEVICE void norm_kept(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, const To& to, size_t row, float* room, unsigned* tops) {
  // Weights come with the row, where there are registers for both.
  constexpr bool EARLY = KEPT <= FEW;
  float kept[KEPT], factors[EARLY ? KEPT : 1], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < KEPT; j++) {
    int i = int(threadIdx.x) + j * THREADS;
    kept[j] = i < n ? x[i] : 0.0f;
    if (y && i < n) kept[j] += y[i];
    // A weight that is the sum is not there yet.
    if constexpr (EARLY) factors[j] = !weight || i >= n ? 0.0f : y && weight == sum ? kept[j] : weight[i];
  }
#pragma unroll
  for (int j = 0; j < KEPT; j++) {
    int i = int(threadIdx.x) + j * THREADS;
    if (y && i < n) sum[i] = kept[j];
    squares = fmaf(kept[j], kept[j], squares);
  }
  float scale = 1.0f / sqrtf(block_sum<THREADS>(squares, room) / float(n) + eps);
#pragma unroll
  for (int j = 0; j < KEPT; j++) {
    int i = int(threadIdx.x) + j * THREADS;
    kept[j] *= scale;
    if constexpr (EARLY) kept[j] = weight ? kept[j] * factors[j] : kept[j];
    else if (weight && i < n) kept[j] *= weight[i];
    if (i < n) out[row + i] = kept[j];
    // Rows of whole blocks end with one.
    else kept[j] = 0.0f;
  }
  To::put(to, kept, row, n, tops);
}

template <class To> DEVICE void norm(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, const To& to, unsigned* tops) {
  __shared__ float room[THREADS / 32];
  size_t row = size_t(blockIdx.x) * n;
  x += row, sum = y ? sum + row : nullptr, y = y ? y + row : nullptr;
  if (n <= FEW * THREADS) return norm_kept<FEW>(x, y, weight, sum, out, n, eps, to, row, room, tops);
  if (n <= MANY * THREADS) return norm_kept<MANY>(x, y, weight, sum, out, n, eps, to, row, room, tops);
  float squares = 0.0f;
  each(n, [&](int i) {
    float both = x[i];
    if (y) sum[i] = both = both + y[i];
    squares = fmaf(both, both, squares);
  });
  float scale = 1.0f / sqrtf(block_sum<THREADS>(squares, room) / float(n) + eps);
  // Each thread reads again what it wrote itself.
  const float* from = y ? sum : x;
  for (int base = 0; base < n; base += FEW * THREADS) {
    float kept[FEW];
#pragma unroll
    for (int j = 0; j < FEW; j++) {
      int i = base + int(threadIdx.x) + j * THREADS;
      kept[j] = i < n ? from[i] * scale : 0.0f;
      if (weight && i < n) kept[j] *= weight[i];
    }
#pragma unroll
    for (int j = 0; j < FEW; j++) {
      int i = base + int(threadIdx.x) + j * THREADS;
      if (i < n) out[row + i] = kept[j];
    }
    To::put(to, kept, row + base, n - base, tops);
  }
}

/// out[r, i] = x[r, i] / √(mean(x[r]²) + eps) · weight[i]; without a weight (null) the last product is left out. Rows of `n` f32, close together.
extern "C" __global__ void __launch_bounds__(256, 2) rms_norm_f32(const float* x, const float* weight, float* out, int n, float eps) {
  norm(x, nullptr, weight, nullptr, out, n, eps, Nothing(), nullptr);
}

/// sum[r, i] = x[r, i] + y[r, i], and out = rms_norm_f32 of that. `sum` may be `x` or `y`.
extern "C" __global__ void __launch_bounds__(256, 2) add_rms_norm_f32(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps) {
  norm(x, y, weight, sum, out, n, eps, Nothing(), nullptr);
}

// The same, and of `out` what quantize_q8 and quantize_q8k make of it.
extern "C" __global__ void __launch_bounds__(256, 2) rms_norm_q8(const float* x, const float* weight, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  norm(x, nullptr, weight, nullptr, out, n, eps, Of32{{q, da, sums}}, nullptr);
}
extern "C" __global__ void __launch_bounds__(256, 2) rms_norm_q8k(const float* x, const float* weight, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  __shared__ unsigned tops[MANY * THREADS / 32];
  norm(x, nullptr, weight, nullptr, out, n, eps, Of256{{q, da, sums}}, tops);
}
extern "C" __global__ void __launch_bounds__(256, 2) add_rms_norm_q8(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  norm(x, y, weight, sum, out, n, eps, Of32{{q, da, sums}}, nullptr);
}
extern "C" __global__ void __launch_bounds__(256, 2) add_rms_norm_q8k(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  __shared__ unsigned tops[MANY * THREADS / 32];
  norm(x, y, weight, sum, out, n, eps, Of256{{q, da, sums}}, tops);
}

/// out[r, i] = (x[r, i] − mean) / √(variance + eps) · weight[i] + bias[i]; weight and bias may be null. A NaN in a row makes all of it NaN.
extern "C" __global__ void __launch_bounds__(256) layer_norm_f32(const float* x, const float* weight, const float* bias, float* out, int n, float eps) {
  __shared__ float room[THREADS / 32];
  x += size_t(blockIdx.x) * n;
  out += size_t(blockIdx.x) * n;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) sum += x[i];
  float near = block_sum<THREADS>(sum, room) / float(n);
  // Far from zero the sum has lost what the differences from it still show.
  sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) sum += x[i] - near;
  float mean = near + block_sum<THREADS>(sum, room) / float(n);
  sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) sum = fmaf(x[i] - mean, x[i] - mean, sum);
  float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / float(n) + eps);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float y = (x[i] - mean) * scale;
    if (weight) y *= weight[i];
    if (bias) y += bias[i];
    out[i] = is_nan(scale) ? quiet_nan() : y;
  }
}
