// Products of few rows with weights of few bits: what half_vec.cu and float8_vec.cu have in common.
//
// Order of summation: halves.cuh. A block has sixteen outputs, and each of its eight warps a range of `k`.
//
// Weights go to shared memory by whole lines of the cache, and come from there as tensor cores want them. Each warp has a ring of its own for them, of which one slot is
// asked for again as soon as it has been read, so that some are always on their way. Activations of up to four rows are cut by the whole warp, each number once; of more rows each lane cuts what it multiplies,
// which is no more.
#pragma once
#include "chosen.cuh"
#include "halves.cuh"

constexpr int OUTPUTS = 16, THREADS = 32 * RANGES;

/// Bytes of an output that are asked for at once, and pieces of these that a lane asks for. Slots of a ring.
constexpr int LINE = 128, PIECES = LINE / 16, SLOTS = 2;
/// Outputs that the lanes of a warp ask for at once.
constexpr int AT_ONCE = 32 / PIECES;

/// What a stage of weights is: numbers of each output, and chunks.
template <class W> struct Stage {
  static constexpr int NUMBERS = LINE / int(sizeof(typename W::Stored)), CHUNKS = NUMBERS / CHUNK;
  /// Eights of numbers in all the parts of a row.
  static constexpr int EIGHTS_OF_ROW = PARTS_OF_X * NUMBERS / 8;
};

/// Sums of the ranges have places in the warps' rings. Some more in a row, so that the lanes of a warp store into different banks.
constexpr int SUMS_OF_ROW = OUTPUTS + 4;

/// Rows that a warp cuts together if there are several, two chunks of each at once, and eights of these in all their parts; half a line more, so that neighbours are in
/// different banks.
constexpr int SEVERAL = 4, UNIT = 2 * CHUNK, UNIT_OF_ROW = PARTS_OF_X * UNIT / 8 + 4;

template <class W, bool FEW> struct Memory {
  uint4 ring[RANGES][SLOTS][OUTPUTS][PIECES];
  /// The parts of a single row, for two stages by turns, or those of up to four. And zeros for the lanes that have no row, in other banks.
  union {
    uint4 alone[FEW ? RANGES : 1][2][FEW ? Stage<W>::EIGHTS_OF_ROW : 1], several[FEW ? RANGES : 1][FEW ? SEVERAL : 1][UNIT_OF_ROW];
  };
  uint4 zeros[FEW ? 4 + Stage<W>::EIGHTS_OF_ROW : 1];

  __device__ __forceinline__ float* sums(int range) { return reinterpret_cast<float*>(ring[range]); }
};

/// Where piece `p` of an output is in its line of a slot, so that lanes that read at once do so from different banks.
template <class W> DEVICE int place_of(int output, int p) { return sizeof(typename W::Stored) == 2 ? p ^ output % 2 * 4 : p ^ output % 4 * 2; }

/// What a lane asks for of its warp's range: stage after stage.
template <class W> struct Asker {
  const typename W::Stored* from;
  uint32_t rows[OUTPUTS / AT_ONCE];
  uint4* to;
  int at, until;

  /// The range, and all slots asked for.
  __device__ __forceinline__ void start(uint4 (&ring)[SLOTS][OUTPUTS][PIECES], const typename W::Stored* w, int n, int k, int first) {
    int lane = threadIdx.x % 32, each = chunks_of_range(k), begin = int(threadIdx.x) / 32 * each;
    // Outputs that are none read the last one's.
#pragma unroll
    for (int i = 0; i < OUTPUTS / AT_ONCE; i++) rows[i] = uint32_t(min(lane / PIECES + i * AT_ONCE, n - 1 - first)) * k;
    from = w + size_t(first) * k;
    to = &ring[0][lane / PIECES][place_of<W>(lane / PIECES, lane % PIECES)];
    at = begin * CHUNK + lane % PIECES * int(16 / sizeof(typename W::Stored));
    until = min(k, (begin + each) * CHUNK);
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) ask(slot);
  }
  /// Numbers behind the range are zeros: products with these change no sum, so that a stage is always a whole one.
  __device__ __forceinline__ void ask(int slot) {
#pragma unroll
    for (int i = 0; i < OUTPUTS / AT_ONCE; i++) bring_16<256>(to + (slot * OUTPUTS + i * AT_ONCE) * PIECES, from + (rows[i] + at), at < until);
    at += Stage<W>::NUMBERS;
    close_group();
  }
};

