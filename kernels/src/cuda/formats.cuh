// The block types of weights: how a block's bytes become signed bytes, scales and minima. The layouts are GGUF's, defined by kernels/src/cpu/dequant.rs.
//
// A block is read as little-endian words through a source `w`: `w(i)` is word i of the block, of which the bytes after its end are
// anything. Word g of a run of 32 numbers has numbers 4g … 4g+3, one in each byte.
#pragma once
#include "common.cuh"

/// A block in memory at any address; reads only its own bytes.
template <int BYTES> struct AnyPlace {
  const uint8_t* at;
  __device__ __forceinline__ uint32_t operator()(int i) const {
    const uint8_t* p = at + 4 * i;
    if (4 * i + 4 > BYTES) {
      uint32_t v = 0;
      for (int j = 0; j < BYTES % 4; j++) v |= uint32_t(p[j]) << 8 * j;
      return v;
    }
    size_t address = reinterpret_cast<size_t>(p);
    if (address % 4 == 0) return *reinterpret_cast<const uint32_t*>(p);
    if (address % 2 == 0) return word_of_halves(p);
    return uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
  }
};

/// A block in words of shared memory, `shift` bits behind the beginning of the first one.
struct Shifted {
  const uint32_t* words;
  unsigned shift;
  __device__ __forceinline__ uint32_t operator()(int i) const { return __funnelshift_r(words[i], words[i + 1], shift); }
};

/// Each byte less `by`, which is at most 128.
DEVICE uint32_t less(uint32_t bytes, uint32_t by) { return ((bytes | 0x80808080u) - by * 0x01010101u) ^ 0x80808080u; }

/// Bits 0 … 3 as the bits 0 of four bytes.
DEVICE uint32_t spread(uint32_t four) { return (four & 15u) * 0x00204081u & 0x01010101u; }

/// Four numbers of E2M1 doubled, by their codes in the lower halves of four bytes.
DEVICE uint32_t e2m1_twice(uint32_t codes) {
  uint32_t x = codes & 0x07070707u;
  x = (x | x >> 4) & 0x00ff00ffu;
  x = (x | x >> 8) & 0x0000ffffu;
  uint32_t magnitude = __byte_perm(0x03020100u, 0x0c080604u, x);
  uint32_t negative = ((codes & 0x08080808u) >> 3) * 0xffu;
  return (0x80808080u + magnitude - 2u * (magnitude & negative)) ^ 0x80808080u;
}

// Blocks of 32: `q` signed, scale `d`, minimum `m`.

/// Q4_0, Q4_1, Q5_0, Q5_1.
template <bool FIVE, bool MINIMUM_> struct Nibbles {
  static constexpr int LEN = 32, BYTES = 18 + (FIVE ? 4 : 0) + (MINIMUM_ ? 2 : 0);
  static constexpr bool MINIMUM = MINIMUM_;
  template <class W> DEVICE void unpack(const W& w, uint32_t (&q)[8], float& d, float& m) {
    constexpr int head = MINIMUM ? 4 : 2;
    auto at = [&](int byte, int i) { return byte % 4 ? w(byte / 4 + i) >> 16 | w(byte / 4 + i + 1) << 16 : w(byte / 4 + i); };
    d = half_to_f32(w(0) & 0xffffu);
    m = MINIMUM ? half_to_f32(w(0) >> 16) : 0.0f;
    uint32_t fifth = FIVE ? at(head, 0) : 0;
    for (int i = 0; i < 4; i++) {
      uint32_t two = at(head + (FIVE ? 4 : 0), i);
      uint32_t low = two & 0x0f0f0f0fu, high = two >> 4 & 0x0f0f0f0fu;
      if (FIVE) low |= spread(fifth >> 4 * i) << 4, high |= spread(fifth >> (16 + 4 * i)) << 4;
      q[i] = MINIMUM ? low : less(low, FIVE ? 16 : 8);
      q[4 + i] = MINIMUM ? high : less(high, FIVE ? 16 : 8);
    }
  }
};
typedef Nibbles<false, false> Q4_0;
typedef Nibbles<false, true> Q4_1;
typedef Nibbles<true, false> Q5_0;
typedef Nibbles<true, true> Q5_1;

