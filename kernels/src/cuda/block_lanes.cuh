// What a lane has of blocks of weights in products of few rows (block_vec.cu), and the integers that it makes of them. The types are those of formats.cuh.
//
// Numbers of weights are taken as they lie, with something added to each that is taken off again by what a sum begins with: a multiple of the
// sum of activations, the same for all outputs. All of it is integers, so that the results are those of the numbers themselves.
#pragma once
#include "formats.cuh"
#include "ptx.cuh"

/// Words of shared memory from any byte on. Of a shift five bits count.
DEVICE Shifted words_at(const uint32_t* staged, unsigned byte) { return {staged + byte / 4, byte * 8}; }
DEVICE unsigned byte_at(const uint32_t* staged, unsigned byte) { return reinterpret_cast<const uint8_t*>(staged)[byte]; }
DEVICE unsigned half_at(const uint32_t* staged, unsigned byte) { return byte_at(staged, byte) | byte_at(staged, byte + 1) << 8; }

/// Four words from any byte on, and from a multiple of sixteen.
DEVICE uint4 four_at(const uint32_t* staged, unsigned byte) {
  Shifted w = words_at(staged, byte);
  return make_uint4(w(0), w(1), w(2), w(3));
}
DEVICE uint4 sixteen_at(const uint32_t* staged, unsigned byte) { return *reinterpret_cast<const uint4*>(staged + byte / 4); }

/// The sum of the bytes of some words.
template <int COUNT> DEVICE int sum_of(const uint32_t* q) {
  int sum = 0;
  for (int i = 0; i < COUNT; i++) sum = __dp4a(int(q[i]), 0x01010101, sum);
  return sum;
}
/// Of words of weights, whose numbers have no sign where it says so, with as many of activations.
template <int COUNT, bool UNSIGNED = false> DEVICE int dot_of(const uint32_t* w, const uint32_t* q, int start) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) start = UNSIGNED ? dot_unsigned(w[i], q[i], start) : __dp4a(int(w[i]), int(q[i]), start);
  return start;
}

/// Eight codes of E2M1 as bytes that are its numbers doubled, and 12 more: of the lower four bits of the first byte, of its upper ones, of the lower ones of the second …
DEVICE void e2m1_twice_and_12(uint32_t codes, uint32_t& first, uint32_t& second) {
  uint32_t other = codes ^ 0x88888888u;
  // Of a number with the other sign a zero.
  first = permuted(0x0f0e0d0cu, 0x18141210u, codes) | permuted(0x090a0b0cu, 0x00040608u, other);
  second = permuted(0x0f0e0d0cu, 0x18141210u, codes >> 16) | permuted(0x090a0b0cu, 0x00040608u, other >> 16);
}
/// As above, of activations: `q` has words of those that lower bits are multiplied with, then as many of upper ones.
template <int COUNT> DEVICE void in_order_of_codes(uint32_t (&q)[COUNT]) {
  uint32_t from[COUNT];
  for (int i = 0; i < COUNT; i++) from[i] = q[i];
  for (int i = 0; i < COUNT / 2; i++) {
    q[2 * i] = permuted(from[i], from[COUNT / 2 + i], 0x5140u);
    q[2 * i + 1] = permuted(from[i], from[COUNT / 2 + i], 0x7362u);
  }
}

// Of types with a scale per 32 numbers a lane has one such run, with one per 16 it has one or two. WORDS: of four numbers each. MORE: what each number has been added. SIXTEENTHS: the second half has
// numbers without a sign, times sixteen. CODES: the order is that of `e2m1_twice_and_12`.

template <class F> struct Run;

template <bool FIVE, bool MINIMUM> struct Run<Nibbles<FIVE, MINIMUM>> {
  static constexpr int WORDS = 8, MORE = MINIMUM ? 0 : FIVE ? 16 : 8;
  static constexpr bool SIXTEENTHS = !FIVE, CODES = false;
  DEVICE void unpack(const uint32_t* staged, unsigned byte, int, uint32_t (&w)[8], float& d, float& m) {
    uint32_t head = MINIMUM ? words_at(staged, byte)(0) : half_at(staged, byte);
    d = lower_half(head);
    m = MINIMUM ? upper_half(head) : 0.0f;
    Shifted from = words_at(staged, byte + (MINIMUM ? 4 : 2));
    uint32_t fifth = FIVE ? from(0) : 0;
    for (int i = 0; i < 4; i++) {
      uint32_t two = from(FIVE ? 1 + i : i);
      w[i] = two & 0x0f0f0f0fu;
      w[4 + i] = FIVE ? two >> 4 & 0x0f0f0f0fu : two & 0xf0f0f0f0u;
      if (FIVE) {
        w[i] |= (fifth >> 4 * i & 15u) * 0x02040810u & 0x10101010u;
        w[4 + i] |= (fifth >> (16 + 4 * i) & 15u) * 0x02040810u & 0x10101010u;
      }
    }
  }
};