/// Some activations, cut into three as halves.cuh has it, with fewer steps where all are finite.
template <int N> DEVICE void cut_finite(const float (&x)[N], uint32_t (&parts)[PARTS_OF_X][N / 2]) {
  // The rest of what is not finite is a NaN.
  float rests = 0.0f;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    float low = x[2 * i] - upper_part(x[2 * i]), high = x[2 * i + 1] - upper_part(x[2 * i + 1]);
    float low_rest = low - upper_part(low), high_rest = high - upper_part(high);
    parts[0][i] = upper_halves(x[2 * i], x[2 * i + 1]);
    parts[1][i] = upper_halves(low, high);
    parts[2][i] = upper_halves(low_rest, high_rest);
    rests = i == 0 ? low_rest + high_rest : rests + (low_rest + high_rest);
  }
  if (rests == rests) return;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    float eight[8] = {x[2 * i], x[2 * i + 1]};
    uint32_t all[PARTS_OF_X][4];
    cut(eight, all);
#pragma unroll
    for (int p = 0; p < PARTS_OF_X; p++) parts[p][i] = all[p][0];
  }
}

/// Cuts weights, of output g (0) and of g + 8 (1).
template <class W> struct Cutter {
  __device__ __forceinline__ void cut(int, const typename W::Eight& w, uint32_t (&parts)[W::PARTS][4]) { W::cut(w, parts); }
  template <int EIGHTS> __device__ __forceinline__ void end(float (&)[EIGHTS][4]) {}
};
/// Of weights that are none it makes numbers, for which outputs of them become NaN in the end.
template <> struct Cutter<OfE4M3> {
  uint32_t none[2] = {};
  __device__ __forceinline__ void cut(int half, const uint2& w, uint32_t (&parts)[1][4]) {
    // Exponent and mantissa as bf16 has them, which is 2^-120 of it.
    parts[0][0] = times_2_120(signed_pair<false>(w.x) << 4 & 0x87f087f0u), parts[0][1] = times_2_120(signed_pair<true>(w.x) << 4 & 0x87f087f0u);
    parts[0][2] = times_2_120(signed_pair<false>(w.y) << 4 & 0x87f087f0u), parts[0][3] = times_2_120(signed_pair<true>(w.y) << 4 & 0x87f087f0u);
    // One more changes the uppermost bit of a byte that is none; a carry of it may change that of the next, which is of the same output.
    none[half] |= (w.x + 0x01010101u) ^ w.x, none[half] |= (w.y + 0x01010101u) ^ w.y;
  }
  template <int EIGHTS> __device__ __forceinline__ void end(float (&sums)[EIGHTS][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t some = none[half];
      some |= __shfl_xor_sync(ALL, some, 1);
      some |= __shfl_xor_sync(ALL, some, 2);
      if (some & 0x80808080u) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) sums[e][2 * half] = sums[e][2 * half + 1] = quiet_nan();
      }
    }
  }
};

/// Where in a ring a lane finds what it multiplies of output g; that of output g + 8 is half a slot behind.
template <class W> struct Finder {
  typedef typename W::Eight Eight;
  const uint4* lines;
  int at;
  __device__ __forceinline__ explicit Finder(const uint4 (&ring)[SLOTS][OUTPUTS][PIECES]) {
    constexpr int SHARE = int(sizeof(uint4) / sizeof(Eight));
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    lines = ring[0][g], at = place_of<W>(g, t / SHARE) * SHARE + t % SHARE;
  }
  /// Places change as the chunks' numbers do, bit by bit.
  __device__ __forceinline__ Eight get(int slot, int chunk, int half) const {
    return reinterpret_cast<const Eight*>(lines + (slot * OUTPUTS + half * 8) * PIECES)[at ^ 4 * chunk];
  }
};

