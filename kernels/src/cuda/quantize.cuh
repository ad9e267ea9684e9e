// How activations become int8 per block, as kernels/src/cpu/quantize.rs makes them, bit by bit.
#pragma once
#include "common.cuh"

/// Where they go: the numbers (at a multiple of 16), what a unit of them stands for, and the sum of each 32 of them. Of blocks of 32 a unit is rounded to half precision.
struct Numbers {
  signed char* q;
  float* da;
  int* sums;
};

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

/// A warp's numbers, which are block `number` of 32.
DEVICE void put_32(const Numbers& to, float v, long long number) {
  int lane = threadIdx.x % 32;
  float inverse, scale = scale_of(warp_top(__float_as_uint(v) & 0x7fffffffu), inverse);
  int mine = rounded(v, inverse), sum = mine;
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(ALL, sum, d);
  to.q[number * 32 + lane] = (signed char)mine;
  if (lane == 0) {
    to.da[number] = half_to_f32(f32_to_half(scale));
    to.sums[number] = sum;
  }
}

/// The numbers of 256 threads, which are block `number` of 256. `tops` are those of their warps.
DEVICE void put_of_256(const Numbers& to, float v, long long number, const unsigned* tops) {
  int tid = threadIdx.x;
  unsigned top = tops[0];
  for (int i = 1; i < 8; i++) top = max(top, tops[i]);
  float inverse, scale = scale_of(top, inverse);
  int mine = rounded(v, inverse), sum = mine;
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(ALL, sum, d);
  to.q[number * 256 + tid] = (signed char)mine;
  if (tid % 32 == 0) to.sums[number * 8 + tid / 32] = sum;
  if (tid == 0) to.da[number] = scale;
}

/// The same where it is one block. `room` is shared memory of eight words, which may be used again after it.
DEVICE void put_256(const Numbers& to, float v, long long number, unsigned* room) {
  unsigned top = warp_top(__float_as_uint(v) & 0x7fffffffu);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = top;
  __syncthreads();
  put_of_256(to, v, number, room);
  __syncthreads();
}