template <> struct Run<Q8_0> {
  static constexpr int WORDS = 8, MORE = 0;
  static constexpr bool SIXTEENTHS = false, CODES = false;
  DEVICE void unpack(const uint32_t* staged, unsigned byte, int, uint32_t (&w)[8], float& d, float& m) {
    d = lower_half(half_at(staged, byte));
    m = 0.0f;
    Shifted from = words_at(staged, byte + 2);
    for (int i = 0; i < 8; i++) w[i] = from(i);
  }
};

template <> struct Run<MXFP4> {
  static constexpr int WORDS = 8, MORE = 12;
  static constexpr bool SIXTEENTHS = false, CODES = true;
  DEVICE void unpack(const uint32_t* staged, unsigned byte, int, uint32_t (&w)[8], float& d, float& m) {
    uint32_t e = byte_at(staged, byte);
    d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    m = 0.0f;
    Shifted from = words_at(staged, byte + 1);
    for (int i = 0; i < 4; i++) e2m1_twice_and_12(from(i), w[2 * i], w[2 * i + 1]);
  }
};

template <> struct Run<NVFP4> {
  static constexpr int WORDS = 4, MORE = 12;
  static constexpr bool SIXTEENTHS = false, CODES = true;
  /// Run `j` of the block at `byte`.
  DEVICE void unpack(const uint32_t* staged, unsigned byte, int j, uint32_t (&w)[4], float& d, float& m) {
    uint32_t scale = byte_at(staged, byte + j);
    d = scale == 0x7fu ? 0.0f : lower_half((scale & 0x7fu) << 7) * 128.0f;
    m = 0.0f;
    Shifted from = words_at(staged, byte + 4 + 8 * j);
    for (int i = 0; i < 2; i++) e2m1_twice_and_12(from(i), w[2 * i], w[2 * i + 1]);
  }
};

/// Activations of a lane's run, for a row.
template <class F> struct Held {
  uint32_t q[Run<F>::WORDS];
  float da;
  int start;
  /// From element `at` of a row on, whose unit is number `unit`.
  DEVICE void load(Held& held, const signed char* q, const float* da, unsigned at, unsigned unit) {
    for (int i = 0; i < Run<F>::WORDS / 4; i++) {
      uint4 v = *reinterpret_cast<const uint4*>(q + at + 16 * i);
      held.q[4 * i] = v.x, held.q[4 * i + 1] = v.y, held.q[4 * i + 2] = v.z, held.q[4 * i + 3] = v.w;
    }
    held.da = da[unit];
  }
  __device__ __forceinline__ int sum() const { return sum_of<Run<F>::WORDS>(q); }
  __device__ __forceinline__ void prepare() {
    start = -Run<F>::MORE * (Run<F>::SIXTEENTHS ? 16 : 1) * sum();
    if (Run<F>::CODES) in_order_of_codes(q);
  }
  /// What the run adds, before its scale.
  __device__ __forceinline__ float term(const uint32_t (&w)[Run<F>::WORDS]) const {
    constexpr int HALF = Run<F>::WORDS / 2;
    int low = dot_of<HALF>(w, q, 0), high = dot_of<HALF, Run<F>::SIXTEENTHS>(w + HALF, q + HALF, start);
    // Of `da` a sixteenth is a number of f32: it has the range of halves.
    return Run<F>::SIXTEENTHS ? float(low * 16 + high) * (da * 0.0625f) : float(low + high) * da;
  }
};

// Of blocks of 256 eight lanes have one together.

/// A step of summing two numbers over lanes: each lane goes on with one of them, which is that of its bit `d`.
DEVICE int halved(int a, int b, int d) {
  bool second = threadIdx.x & d;
  return (second ? b : a) + __shfl_xor_sync(ALL, second ? a : b, d);
}

template <class F> struct Eighth;