/// The sums of one range of a single row, which is the first.
template <class W>
DEVICE void range_alone(Memory<W, true>& memory, Asker<W>& asker, const float* x, int k, const Scales& scales, const float* band, float (&sums)[1][4]) {
  constexpr int CHUNKS = Stage<W>::CHUNKS, NUMBERS = Stage<W>::NUMBERS, ROW = Stage<W>::EIGHTS_OF_ROW;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, each = chunks_of_range(k), begin = warp * each;
  int end = min(begin + each, (k + CHUNK - 1) / CHUNK), stages = (end - begin + CHUNKS - 1) / CHUNKS;
  // A lane cuts as many neighbours as there are chunks; they are all of one.
  int at = begin * CHUNK + lane * CHUNKS, until = min(k, end * CHUNK);
  x += at;
  float ahead[CHUNKS], scale = 1.0f;
  int which = band ? at / CHUNK / scales.wide : 0, left = band ? scales.wide - at / CHUNK % scales.wide : 0;
  auto bring = [&]() {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) ahead[i] = 0.0f;
    if (at < until) {
      if constexpr (CHUNKS == 4) {
        float4 v = *reinterpret_cast<const float4*>(x);
        ahead[0] = v.x, ahead[1] = v.y, ahead[CHUNKS - 2] = v.z, ahead[CHUNKS - 1] = v.w;
      } else {
        float2 v = *reinterpret_cast<const float2*>(x);
        ahead[0] = v.x, ahead[1] = v.y;
      }
    }
    // Zeros of a chunk within the range take on its scale, too.
    if constexpr (W::SCALED) {
      if (band) {
        scale = at < end * CHUNK ? band[which] : 0.0f;
        for (left -= CHUNKS; left <= 0; left += scales.wide) which++;
      }
    }
    at += NUMBERS, x += NUMBERS;
  };
  // Places that go to the other stage's and back again.
  const uint4* parts = g == 0 ? memory.alone[warp][0] + t : memory.zeros + 4 + t;
  uint32_t* to = reinterpret_cast<uint32_t*>(memory.alone[warp][0]) + lane * (CHUNKS / 2);
  int turn = 1, turn_of_parts = g == 0 ? ROW : 0;
  Finder<W> finder(memory.ring[warp]);
  Cutter<W> cutter;
  bring();
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
    uint32_t cuts[PARTS_OF_X][CHUNKS / 2];
    if constexpr (W::SCALED) {
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) ahead[i] *= scale;
    }
    cut_finite(ahead, cuts);
#pragma unroll
    for (int p = 0; p < PARTS_OF_X; p++) {
      uint32_t* part = to + p * (NUMBERS / 2);
      if constexpr (CHUNKS == 4) *reinterpret_cast<uint2*>(part) = make_uint2(cuts[p][0], cuts[p][CHUNKS / 2 - 1]);
      else *part = cuts[p][0];
    }
    bring();
    await_groups<SLOTS - 1>();
    __syncwarp();
    typename W::Eight words[CHUNKS][2];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int half = 0; half < 2; half++) words[c][half] = finder.get(0, c, half);
    __syncwarp();
    asker.ask(0);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t low[W::PARTS][4], high[W::PARTS][4], of_x[PARTS_OF_X][4];
      cutter.cut(0, words[c][0], low), cutter.cut(1, words[c][1], high);
