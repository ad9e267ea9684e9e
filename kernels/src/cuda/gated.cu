// Gates, and what products with block types read of what they let through.
#include "generic.cuh"
#include "quantize.cuh"

/// silu(a) · b: x / (1 + e^−x) times y.
DEVICE float swiglu(float a, float b) { return a / (1.0f + exp_f32(-a)) * b; }

/// Of `n` numbers, contiguous f32.
extern "C" __global__ void __launch_bounds__(256) swiglu_f32(float* out, const float* a, const float* b, word64 n) {
  for (word64 i = first_element(); i < n; i += element_step()) out[i] = swiglu(a[i], b[i]);
}

// swiglu_q8 and swiglu_q8k(out, a, b, n, q, da, sums): the same, and of its results what quantize_q8 and quantize_q8k make of them. `n` is whole blocks of 32 and of 256;
// gridDim.x = ⌈n / 256⌉.
extern "C" __global__ void __launch_bounds__(256) swiglu_q8(float* out, const float* a, const float* b, word64 n, signed char* q, float* da, int* sums) {
  word64 i = word64(blockIdx.x) * 256 + threadIdx.x;
  if (i >= n) return;
  float v = swiglu(a[i], b[i]);
  out[i] = v;
  put_32({q, da, sums}, v, i / 32);
}
extern "C" __global__ void __launch_bounds__(256) swiglu_q8k(float* out, const float* a, const float* b, word64 n, signed char* q, float* da, int* sums) {
  __shared__ unsigned room[8];
  word64 i = word64(blockIdx.x) * 256 + threadIdx.x;
  if (i >= n) return;
  float v = swiglu(a[i], b[i]);
  out[i] = v;
  put_256({q, da, sums}, v, blockIdx.x, room);
}