template <bool FIVE> struct Eighth<Mixed<FIVE>> {
  static constexpr int PRODUCTS = 2;
  uint32_t w[8], head;
  // Of the lane's two runs, and the minimum of the one that has its number.
  int scale[2], min;

  /// The bytes with numbers: sixteen of them, whose lower bits are of one run of 32 and whose upper ones of the next. `even`: at a multiple of sixteen.
  __device__ __forceinline__ void unpack(const uint32_t* staged, unsigned byte, bool even) {
    unsigned t = threadIdx.x % 8, numbers = byte + (FIVE ? 48 : 16) + 16 * t, fifths = byte + 16 + 16 * (t % 2);
    uint4 h, n, f = {};
    if (even) {
      h = sixteen_at(staged, byte), n = sixteen_at(staged, numbers);
      if (FIVE) f = sixteen_at(staged, fifths);
    } else {
      h = four_at(staged, byte), n = four_at(staged, numbers);
      if (FIVE) f = four_at(staged, fifths);
    }
    head = h.x;
    uint32_t two[4] = {n.x, n.y, n.z, n.w}, fifth[4] = {f.x, f.y, f.z, f.w};
    for (int i = 0; i < 4; i++) {
      w[i] = two[i] & 0x0f0f0f0fu;
      w[4 + i] = FIVE ? two[i] >> 4 & 0x0f0f0f0fu : two[i] & 0xf0f0f0f0u;
      if (FIVE) {
        uint32_t at_4 = __funnelshift_r(fifth[i], fifth[i], (t / 2 * 2 + 28) % 32);
        w[i] |= at_4 & 0x10101010u;
        w[4 + i] |= at_4 >> 1 & 0x10101010u;
      }
    }
    // As Mixed::scale_min has them, of scales two side by side.
    unsigned two_by = t / 2 % 2 * 16, by = t % 4 * 8;
    uint32_t a = h.y >> two_by, b = h.z >> by, c = h.w >> two_by;
    uint32_t scales = t < 4 ? a & 0x3f3fu : (c & 0x0f0fu) | (a >> 2 & 0x3030u);
    scale[0] = scales & 0xffu, scale[1] = scales >> 8;
    min = t < 4 ? b & 63u : (h.w >> (by + 4) & 15u) | (b >> 2 & 0x30u);
  }

  struct Held {
    uint32_t q[8];
    float da;
    /// Of the run that has the lane's number.
    int sum;
    /// From the block's activations.
    __device__ __forceinline__ void load(const signed char* from) {
      unsigned t = threadIdx.x % 8;
      for (int i = 0; i < 2; i++) {
        uint4 v = *reinterpret_cast<const uint4*>(from + t / 2 * 64 + t % 2 * 16 + 32 * i);
        q[4 * i] = v.x, q[4 * i + 1] = v.y, q[4 * i + 2] = v.z, q[4 * i + 3] = v.w;
      }
    }
    __device__ __forceinline__ void prepare() { sum = halved(sum_of<4>(q), sum_of<4>(q + 4), 1); }
  };
  __device__ __forceinline__ void products(const Held& x, int& inner, int& total) const {
    int low = dot_of<4>(w, x.q, 0) * scale[0], high = dot_of<4, !FIVE>(w + 4, x.q + 4, 0) * scale[1];
    inner = (FIVE ? low : low * 16) + high;
    total = min * x.sum;
  }
  /// What a block adds before its `da`, of sums over its lanes.
  DEVICE float term(uint32_t head, int inner, int total) {
    return fmaf(float(FIVE ? inner : inner / 16), lower_half(head), -(float(total) * upper_half(head)));
  }
};

template <> struct Eighth<Q6_K> {
  static constexpr int PRODUCTS = 1;
  uint32_t w[8], head;
  int scale[4];

  /// Eight numbers of each run of 32 of a half of the block.
  __device__ __forceinline__ void unpack(const uint32_t* staged, unsigned byte, bool) {
    unsigned t = threadIdx.x % 8, h = t / 4, u = t % 4;
    Shifted near = words_at(staged, byte + h * 64 + u * 8), far = {near.words + 8, near.shift}, upper = words_at(staged, byte + 128 + h * 32 + u * 8);
    for (int i = 0; i < 2; i++) {
      uint32_t a = near(i), b = far(i), y = upper(i);
      w[i] = (a & 0x0f0f0f0fu) | (y << 4 & 0x30303030u);
      w[2 + i] = (b & 0x0f0f0f0fu) | (y << 2 & 0x30303030u);
      w[4 + i] = (a >> 4 & 0x0f0f0f0fu) | (y & 0x30303030u);
      w[6 + i] = (b >> 4 & 0x0f0f0f0fu) | (y >> 2 & 0x30303030u);
    }
    for (int run = 0; run < 4; run++) scale[run] = int8_t(byte_at(staged, byte + 192 + h * 8 + u / 2 + 2 * run));
    head = half_at(staged, byte + 208);
  }

  struct Held {
    uint32_t q[8];
    float da;
    int starts[4];
    __device__ __forceinline__ void load(const signed char* from) {
      unsigned t = threadIdx.x % 8;
      for (int run = 0; run < 4; run++) {
        uint2 v = *reinterpret_cast<const uint2*>(from + t / 4 * 128 + run * 32 + t % 4 * 8);
        q[2 * run] = v.x, q[2 * run + 1] = v.y;
      }
    }
    __device__ __forceinline__ void prepare() {
      for (int run = 0; run < 4; run++) starts[run] = -32 * sum_of<2>(q + 2 * run);
    }
  };
  __device__ __forceinline__ void products(const Held& x, int& inner, int&) const {
    inner = 0;
#pragma unroll
    for (int run = 0; run < 4; run++) inner += scale[run] * dot_of<2>(w + 2 * run, x.q + 2 * run, x.starts[run]);
  }
  DEVICE float term(uint32_t head, int inner, int) { return float(inner) * lower_half(head); }
};