#pragma unroll
      for (int p = 0; p < PARTS_OF_X; p++) {
        uint4 v = parts[p * (NUMBERS / 8) + 4 * c];
        of_x[p][0] = v.x, of_x[p][1] = v.y, of_x[p][2] = v.z, of_x[p][3] = v.w;
      }
      multiply<W>(sums[0], low, high, of_x);
    }
    to += turn * 4 * ROW, parts += turn_of_parts;
    finder.lines += turn * OUTPUTS * PIECES, asker.to += turn * OUTPUTS * PIECES;
    turn = -turn, turn_of_parts = -turn_of_parts;
  }
  cutter.end(sums);
}

/// The sums of one range of the first `count` rows, from two to `SEVERAL`.
template <class W>
DEVICE void range_several(Memory<W, true>& memory, Asker<W>& asker, const float* x, long long x_stride, int k, const int* from, int count, const Scales& scales, const float* band,
                          float (&sums)[1][4]) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, each = chunks_of_range(k), begin = warp * each;
  int end = min(begin + each, (k + CHUNK - 1) / CHUNK), stages = (end - begin + Stage<W>::CHUNKS - 1) / Stage<W>::CHUNKS;
  // Half of the warp has a row, of which a lane cuts four neighbours, and maybe one of the next two.
  int half = lane / 16, at = begin * CHUNK + lane % 16 * 4, until = min(k, end * CHUNK), untils[2] = {until, half + 2 < count ? until : 0};
  bool more = count > 2;
  const float* rows[2] = {x + from[half] * x_stride + at, x + from[untils[1] ? half + 2 : half] * x_stride + at};
  float ahead[2][4], scale = 1.0f;
  int which = band ? at / CHUNK / scales.wide : 0, left = band ? scales.wide - at / CHUNK % scales.wide : 0;
  auto bring = [&]() {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (at < untils[i]) v = *reinterpret_cast<const float4*>(rows[i]);
      rows[i] += UNIT;
      ahead[i][0] = v.x, ahead[i][1] = v.y, ahead[i][2] = v.z, ahead[i][3] = v.w;
    }
    if constexpr (W::SCALED) {
      if (band) {
        scale = at < end * CHUNK ? band[which] : 0.0f;
        for (left -= UNIT / CHUNK; left <= 0; left += scales.wide) which++;
      }
    }
    at += UNIT;
  };
  const uint4* parts = g < SEVERAL ? memory.several[warp][g] + t : memory.zeros + 4 + t;
  uint2* to = reinterpret_cast<uint2*>(memory.several[warp][half]) + lane % 16;
  // Rows that are none have zeros, for all stages.
  if (!more)
    for (int i = lane; i < UNIT_OF_ROW; i += 32) memory.several[warp][2][i] = memory.several[warp][3][i] = make_uint4(0, 0, 0, 0);
  Finder<W> finder(memory.ring[warp]);
  Cutter<W> cutter;
  bring();
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
#pragma unroll 1
    for (int unit = 0; unit < Stage<W>::CHUNKS; unit += 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (i == 1 && !more) break;
        uint32_t cuts[PARTS_OF_X][2];
        if constexpr (W::SCALED) {
#pragma unroll
          for (int j = 0; j < 4; j++) ahead[i][j] *= scale;
        }
        cut_finite(ahead[i], cuts);
#pragma unroll
        for (int p = 0; p < PARTS_OF_X; p++) to[i * 2 * (2 * UNIT_OF_ROW) + p * (UNIT / 4)] = make_uint2(cuts[p][0], cuts[p][1]);
      }
      bring();
      if (unit == 0) await_groups<SLOTS - 1>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32_t low[W::PARTS][4], high[W::PARTS][4], of_x[PARTS_OF_X][4];
        cutter.cut(0, finder.get(s % SLOTS, unit + c, 0), low), cutter.cut(1, finder.get(s % SLOTS, unit + c, 1), high);
#pragma unroll
        for (int p = 0; p < PARTS_OF_X; p++) {
          uint4 v = parts[p * (UNIT / 8) + 4 * c];
          of_x[p][0] = v.x, of_x[p][1] = v.y, of_x[p][2] = v.z, of_x[p][3] = v.w;
        }
        multiply<W>(sums[0], low, high, of_x);
      }
      __syncwarp();
    }
    asker.ask(s % SLOTS);
  }
  cutter.end(sums);
}

