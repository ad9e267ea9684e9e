// Weights of 16 and of 8 bits and the numbers they are multiplied with, as tensor cores want them.
//
// Tensor cores multiply numbers of bf16. An activation is three of these, whose sum it is, if it is no smaller than 2^-110: its upper half, the upper half of the rest, and
// what is left. A weight of bf16 or e4m3 is one, and one of f16 two. So products are exact; sums are rounded as the device does it (towards zero, as others have measured).
//
// Order of summation, which is this backend's own: `k` goes in chunks of 32, the last one filled with zeros, and these in eight ranges of ⌈chunks / 8⌉. A range is one
// chain of matrix instructions from +0.0: of each chunk two steps, of each step the weight's parts, with each of them the activation's parts. The output
// is +0.0 and the ranges' sums added in ascending order. It depends on nothing else: not on the number of rows, nor on which kernel has them.
// The sixteen `k` of an instruction are those of step `s` of a chunk: in the places 2t, 2t + 1, 2t + 8 and 2t + 9 are 8t + 4s and the three after it, which are
// half of what a lane loads at once.
//
// Where there are several rectangles of weights with a scale side by side, whose width is whole chunks, activations are multiplied with the scales before, and rounded. Where
// there is one, the output is multiplied instead.
//
// Where an activation is infinite, its other parts are zero, so that weights of bf16 make an infinity of it. Those of f16, whose second part may be zero, may make a NaN, and
// so may an infinite weight.
#pragma once
#include "ptx.cuh"
#include "scales.cuh"

constexpr int CHUNK = 32, RANGES = 8, PARTS_OF_X = 3;

/// Chunks of a range.
DEVICE int chunks_of_range(int k) { return ((k + CHUNK - 1) / CHUNK + RANGES - 1) / RANGES; }

/// Two numbers to a word, of which the upper halves are taken.
DEVICE uint32_t upper_halves(float low, float high) { return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); }
DEVICE float upper_part(float v) { return __uint_as_float(__float_as_uint(v) & 0xffff0000u); }

/// Eight activations, cut into three.
DEVICE void cut(const float (&x)[8], uint32_t (&parts)[PARTS_OF_X][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float top[2], middle[2], rest[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      // The upper half of a NaN would be an infinity's, if only lower bits say that it is one.
      float v = plain(x[2 * i + j]);
      top[j] = upper_part(v);
      rest[j] = (__float_as_uint(v) & 0x7f800000u) == 0x7f800000u ? 0.0f : v - top[j];
      middle[j] = upper_part(rest[j]);
      rest[j] -= middle[j];
    }
    parts[0][i] = upper_halves(top[0], top[1]);
    parts[1][i] = upper_halves(middle[0], middle[1]);
    parts[2][i] = upper_halves(rest[0], rest[1]);
  }
}

/// Weights of a lane as they lie in memory, two to a word, as parts.
struct OfBF16 {
  typedef uint16_t Stored;
  typedef uint4 Eight;
  static constexpr int PARTS = 1;
  static constexpr bool SCALED = false;
  DEVICE void cut(const uint4& w, uint32_t (&parts)[1][4]) { parts[0][0] = w.x, parts[0][1] = w.y, parts[0][2] = w.z, parts[0][3] = w.w; }
};
struct OfF16 {
  typedef uint16_t Stored;
  typedef uint4 Eight;
  static constexpr int PARTS = 2;
  static constexpr bool SCALED = false;
  DEVICE void cut(const uint4& w, uint32_t (&parts)[2][4]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float low = lower_half(words[i]), high = upper_half(words[i]);
      parts[0][i] = upper_halves(low, high);
      parts[1][i] = upper_halves(low - upper_part(low), high - upper_part(high));
    }
  }
};

/// The same of four to a word, which may have scales.
struct OfE4M3 {
  typedef uint8_t Stored;
  typedef uint2 Eight;
  static constexpr int PARTS = 1;
  static constexpr bool SCALED = true;
  DEVICE void cut(const uint2& w, uint32_t (&parts)[1][4]) {
    const uint32_t words[2] = {w.x, w.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // A number of bf16 with the same exponent and mantissa is 2^-120 of it. The one with all ones is none: so is one with all ones in its exponent.
      uint32_t pair = __byte_perm(words[i / 2], 0, i % 2 ? 0x4342 : 0x4140), rest = pair & 0x007f007fu;
      uint32_t none = (rest + 0x00010001u) & 0x00800080u;
      parts[0][i] = times_2_120(rest << 4 | (pair & 0x00800080u) << 8) | ((none << 8) - none);
    }
  }
};