struct Q8_0 {
  static constexpr int LEN = 32, BYTES = 34;
  static constexpr bool MINIMUM = false;
  template <class W> DEVICE void unpack(const W& w, uint32_t (&q)[8], float& d, float& m) {
    d = half_to_f32(w(0) & 0xffffu);
    m = 0.0f;
    for (int i = 0; i < 8; i++) q[i] = w(i) >> 16 | w(i + 1) << 16;
  }
};

struct MXFP4 {
  static constexpr int LEN = 32, BYTES = 17;
  static constexpr bool MINIMUM = false;
  template <class W> DEVICE void unpack(const W& w, uint32_t (&q)[8], float& d, float& m) {
    uint32_t e = w(0) & 0xffu;
    d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    m = 0.0f;
    for (int i = 0; i < 4; i++) {
      uint32_t two = w(i) >> 8 | w(i + 1) << 24;
      q[i] = e2m1_twice(two & 0x0f0f0f0fu);
      q[4 + i] = e2m1_twice(two >> 4 & 0x0f0f0f0fu);
    }
  }
};

// Blocks of 64: four runs of sixteen, each with a scale.

/// Counted by runs: of four, the scales come first.
struct NVFP4 {
  static constexpr int LEN = 16, BYTES = 9;
  static constexpr bool MINIMUM = false;
  /// Run `j` of the block `w`.
  template <class W> DEVICE void unpack(const W& w, int j, uint32_t (&q)[4], float& d) {
    uint32_t scale = w(0) >> 8 * j & 0xffu;
    // As in ggml, a sign does not count, and the NaN that has none is 0. A half with the same exponent and mantissa is 2^-8 of E4M3; halves of scales are meant.
    d = scale == 0x7fu ? 0.0f : half_to_f32((scale & 0x7fu) << 7) * 128.0f;
    for (int i = 0; i < 2; i++) {
      uint32_t two = w(1 + 2 * j + i);
      q[i] = e2m1_twice(two & 0x0f0f0f0fu);
      q[2 + i] = e2m1_twice(two >> 4 & 0x0f0f0f0fu);
    }
  }
};

// Blocks of 256: eight runs of 32, each with a scale and a minimum (Q4_K, Q5_K), or two scales of 16 numbers each (Q6_K).

template <bool FIVE> struct Mixed {
  static constexpr int LEN = 256, BYTES = FIVE ? 176 : 144;
  static constexpr bool MINIMUM = true;
  template <class W> DEVICE float d(const W& w) { return half_to_f32(w(0) & 0xffffu); }
  template <class W> DEVICE float dmin(const W& w) { return half_to_f32(w(0) >> 16); }
  /// Scale and minimum of run `j`, six bits each.
  template <class W> DEVICE void scale_min(const W& w, int j, int& scale, int& min) {
    uint32_t a = w(1) >> 8 * (j % 4) & 0xffu, b = w(2) >> 8 * (j % 4) & 0xffu, c = w(3) >> 8 * (j % 4) & 0xffu;
    scale = j < 4 ? a & 63u : (c & 15u) | a >> 6 << 4;
    min = j < 4 ? b & 63u : c >> 4 | b >> 6 << 4;
  }
  template <class W> DEVICE uint32_t word(const W& w, int j, int g) {
    uint32_t low = w((FIVE ? 12 : 4) + j / 2 * 8 + g) >> j % 2 * 4 & 0x0f0f0f0fu;
    return FIVE ? low | (w(4 + g) >> j & 0x01010101u) << 4 : low;
  }
};
typedef Mixed<false> Q4_K;
typedef Mixed<true> Q5_K;

struct Q6_K {
  static constexpr int LEN = 256, BYTES = 210;
  static constexpr bool MINIMUM = false;
  template <class W> DEVICE float d(const W& w) { return half_to_f32(w(52) & 0xffffu); }
  /// Scale of the sixteen numbers from `16 j` on.
  template <class W> DEVICE int scale(const W& w, int j) { return int8_t(w(48 + j / 4) >> 8 * (j % 4) & 0xffu); }
  template <class W> DEVICE uint32_t word(const W& w, int j, int g) {
    int h = j / 4, run = j % 4;
    uint32_t low = w(h * 16 + run % 2 * 8 + g) >> run / 2 * 4 & 0x0f0f0f0fu;
    uint32_t high = w(32 + h * 8 + g) >> run * 2 & 0x03030303u;
    return less(low | high << 4, 32);
  }
};