/// The sums of one range of several rows, of which each lane cuts what it multiplies.
template <class W, int EIGHTS>
DEVICE void range(uint4 (&ring)[SLOTS][OUTPUTS][PIECES], Asker<W>& asker, const float* x, long long x_stride, int k, const int* from, const Scales& scales, const float* band,
                  float (&sums)[EIGHTS][4]) {
  constexpr int CHUNKS = Stage<W>::CHUNKS;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, each = chunks_of_range(k), begin = int(threadIdx.x) / 32 * each;
  int end = min(begin + each, (k + CHUNK - 1) / CHUNK), stages = (end - begin + CHUNKS - 1) / CHUNKS, until = min(k, end * CHUNK);
  const float* rows[EIGHTS];
#pragma unroll
  for (int e = 0; e < EIGHTS; e++) rows[e] = from[8 * e + g] < 0 ? nullptr : x + from[8 * e + g] * x_stride;
  Walk walk(scales, band, begin);
  Finder<W> finder(ring);
  Cutter<W> cutter;
  float ahead[8];
  int at = begin * CHUNK + 8 * t;
  eight_numbers<true>(rows[0], at, until, ahead);
#pragma unroll 1
  for (int s = 0; s < stages; s++) {
    await_groups<SLOTS - 1>();
    __syncwarp();
#pragma unroll EIGHTS == 1 && !W::SCALED ? 2 : 1
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t low[W::PARTS][4], high[W::PARTS][4];
      cutter.cut(0, finder.get(s % SLOTS, c, 0), low), cutter.cut(1, finder.get(s % SLOTS, c, 1), high);
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        float now[8];
        uint32_t parts[PARTS_OF_X][4];
#pragma unroll
        for (int i = 0; i < 8; i++) now[i] = ahead[i];
        // Those of the next eight, or of the next chunk's first.
        eight_numbers<true>(rows[(e + 1) % EIGHTS], e + 1 < EIGHTS ? at : at + CHUNK, until, ahead);
        take_on<W>(now, walk.now);
        cut_finite(now, parts);
        multiply<W>(sums[e], low, high, parts);
      }
      at += CHUNK;
      if constexpr (W::SCALED) {
        // Zeros behind the range stay zeros.
        if (at - 8 * t >= end * CHUNK) walk.now = 0.0f;
        else walk.next(scales, true);
      }
    }
    __syncwarp();
    asker.ask(s % SLOTS);
  }
  cutter.end(sums);
}

/// The sums of one range, where weights or activations do not lie at multiples of their size.
template <class W, int EIGHTS>
DEVICE void range_narrow(const typename W::Stored* w, const float* x, long long x_stride, int n, int k, int first, const int* from, const Scales& scales, const float* band,
                         float (&sums)[EIGHTS][4]) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, each = chunks_of_range(k), begin = int(threadIdx.x) / 32 * each;
  int end = min(begin + each, (k + CHUNK - 1) / CHUNK);
  const typename W::Stored* low = w + size_t(min(first + g, n - 1)) * k;
  const typename W::Stored* high = w + size_t(min(first + g + 8, n - 1)) * k;
  Walk walk(scales, band, begin);
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk++) {
    int at = chunk * CHUNK + 8 * t;
    uint32_t of_low[W::PARTS][4], of_high[W::PARTS][4];
    W::cut(eight_weights<false>(low, at, k), of_low), W::cut(eight_weights<false>(high, at, k), of_high);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      float numbers[8];
      uint32_t parts[PARTS_OF_X][4];
      eight_numbers<false>(from[8 * e + g] < 0 ? nullptr : x + from[8 * e + g] * x_stride, at, k, numbers);
      take_on<W>(numbers, walk.now);
      cut(numbers, parts);
      multiply<W>(sums[e], of_low, of_high, parts);
    }
    if constexpr (W::SCALED) walk.next(scales, chunk + 1 < end);
  }
}