/// The scales that activations take on for the outputs from `first` on; null without scales, and with those of outputs.
DEVICE const float* band_of(const Scales& scales, const float* values, int first) {
  return values && scales.across > 1 ? values + size_t(first / scales.height) * scales.across : nullptr;
}

/// The scale of one chunk after another, where there is a band of them.
struct Walk {
  const float* at;
  int left;
  float now;
  __device__ __forceinline__ Walk(const Scales& scales, const float* band, int chunk) : at(nullptr), left(0x7fffffff), now(1.0f) {
    if (band) {
      at = band + chunk / scales.wide;
      left = scales.wide - chunk % scales.wide;
      now = chunk / scales.wide < scales.across ? *at : 0.0f;
    }
  }
  /// To the next chunk, if `more` come.
  __device__ __forceinline__ void next(const Scales& scales, bool more) {
    if (--left == 0 && more) left = scales.wide, now = *++at;
  }
};

/// Activations with the scale of their chunk.
template <class W> DEVICE void take_on(float (&x)[8], float scale) {
  if constexpr (W::SCALED) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
  }
}

/// Eight weights of a row from `at` on, of which there are `k`. `WIDE`: rows are whole eights at multiples of their size.
template <bool WIDE> DEVICE uint4 eight_weights(const uint16_t* row, int at, int k) {
  if constexpr (WIDE) {
    return at < k ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (at + i < k) words[i / 2] |= uint32_t(row[at + i]) << i % 2 * 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <bool WIDE> DEVICE uint2 eight_weights(const uint8_t* row, int at, int k) {
  if constexpr (WIDE) {
    return at < k ? *reinterpret_cast<const uint2*>(row + at) : make_uint2(0, 0);
  } else {
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (at + i < k) words[i / 4] |= uint32_t(row[at + i]) << i % 4 * 8;
    return make_uint2(words[0], words[1]);
  }
}

/// Eight activations likewise; `row` may be null, for zeros.
template <bool WIDE> DEVICE void eight_numbers(const float* row, int at, int k, float (&x)[8]) {
  if constexpr (WIDE) {
    float4 low = {0.0f, 0.0f, 0.0f, 0.0f}, high = low;
    if (row && at < k) low = *reinterpret_cast<const float4*>(row + at), high = *reinterpret_cast<const float4*>(row + at + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = row && at + i < k ? row[at + i] : 0.0f;
  }
}

/// Whether rows of so many weights and activations can be loaded by eights.
template <class Stored> DEVICE bool is_wide(const Stored* w, const float* x, long long x_stride, int k) {
  return k % 8 == 0 && x_stride % 4 == 0 && reinterpret_cast<size_t>(w) % (8 * sizeof(Stored)) == 0 && reinterpret_cast<size_t>(x) % 16 == 0;
}

/// A chunk's products of sixteen outputs, of which a lane has parts of output g and of g + 8, with eight rows.
template <class W> DEVICE void multiply(float (&sums)[4], const uint32_t (&low)[W::PARTS][4], const uint32_t (&high)[W::PARTS][4], const uint32_t (&x)[PARTS_OF_X][4]) {
  unsigned a[2 * W::PARTS * PARTS_OF_X][4], b[2 * W::PARTS * PARTS_OF_X][2];
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int p = 0; p < W::PARTS; p++)
#pragma unroll
      for (int q = 0; q < PARTS_OF_X; q++) {
        int n = (step * W::PARTS + p) * PARTS_OF_X + q, at = 2 * step;
        a[n][0] = low[p][at], a[n][1] = high[p][at], a[n][2] = low[p][at + 1], a[n][3] = high[p][at + 1];
        b[n][0] = x[q][at], b[n][1] = x[q][at + 1];
      }
  mma_bf16(sums, a, b);
}
