// What the kernels share: numbers, functions, sums across threads, the flag of wrong indices.
//
// Nothing is contracted (nvcc --fmad=false, g++ -ffp-contract=off): a fused operation is written fmaf. Divisions and roots are rounded to
// nearest, subnormals are kept. exp and tanh are those of kernels/src/cpu, bit by bit. So a kernel without matrix instructions
// gives the same bits on every GPU, and through the shim on a processor.
//
// The flag: `bad`, two 64-bit words in device memory that are zero before a launch. A kernel that meets an index out of range leaves
// {index, bound} of the first one it can get hold of there (the bound is above 0), and goes on as if the index named nothing.
#pragma once
#ifdef __CUDACC__
#include <stdint.h>
#define INFINITY_F __int_as_float(0x7f800000)
#else
#define INFINITY_F __builtin_inff()
#endif

constexpr unsigned ALL = 0xffffffffu;
typedef unsigned long long word64;
static_assert(sizeof(word64) == 8, "an atomic exchange's width");

#define DEVICE static __device__ __forceinline__

DEVICE float quiet_nan() { return __uint_as_float(0x7fc00000u); }
DEVICE bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }
/// A NaN has one form, whatever the operands were.
DEVICE float plain(float x) { return is_nan(x) ? quiet_nan() : x; }
/// The larger; a NaN in the second place is lost.
DEVICE float larger(float a, float b) { return b > a ? b : a; }

/// What an address leads to that came within a structure.
template <class T> DEVICE T* led_to(word64 address) {
#ifdef HOTCELL_SHIM
  // As shim.h does with addresses that are arguments by themselves.
  return reinterpret_cast<T*>(address & 0x0FFFFFFFFFFFFFFFull);
#else
  return reinterpret_cast<T*>(address);
#endif
}

/// Matrices that are multiplied with the same activations in the same launch as another one; n of 0: there is none. Their results are close together.
struct Further {
  word64 w[2], out[2];
  long long n[2];
};

/// Which matrix a block is of, whose outputs are `each` to a block: its weights, results, size and number. The block's number in it.
template <class W> DEVICE int matrix_at(int block, const Further& further, int each, const W*& w, float*& out, long long& out_stride, int& n, int& number) {
  number = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int blocks = (n + each - 1) / each;
    if (block < blocks || further.n[i] == 0) break;
    block -= blocks;
    number = i + 1;
    w = led_to<const W>(further.w[i]), out = led_to<float>(further.out[i]);
    n = int(further.n[i]), out_stride = further.n[i];
  }
  return block;
}
template <class W> DEVICE int matrix_of(const Further& further, int each, const W*& w, float*& out, long long& out_stride, int& n, int& number) {
  return matrix_at(int(blockIdx.x), further, each, w, out, out_stride, n, number);
}
template <class W> DEVICE int matrix_of(const Further& further, int each, const W*& w, float*& out, long long& out_stride, int& n) {
  int number;
  return matrix_of(further, each, w, out, out_stride, n, number);
}

/// An IEEE half as f32, exactly.
DEVICE float half_to_f32(unsigned bits) {
  unsigned magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  unsigned normal = (magnitude << 13) + (112u << 23);
  unsigned special = (magnitude << 13) | 0x7f800000u;
  if (magnitude > 0x7c00u) special |= 0x00400000u;
  unsigned subnormal = __float_as_uint(float(int(magnitude)) * __uint_as_float(103u << 23));
  unsigned value = magnitude < 0x0400u ? subnormal : normal;
  if (magnitude >= 0x7c00u) value = special;
  return __uint_as_float(value | sign);
}

/// Rounded to half precision, ties to even.
DEVICE unsigned f32_to_half(float value) {
  unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  unsigned normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  unsigned subnormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  unsigned out = magnitude < (113u << 23) ? subnormal : normal;
  if (magnitude >= (143u << 23)) out = 0x7c00u;
  if (magnitude > 0x7f800000u) out = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  return (out & 0xffffu) | sign;
}

DEVICE float bf16_to_f32(unsigned bits) { return __uint_as_float(bits << 16); }