/// Whether weights can be asked for by lines, sixteen outputs with places of 32 bits, and activations loaded by eights.
template <class Stored> DEVICE bool has_lines(const Stored* w, const float* x, long long x_stride, int k) {
  return is_wide(w, x, x_stride, k) && k <= 1 << 27 && k * sizeof(Stored) % 16 == 0 && reinterpret_cast<size_t>(w) % 16 == 0;
}

template <class W, int EIGHTS>
DEVICE void product(const typename W::Stored* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, int rows, const Further& further,
                    const int* ids, const int* order, int experts, int used, int per_token, word64* bad, const Scales& scales = {}) {
  constexpr int ROWS = 8 * EIGHTS;
  constexpr bool FEW = EIGHTS == 1;
  static_assert(ROWS * SUMS_OF_ROW * sizeof(float) <= sizeof(uint4[SLOTS][OUTPUTS][PIECES]), "a range's sums have places in its ring");
  __shared__ __align__(128) Memory<W, FEW> memory;
  // What each row reads and makes; −1 for none.
  __shared__ int from[ROWS], to[ROWS];
  int tid = threadIdx.x, warp = tid / 32, number, first = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;
  const float* values = scales.of(number);
  // Which weights are wanted is known before the rows are, if there are no experts.
  bool lines = has_lines(w, x, x_stride, k), early = lines && !ids;
  Asker<W> asker = {};
  if (early) asker.start(memory.ring[warp], w, n, k, first);
  if (FEW && tid < int(sizeof memory.zeros / sizeof(uint4))) memory.zeros[tid] = make_uint4(0, 0, 0, 0);
  if (!rows_of_block(from, to, rows, ids, order, used, per_token)) return;
  bool wrong = !to_expert(w, size_t(n) * k, ids, to[0], experts, bad);
  if (wrong) values = nullptr;
  if (values) to_expert(values, size_t(scales.each), ids, to[0], experts, bad);
  float sums[EIGHTS][4] = {};
  if (!wrong) {
    const float* band = band_of(scales, values, first);
    if (lines) {
      if (!early) asker.start(memory.ring[warp], w, n, k, first);
      bool done = false;
      if constexpr (FEW) {
        int count = to[1] < 0 ? 1 : to[2] < 0 ? 2 : to[3] < 0 ? 3 : to[4] < 0 ? 4 : 5;
        done = count <= SEVERAL;
        if (count == 1) range_alone(memory, asker, x + from[0] * x_stride, k, scales, band, sums);
        else if (done) range_several(memory, asker, x, x_stride, k, from, count, scales, band, sums);
      }
      if (!done) range(memory.ring[warp], asker, x, x_stride, k, from, scales, band, sums);
    } else {
      range_narrow<W>(w, x, x_stride, n, k, first, from, scales, band, sums);
    }
  }
  int lane = tid % 32;
  // What was asked for behind the range has come, too.
  await_groups<0>();
  __syncwarp();
#pragma unroll
  for (int e = 0; e < EIGHTS; e++)
#pragma unroll
    for (int i = 0; i < 4; i++) memory.sums(warp)[(8 * e + lane % 4 * 2 + i % 2) * SUMS_OF_ROW + lane / 4 + i / 2 * 8] = sums[e][i];
  __syncthreads();
  for (int e = tid; e < ROWS * OUTPUTS; e += THREADS) {
    int row = e / OUTPUTS, output = e % OUTPUTS;
    if (to[row] < 0 || first + output >= n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RANGES; i++) sum += memory.sums(i)[row * SUMS_OF_ROW + output];
    if constexpr (W::SCALED) sum = with_scale(sum, scales, values, first + output);
    out[to[row] * out_stride + first + output] = plain(sum);
  }
}
