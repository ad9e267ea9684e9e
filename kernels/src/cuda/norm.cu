// Norms of rows. One block of 256 threads per row, gridDim.x = rows (any number); no dynamic shared memory.
//
// Order of summation: thread i has the elements i, i + 256, … in ascending order, by fmaf where squares are summed; then
// common.cuh's block_sum. So a row's bits depend on the row alone.
#include "quantize.cuh"

constexpr int THREADS = 256;

/// What is done with each result besides: nothing, or what products with block types read, of which the row is whole blocks.
struct Nothing {
  __device__ void put(float, size_t) const {}
};
struct Of32 : Numbers {
  __device__ void put(float v, size_t at) const { put_32(*this, v, at / 32); }
};
struct Of256 : Numbers {
  unsigned* room;
  __device__ void put(float v, size_t at) const { put_256(*this, v, at / 256, room); }
};

/// Elements of a thread that are asked for before any of them is used: stores to what may be the same memory are between those of one and the next.
constexpr int AHEAD = 4;

/// Calls `use` with each of a thread's elements, in ascending order, and what `load` gives of it.
template <class Load, class Use> DEVICE void each(int n, const Load& load, const Use& use) {
  for (int base = threadIdx.x; base < n; base += AHEAD * THREADS) {
    float2 loaded[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
      if (base + j * THREADS < n) loaded[j] = load(base + j * THREADS);
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
      if (base + j * THREADS < n) use(base + j * THREADS, loaded[j]);
  }
}

template <class To> DEVICE void rms_norm(const float* x, const float* weight, float* out, int n, float eps, const To& to) {
  __shared__ float room[THREADS / 32];
  size_t row = size_t(blockIdx.x) * n;
  x += row;
  float sum = 0.0f;
  each(n, [&](int i) { return float2{x[i], 0.0f}; }, [&](int, float2 v) { sum = fmaf(v.x, v.x, sum); });
  float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / float(n) + eps);
  each(n, [&](int i) { return float2{x[i], weight ? weight[i] : 0.0f}; },
       [&](int i, float2 v) {
         float y = v.x * scale;
         if (weight) y *= v.y;
         out[row + i] = y;
         to.put(y, row + i);
       });
}

template <class To> DEVICE void add_rms_norm(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, const To& to) {
  __shared__ float room[THREADS / 32];
  size_t row = size_t(blockIdx.x) * n;
  x += row, y += row, sum += row;
  float squares = 0.0f;
  each(n, [&](int i) { return float2{x[i], y[i]}; },
       [&](int i, float2 v) {
         float both = v.x + v.y;
         sum[i] = both;
         squares = fmaf(both, both, squares);
       });
  float scale = 1.0f / sqrtf(block_sum<THREADS>(squares, room) / float(n) + eps);
  // Each thread reads again what it wrote itself.
  each(n, [&](int i) { return float2{sum[i], weight[i]}; },
       [&](int i, float2 v) {
         float both = v.x * scale * v.y;
         out[row + i] = both;
         to.put(both, row + i);
       });
}

/// out[r, i] = x[r, i] / √(mean(x[r]²) + eps) · weight[i]; without a weight (null) the last product is left out. Rows of `n` f32, close together.
extern "C" __global__ void __launch_bounds__(256) rms_norm_f32(const float* x, const float* weight, float* out, int n, float eps) {
  rms_norm(x, weight, out, n, eps, Nothing());
}

/// sum[r, i] = x[r, i] + y[r, i], and out = rms_norm_f32 of that. `sum` may be `x` or `y`.
extern "C" __global__ void __launch_bounds__(256) add_rms_norm_f32(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps) {
  add_rms_norm(x, y, weight, sum, out, n, eps, Nothing());
}

// The same, and of `out` what quantize_q8 and quantize_q8k make of it.
extern "C" __global__ void __launch_bounds__(256) rms_norm_q8(const float* x, const float* weight, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  rms_norm(x, weight, out, n, eps, Of32{{q, da, sums}});
}
extern "C" __global__ void __launch_bounds__(256) rms_norm_q8k(const float* x, const float* weight, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  __shared__ unsigned room[THREADS / 32];
  rms_norm(x, weight, out, n, eps, Of256{{q, da, sums}, room});
}
extern "C" __global__ void __launch_bounds__(256) add_rms_norm_q8(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  add_rms_norm(x, y, weight, sum, out, n, eps, Of32{{q, da, sums}});
}
extern "C" __global__ void __launch_bounds__(256) add_rms_norm_q8k(const float* x, const float* y, const float* weight, float* sum, float* out, int n, float eps, signed char* q, float* da, int* sums) {
  __shared__ unsigned room[THREADS / 32];
  add_rms_norm(x, y, weight, sum, out, n, eps, Of256{{q, da, sums}, room});
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