/// Rounded to bfloat16, ties to even.
DEVICE unsigned f32_to_bf16(float value) {
  unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x0040u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

/// How f32, f16 and bf16 lie in memory.
struct F32 {
  typedef float Stored;
  DEVICE float load(const Stored* x) { return *x; }
  DEVICE void store(Stored* to, float x) { *to = x; }
};
struct F16 {
  typedef uint16_t Stored;
  DEVICE float load(const Stored* x) { return half_to_f32(*x); }
  DEVICE void store(Stored* to, float x) { *to = uint16_t(f32_to_half(x)); }
};
struct BF16 {
  typedef uint16_t Stored;
  DEVICE float load(const Stored* x) { return bf16_to_f32(*x); }
  DEVICE void store(Stored* to, float x) { *to = uint16_t(f32_to_bf16(x)); }
};

/// e^x − 1 = q after taking n ln 2 off x; n by its bits.
DEVICE float exp_parts(float x, unsigned& n) {
  const float magic = 12582912.0f;
  float shifted = fmaf(x, 1.44269504f, magic);
  n = __float_as_uint(shifted) - __float_as_uint(magic);
  float nf = shifted - magic;
  float r = fmaf(-nf, -2.1219444e-4f, fmaf(-nf, 0.6933594f, x));
  float p = 1.9875691e-4f;
  p = fmaf(p, r, 1.3982e-3f);
  p = fmaf(p, r, 8.333452e-3f);
  p = fmaf(p, r, 4.1665796e-2f);
  p = fmaf(p, r, 1.6666665e-1f);
  p = fmaf(p, r, 5.0e-1f);
  return fmaf(p, r * r, r);
}

/// `e^x` as kernels/src/cpu/lanes.rs computes it.
DEVICE float exp_f32(float x) {
  unsigned bits;
  float p = exp_parts(x, bits) + 1.0f;
  int n = int(bits), half = n >> 1;
  float y = p * __uint_as_float(unsigned(half + 127) << 23) * __uint_as_float(unsigned(n - half + 127) << 23);
  if (y < 1.17549435e-38f) y = 0.0f;
  if (x < -87.4f) y = 0.0f;
  return x > 88.8f ? INFINITY_F : y;
}

/// tanh as kernels/src/cpu/math/single.rs computes it.
DEVICE float tanh_f32(float x) {
  float t = fabsf(x), s = t * t;
  float p = 1.573944e-2f;
  p = fmaf(p, s, -5.230256e-2f);
  p = fmaf(p, s, 1.3315247e-1f);
  p = fmaf(p, s, -3.3332768e-1f);
  float near = fmaf(p * s, t, t);
  // 1 + e^2t, infinite where e^2t is.
  float y = 2.0f * t;
  if (y > 89.0f) y = 89.0f;
  const float magic = 12582912.0f;
  float shifted = fmaf(y, 1.44269504f, magic);
  int n = int(__float_as_uint(shifted) - __float_as_uint(magic));
  float nf = shifted - magic;
  float r = fmaf(-nf, -2.1219444e-4f, fmaf(-nf, 0.6933594f, y));
  float e = 1.9875691e-4f;
  e = fmaf(e, r, 1.3982e-3f);
  e = fmaf(e, r, 8.333452e-3f);
  e = fmaf(e, r, 4.1665796e-2f);
  e = fmaf(e, r, 1.6666665e-1f);
  e = fmaf(e, r, 5.0e-1f);
  e = fmaf(e, r * r, r);
  float half = (e + 1.0f) * __uint_as_float(unsigned(n - 1 + 127) << 23);
  float far = 1.0f - 2.0f / fmaf(half, 2.0f, 1.0f);
  return copysignf(t < 0.55f ? near : far, x);
}

/// A word at an address that is a multiple of two.
DEVICE uint32_t word_of_halves(const uint8_t* at) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
  return uint32_t(halves[0]) | uint32_t(halves[1]) << 16;
}

/// Sums over a warp: by distance 16, 8, 4, 2, 1. All lanes get it.
DEVICE float warp_sum(float v) {
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(ALL, v, d);
  return v;
}
DEVICE float warp_max(float v) {
  for (int d = 16; d > 0; d >>= 1) v = larger(v, __shfl_xor_sync(ALL, v, d));
  return v;
}

/// Over a block of `THREADS`, a multiple of 32 up to 1024: warps as above, their sums in ascending order. All threads get it; `room` is shared
/// memory of THREADS / 32 numbers, which may be used again after it.
template <int THREADS> DEVICE float block_sum(float v, float* room) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = room[0];
  for (int i = 1; i < THREADS / 32; i++) sum += room[i];
  __syncthreads();
  return sum;
}
template <int THREADS> DEVICE float block_max(float v, float* room) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  float most = room[0];
  for (int i = 1; i < THREADS / 32; i++) most = larger(most, room[i]);
  __syncthreads();
  return most;
}

/// Says that an index is not below its bound, if nobody has said anything yet.
DEVICE void report(word64* bad, long long index, word64 bound) {
  if (atomicCAS(&bad[1], word64(0), bound) == 0) atomicExch(&bad[0], word64(index));
}
