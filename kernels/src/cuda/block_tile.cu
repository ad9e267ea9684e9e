// Products of many rows with weights of block types, by tensor cores on integers: mul_mat and mul_mat_id in prefill.
//
// Order of summation: that of kernels/src/cpu/matmul.rs and of block_vec.cu, with the same bits: the tensor cores sum the products within a block, which are
// integers, and each output is one chain over the blocks in ascending order.
//
// mul_tile_TYPE(w, q, da, sums, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales): as mul_vec_TYPE_ROWS in block_vec.cu, with ids only in an
// order of groups of 64.
// A block of 128 threads has 64 outputs of 64 rows, in steps of 128 numbers of each. Weights' bytes and activations of the next step are on the way while this one's are multiplied;
// the bytes become signed bytes in shared memory, once for all warps. So a step has two barriers: after what is there, and after the unpacking.
// gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉, or groups.
#include "chosen.cuh"
#include "formats.cuh"
#include "ptx.cuh"
#include "scales.cuh"

constexpr int OUTPUTS = 64, ROWS = 64, THREADS = 128, STAGE = 128;
typedef RowsOf<ROWS> Rows;
/// Words from row to row in shared memory: eight rows of a matrix of 16 bytes each lie in different banks.
constexpr int STRIDE = STAGE / 4 + 4;
/// As an integer, 0x4b400000 + s for a small s is the bits of this number plus s.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
/// A sum that was begun with MAGIC_BITS as f32, exactly: sums within a block of 32 are below 2^22. Conversions would take longer than all else.
DEVICE float small(int sum) { return __int_as_float(sum) - MAGIC; }

/// The weights of a launch, from the block's first output on. `whole`: they begin at a multiple of PIECE.
struct Weights {
  const uint8_t* at;
  int outputs;
  bool whole;
};

/// What is copied of weights at once, within whole pieces.
constexpr int PIECE = 8;

/// The bytes of `BYTES` in a row for each output, as they are in memory: byte 0 is where it is in its piece.
template <int BYTES> struct Raw {
  // With the word that is read after the last one; an odd number of pieces, which lie in different banks.
  static constexpr int PIECES = (PIECE - 1 + BYTES + 4 + PIECE - 1) / PIECE | 1, WORDS = PIECES * (PIECE / 4);
  uint32_t words[OUTPUTS][WORDS];
};

/// 128 numbers of each output and row; scales of runs, and what else is known of a step. Outputs of `w` are in slots.
template <int BYTES, int RUNS, int MINIMA> struct __align__(16) Tile {
  uint32_t x[2][ROWS][STRIDE], w[OUTPUTS][STRIDE];
  Raw<BYTES> raw;
  float d[RUNS][OUTPUTS], m[MINIMA][OUTPUTS], da[2][4][ROWS];
  int sums[2][MINIMA][ROWS];
};

/// Four outputs that are neighbours are in slots of one lane: slot 16 m + 8 h + g of 32 has output 4 g + 2 m + h.
DEVICE int output_of(int slot) { return slot / 32 * 32 + slot % 8 * 4 + slot % 32 / 8; }

/// A warp has 32 outputs of 32 rows: sixteens `begin` … `end` of two, by four eights of rows. Where there are no more than 32 rows, it has one sixteen.
struct Lane {
  int outputs, rows, begin, end, eights;
  DEVICE Lane mine(const Rows& here) {
    int warp = threadIdx.x / 32;
    if (here.to[32] < 0) return {warp / 2 * 32, 0, warp % 2, warp % 2 + 1, here.eights(0, 4)};
    return {warp % 2 * 32, warp / 2 * 32, 0, 2, here.eights(warp / 2 * 32, 4)};
  }
  /// Where the block has all rows.
  DEVICE Lane whole() {
    int warp = threadIdx.x / 32;
    return {warp % 2 * 32, warp / 2 * 32, 0, 2, 4};
  }
};

/// The fragments of a run of 32: of a warp's sixteens of outputs, and of eights of rows two by two.
template <class T> DEVICE void fragments_of_w(const T& tile, const Lane& lane, int run, unsigned (&a)[2][4]) {
  int i = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; m++) load_matrices(a[m], &tile.w[lane.outputs + 16 * m + i % 16][run * 8 + i / 16 * 4]);
}
template <class T> DEVICE void fragments_of_x(const T& tile, const Lane& lane, int buffer, int run, int two, unsigned (&b)[4]) {
  int i = threadIdx.x % 32;
  load_matrices(b, &tile.x[buffer][lane.rows + 16 * two + i / 16 * 8 + i % 8][run * 8 + i / 8 % 2 * 4]);
}

/// What is needed from time to time only, and would take registers: the rows, their activations, null for none, and what the results need.
struct Rest {
  Rows rows;
  const signed char* q[ROWS];
  float* out;
  long long out_stride;
  const float* values;
  int first, n;
};

DEVICE void keep(Rest& rest, const signed char* q, int k, float* out, long long out_stride, int first, int n, const float* values) {
  int tid = threadIdx.x;
  if (tid < ROWS) rest.q[tid] = rest.rows.from[tid] < 0 ? nullptr : q + size_t(rest.rows.from[tid]) * k;
  if (tid == 0) rest.out = out, rest.out_stride = out_stride, rest.values = values, rest.first = first, rest.n = n;
  __syncthreads();
}

/// Begins to bring activations `at` … of a step.
DEVICE void bring_rows(uint32_t (&x)[ROWS][STRIDE], const Rest& rest, int tid, int k, int at) {
  int piece = tid % 8;
  at += piece * 16;
  if (at >= k) return;
  Place to = place_in_shared(&x[tid / 8][piece * 4]);
  const signed char* const* from = &rest.q[tid / 8];
#pragma unroll
  for (int i = 0; i < ROWS * 8 / THREADS; i++) {
    const signed char* row = from[i * (THREADS / 8)];
    if (row) copy_ahead<16>(to + i * (THREADS / 8) * STRIDE * 4, row + at);
  }
}

/// Begins to bring `bytes` of each output, `each` apart, from byte `at` on. Nothing outside of the matrix is read but what is in a piece with its first one.
template <int BYTES> DEVICE void bring_weights(Raw<BYTES>& raw, const Weights& w, int tid, size_t each, size_t at, int bytes) {
  int o = tid / 8, piece = tid % 8 * PIECE;
  if (w.whole) {
    const uint8_t* from = w.at + o * each + at;
    Place to = place_in_shared(&raw.words[o][piece / 4]);
#pragma unroll
    for (int i = 0; i < OUTPUTS * 8 / THREADS; i++, o += THREADS / 8, from += THREADS / 8 * each) {
      if (o >= w.outputs) return;
      int skip = int(reinterpret_cast<size_t>(from) % PIECE), left = skip + bytes - piece;
      const uint8_t* start = from - skip + piece;
      if (o + 1 < w.outputs) {
        // After a row there is another one.
#pragma unroll
        for (int p = 0; p < Raw<BYTES>::PIECES; p += 8)
          if (left > p * PIECE) copy_ahead<PIECE>(to + (i * (THREADS / 8) * Raw<BYTES>::WORDS * 4 + p * PIECE), start + p * PIECE);
      } else {
#pragma unroll 1
        for (int p = 0; p * PIECE < left; p += 8)
          copy_ahead<PIECE>(to + (i * (THREADS / 8) * Raw<BYTES>::WORDS * 4 + p * PIECE), start + p * PIECE, min(left - p * PIECE, PIECE));
      }
    }
  } else {
#pragma unroll 1
    for (o = tid; o < min(w.outputs, OUTPUTS); o += THREADS) {
      const uint8_t* from = w.at + o * each + at;
      uint8_t* to = reinterpret_cast<uint8_t*>(raw.words[o]) + reinterpret_cast<size_t>(from) % PIECE;
#pragma unroll 1
      for (int i = 0; i < bytes; i++) to[i] = from[i];
    }
  }
}

/// An output's bytes from byte `at` of those that were brought, which begin at `from`, as far as it counts.
template <int BYTES> DEVICE Shifted brought(const Raw<BYTES>& raw, int o, unsigned from, int at) {
  unsigned byte = from % PIECE + at;
  return {&raw.words[o][byte / 4], byte % 4 * 8};
}
/// The lower bits of the address of an output's byte.
DEVICE unsigned place_of(const Weights& w, int o, size_t each, size_t at) { return unsigned(reinterpret_cast<size_t>(w.at)) + unsigned(o) * unsigned(each) + unsigned(at); }

template <int WORDS> DEVICE void put(uint32_t* to, const uint32_t (&words)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; i += 4) *reinterpret_cast<uint4*>(to + i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

/// Four numbers of a lane's outputs of a warp.
DEVICE void of_outputs(const float* from, const Lane& lane, float (&to)[4]) {
  float4 v = *reinterpret_cast<const float4*>(from + lane.outputs + threadIdx.x % 32 / 4 * 4);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
DEVICE void of_outputs(const int* from, const Lane& lane, int (&to)[4]) {
  int4 v = *reinterpret_cast<const int4*>(from + lane.outputs + threadIdx.x % 32 / 4 * 4);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
/// Two of a lane's rows of an eight.
DEVICE void of_rows(const float* from, const Lane& lane, int eight, float (&to)[2]) {
  float2 v = *reinterpret_cast<const float2*>(from + lane.rows + eight * 8 + threadIdx.x % 4 * 2);
  to[0] = v.x, to[1] = v.y;
}

/// Sums: of sixteen `m` and eight `j`, as an instruction has them.
typedef float Sums[2][4][4];

DEVICE void store(const Sums& acc, const Lane& lane, const Rest& rest, const Scales& scales) {
  float* out = rest.out;
  long long out_stride = rest.out_stride;
  const float* values = rest.values;
  int first = rest.first, n = rest.n;
  int output = first + lane.outputs + int(threadIdx.x) % 32 / 4 * 4;
  bool wide = lane.end - lane.begin == 2 && output + 4 <= n && reinterpret_cast<size_t>(out) % 16 == 0 && out_stride % 4 == 0;
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = rest.rows.to[lane.rows + j * 8 + threadIdx.x % 4 * 2 + i];
      if (row < 0) continue;
      float* to = out + row * out_stride + output;
      float v[4];
#pragma unroll
      for (int c = 0; c < 4; c++) v[c] = output + c < n ? plain(with_scale(acc[c / 2][j][c % 2 * 2 + i], scales, values, output + c)) : 0.0f;
      if (wide) {
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (output + c < n && c / 2 >= lane.begin && c / 2 < lane.end) to[c] = v[c];
      }
    }
}

/// Whether float(s) · da is the same as fmaf(MAGIC + s, da, −MAGIC · da) for all s. da has 11 bits, so MAGIC · da is exact, and so is the sum but for one rounding; an infinite one
/// makes NaN. Of zeros the sign may differ, which counts only where a sum can be −0, as scales of MXFP4 are so small that products vanish.
template <class F> DEVICE bool is_usual(float da) { return da < INFINITY_F; }
template <> __device__ __forceinline__ bool is_usual<MXFP4>(float da) { return da > 0.0f && da < INFINITY_F; }

/// A run of 32 of a step, of one scale or of two. `WHOLE`: the warp has all of its outputs and rows, and all da of the step are usual.
template <class F, bool WHOLE, class T> DEVICE void run_of_32(const T& tile, const Lane& lane, int buffer, int run, Sums& acc) {
  constexpr int PARTS = 32 / (F::LEN < 32 ? 16 : 32);
  unsigned a[2][4];
  float d[PARTS][4], low[4];
  fragments_of_w(tile, lane, run, a);
#pragma unroll
  for (int p = 0; p < PARTS; p++) of_outputs(tile.d[run * PARTS + p], lane, d[p]);
  if (F::MINIMUM) of_outputs(tile.m[F::MINIMUM ? run : 0], lane, low);
#pragma unroll
  for (int two = 0; two < 2; two++) {
    if (!WHOLE && 2 * two >= lane.eights) break;
    unsigned b[4];
    fragments_of_x(tile, lane, buffer, run, two, b);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int j = 2 * two + half;
      float da[2], sums[2], less[2];
      of_rows(tile.da[buffer][run], lane, j, da);
#pragma unroll
      for (int i = 0; i < 2; i++) less[i] = -MAGIC * da[i];
      if (F::MINIMUM) {
        const int* from = &tile.sums[buffer][F::MINIMUM ? run : 0][lane.rows + j * 8 + threadIdx.x % 4 * 2];
#pragma unroll
        for (int i = 0; i < 2; i++) sums[i] = small(from[i] + MAGIC_BITS) * da[i];
      }
#pragma unroll
      for (int m = 0; m < 2; m++) {
        if (!WHOLE && (m < lane.begin || m >= lane.end)) continue;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          int s[4];
          if (PARTS == 1) mma_s8_from(s, MAGIC_BITS, a[m], {b[2 * half], b[2 * half + 1]});
          else mma_s8_half_from(s, MAGIC_BITS, a[m][2 * p], a[m][2 * p + 1], b[2 * half + p]);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float v = WHOLE ? fmaf(__int_as_float(s[i]), da[i % 2], less[i % 2]) : small(s[i]) * da[i % 2];
            acc[m][j][i] = fmaf(v, d[p][2 * m + i / 2], acc[m][j][i]);
          }
        }
        if (F::MINIMUM) {
#pragma unroll
          for (int i = 0; i < 4; i++) acc[m][j][i] = fmaf(sums[i % 2], low[2 * m + i / 2], acc[m][j][i]);
        }
      }
    }
  }
}

/// Scale and words of a run of 32 of a step.
template <class F, class T> DEVICE void unpack_32(T& tile, const Shifted& from, int slot, int o, int run) {
  uint32_t words[8];
  float d, m;
  F::unpack(from, words, d, m);
  put(&tile.w[slot][run * 8], words);
  tile.d[run][o] = d;
  if (F::MINIMUM) tile.m[F::MINIMUM ? run : 0][o] = m;
}
/// Of a run of 16 that is in a block of 64.
template <class F, class T> DEVICE void unpack_16(T& tile, const Shifted& from, int slot, int o, int run) {
  uint32_t words[4];
  float d;
  F::unpack(from, run % 4, words, d);
  put(&tile.w[slot][run * 4], words);
  tile.d[run][o] = d;
}

/// Of blocks of 32, or of 64 in runs of 16.
template <class F> DEVICE void tile_of_32(const Weights& w, const float* da, const int* sums, int k, const Rest& rest, const Scales& scales) {
  constexpr bool SIXTEEN = F::LEN < 32;
  constexpr int RUNS = SIXTEEN ? 8 : 4, BYTES = RUNS * F::BYTES;
  __shared__ Tile<BYTES, RUNS, F::MINIMUM ? 4 : 1> tile;
  int runs = k / 32, steps = (runs + 3) / 4;
  size_t each = size_t(k / F::LEN) * F::BYTES;
  bool whole = rest.rows.to[ROWS - 8] >= 0;
  Sums acc = {};
  auto bring = [&](int step) {
    int tid = anew(threadIdx.x);
    int buffer = step % 2;
    bring_rows(tile.x[buffer], rest, tid, k, step * STAGE);
    bring_weights(tile.raw, w, tid, each, size_t(step) * BYTES, min(4, runs - step * 4) * (BYTES / 4));
    Place to = place_in_shared(&tile.da[buffer][tid % 4][tid / 4]), to_sums = place_in_shared(&tile.sums[buffer][F::MINIMUM ? tid % 4 : 0][tid / 4]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int r = tid / 4 + i * (THREADS / 4), run = tid % 4, row = rest.rows.from[r];
      if (row < 0 || step * 4 + run >= runs) continue;
      size_t at = size_t(row) * runs + step * 4 + run;
      copy_ahead<4>(to + i * (THREADS / 4) * 4, da + at);
      if (F::MINIMUM) copy_ahead<4>(to_sums + i * (THREADS / 4) * 4, sums + at);
    }
  };
  // The first time only begins.
#pragma unroll 1
  for (int step = -1; step < steps; step++) {
    int count = step < 0 ? 0 : min(4, runs - step * 4), tid = anew(threadIdx.x), run = tid / 32;
    copied();
    __syncthreads();
    bool usual = true;
    if (run < count) {
      float2 two = *reinterpret_cast<const float2*>(&tile.da[step % 2][run][tid % 32 * 2]);
      // Of rows that there are not, nobody has written any.
      const int* two_from = rest.rows.from + tid % 32 * 2;
      usual = (two_from[0] < 0 || is_usual<F>(two.x)) && (two_from[1] < 0 || is_usual<F>(two.y));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int slot = tid % 32 + 32 * i, o = output_of(slot);
        unsigned from = place_of(w, o, each, size_t(step) * BYTES);
        if constexpr (SIXTEEN) {
#pragma unroll
          for (int p = 0; p < 2; p++) unpack_16<F>(tile, brought(tile.raw, o, from, run / 2 * 4 * F::BYTES), slot, o, run * 2 + p);
        } else {
          unpack_32<F>(tile, brought(tile.raw, o, from, run * F::BYTES), slot, o, run);
        }
      }
    }
    usual = !__syncthreads_or(!usual);
    if (step + 1 < steps) bring(step + 1);
    if (whole && usual) {
#pragma unroll 1
      for (int b = 0; b < count; b++) run_of_32<F, true>(tile, Lane::whole(), step % 2, b, acc);
    } else {
      Lane lane = Lane::mine(rest.rows);
#pragma unroll 1
      for (int b = 0; b < count; b++) run_of_32<F, false>(tile, lane, step % 2, b, acc);
    }
  }
  store(acc, Lane::mine(rest.rows), rest, scales);
}

/// Of blocks of 256: sums of runs in integers, and those of the minima.
template <class F> struct __align__(16) Tile256 {
  static constexpr int SCALES = F::MINIMUM ? 4 : 8;
  uint32_t x[2][ROWS][STRIDE], w[OUTPUTS][STRIDE];
  Raw<F::BYTES> raw;
  int scales[SCALES][OUTPUTS];
  float d[OUTPUTS], m[OUTPUTS], da[2][ROWS];
  // Of eight runs minima in slots, sums as they come, and these cut into two bytes.
  uint32_t minima[F::MINIMUM ? OUTPUTS : 1][2], low[F::MINIMUM ? ROWS : 1][2], high[F::MINIMUM ? ROWS : 1][2];
  int sums[F::MINIMUM ? ROWS : 1][8];
};

/// Scales, and minima, of a run of 32.
template <bool FIVE> DEVICE void unpack_scales(Tile256<Mixed<FIVE>>& tile, const Shifted& from, int slot, int o, int half, int run) {
  typedef Mixed<FIVE> F;
  int scale, min;
  F::scale_min(from, half * 4 + run, scale, min);
  tile.scales[run][o] = scale;
  reinterpret_cast<uint8_t*>(tile.minima[slot])[half * 4 + run] = uint8_t(min);
  if (run == 0) tile.d[o] = F::d(from), tile.m[o] = F::dmin(from);
}
DEVICE void unpack_scales(Tile256<Q6_K>& tile, const Shifted& from, int, int o, int half, int run) {
  for (int i = 0; i < 2; i++) tile.scales[2 * run + i][o] = Q6_K::scale(from, half * 8 + 2 * run + i);
  if (run == 0) tile.d[o] = Q6_K::d(from);
}

/// Cuts sums of 32 into 128 times a byte and a byte.
template <class F> DEVICE void cut_sums(Tile256<F>& tile) {
  int r = threadIdx.x / 2, word = threadIdx.x % 2;
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int sum = tile.sums[r][word * 4 + i], rest = ((sum + 64) & 127) - 64;
    low |= (uint32_t(rest) & 255u) << 8 * i;
    high |= (uint32_t((sum - rest) >> 7) & 255u) << 8 * i;
  }
  tile.low[r][word] = low, tile.high[r][word] = high;
}

template <class F, bool WHOLE> DEVICE void run_of_256(const Tile256<F>& tile, const Lane& lane, int buffer, int run, int (&inner)[2][4][4]) {
  constexpr int PARTS = F::MINIMUM ? 1 : 2;
  unsigned a[2][4];
  int scales[PARTS][4];
  fragments_of_w(tile, lane, run, a);
#pragma unroll
  for (int p = 0; p < PARTS; p++) of_outputs(tile.scales[run * PARTS + p], lane, scales[p]);
#pragma unroll
  for (int two = 0; two < 2; two++) {
    if (!WHOLE && 2 * two >= lane.eights) break;
    unsigned b[4];
    fragments_of_x(tile, lane, buffer, run, two, b);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        if (!WHOLE && (m < lane.begin || m >= lane.end)) continue;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          int s[4];
          if (PARTS == 1) mma_s8_from(s, 0, a[m], {b[2 * half], b[2 * half + 1]});
          else mma_s8_half_from(s, 0, a[m][2 * p], a[m][2 * p + 1], b[2 * half + p]);
#pragma unroll
          for (int i = 0; i < 4; i++) inner[m][2 * two + half][i] += scales[p][2 * m + i / 2] * s[i];
        }
      }
  }
}

/// The end of a block of 256: its sums are added, and begin anew.
template <class F> DEVICE void end_of_256(const Tile256<F>& tile, const Lane& lane, int buffer, int (&inner)[2][4][4], Sums& acc) {
  int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
  float d[4], dmin[4];
  of_outputs(tile.d, lane, d);
  if (F::MINIMUM) of_outputs(tile.m, lane, dmin);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    if (m < lane.begin || m >= lane.end) continue;
    unsigned minima[2];
    // Of the sixteen products of an instruction eight are meant.
#pragma unroll
    for (int h = 0; h < 2; h++) minima[h] = F::MINIMUM && t < 2 ? tile.minima[F::MINIMUM ? lane.outputs + 16 * m + 8 * h + g : 0][t % 2] : 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j >= lane.eights) {
        // Pairs of eights are multiplied, of which one may be none.
#pragma unroll
        for (int i = 0; i < 4; i++) inner[m][j][i] = 0;
        continue;
      }
      float da[2];
      of_rows(tile.da[buffer], lane, j, da);
      int low[4] = {};
      if (F::MINIMUM) {
        int r = F::MINIMUM ? lane.rows + 8 * j + g : 0;
        mma_s8_half(low, minima[0], minima[1], tile.high[r][t % 2]);
        // Below 2^22, too.
#pragma unroll
        for (int i = 0; i < 4; i++) low[i] = low[i] * 128 + MAGIC_BITS;
        mma_s8_half(low, minima[0], minima[1], tile.low[r][t % 2]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float all = float(inner[m][j][i]);
        float v = F::MINIMUM ? fmaf(all, d[2 * m + i / 2], -(small(low[i]) * dmin[2 * m + i / 2])) : all * d[2 * m + i / 2];
        acc[m][j][i] = fmaf(v, da[i % 2], acc[m][j][i]);
        inner[m][j][i] = 0;
      }
    }
  }
}

template <class F> DEVICE void tile_of_256(const Weights& w, const float* da, const int* sums, int k, const Rest& rest, const Scales& scales) {
  __shared__ Tile256<F> tile;
  int blocks = k / 256, steps = 2 * blocks;
  size_t each = size_t(blocks) * F::BYTES;
  bool whole = rest.rows.to[ROWS - 8] >= 0;
  Sums acc = {};
  int inner[2][4][4] = {};
  auto bring = [&](int step) {
    int tid = anew(threadIdx.x);
    bring_rows(tile.x[step % 2], rest, tid, k, step * STAGE);
    if (step % 2) return;
    int block = step / 2;
    bring_weights(tile.raw, w, tid, each, size_t(block) * F::BYTES, F::BYTES);
    if (tid < ROWS && rest.rows.from[tid] >= 0) copy_ahead<4>(place_in_shared(&tile.da[block % 2][tid]), da + size_t(rest.rows.from[tid]) * blocks + block);
    if (F::MINIMUM) {
      Place to = place_in_shared(&tile.sums[F::MINIMUM ? tid / 8 : 0][tid % 8]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int r = tid / 8 + i * (THREADS / 8), row = rest.rows.from[r];
        if (row >= 0) copy_ahead<4>(to + i * (THREADS / 8) * 32, sums + (size_t(row) * blocks + block) * 8 + tid % 8);
      }
    }
  };
  // The first time only begins.
#pragma unroll 1
  for (int step = -1; step < steps; step++) {
    int block = step / 2, half = step & 1, tid = anew(threadIdx.x), run = tid / 32;
    copied();
    __syncthreads();
    if (step >= 0)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int slot = tid % 32 + 32 * i, o = output_of(slot);
      Shifted from = brought(tile.raw, o, place_of(w, o, each, size_t(block) * F::BYTES), 0);
      uint32_t words[8];
#pragma unroll
      for (int g = 0; g < 8; g++) words[g] = F::word(from, half * 4 + run, g);
      put(&tile.w[slot][run * 8], words);
      unpack_scales(tile, from, slot, o, half, run);
    }
    if constexpr (F::MINIMUM) {
      if (half == 0 && step >= 0) cut_sums(tile);
    }
    __syncthreads();
    if (step + 1 < steps) bring(step + 1);
    if (step < 0) continue;
    if (whole) {
#pragma unroll 1
      for (int b = 0; b < 4; b++) run_of_256<F, true>(tile, Lane::whole(), half, b, inner);
    } else {
      Lane lane = Lane::mine(rest.rows);
#pragma unroll 1
      for (int b = 0; b < 4; b++) run_of_256<F, false>(tile, lane, half, b, inner);
    }
    if (half == 1) end_of_256(tile, Lane::mine(rest.rows), block % 2, inner, acc);
  }
  store(acc, Lane::mine(rest.rows), rest, scales);
}

#define KERNEL_OF(name, type, tiles, blocks)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out,          \
                                                         long long out_stride, int n, int k, int rows, Further further, const int* ids,                \
                                                         const int* order, int experts, int used, int per_token, word64* bad, Scales scales) {         \
    __shared__ Rest rest;                                                                                                                              \
    Turned turned = ids ? Turned{int(blockIdx.x), int(blockIdx.y)} : Turned::of(blockIdx.x);                                                                      \
    int number, first = matrix_at(turned.across, further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;                                                                           \
    bool pieces = reinterpret_cast<size_t>(w) % PIECE == 0;                                                                  \
    if (!rows_of_block(rest.rows.from, rest.rows.to, rows, ids, order, used, per_token, turned.down)) return;                                                                  \
    /* Of an expert that there is none of, the products are those of no numbers. */                                                                     \
    bool wrong = !to_expert(w, size_t(n) * (k / type::LEN) * type::BYTES, ids, rest.rows.to[0], experts, bad);                                               \
    const float* values = wrong ? nullptr : scales.of(number);                                                                \
    if (values) to_expert(values, size_t(scales.each), ids, rest.rows.to[0], experts, bad);                                                                  \
    Weights weights = {w + size_t(first) * (k / type::LEN) * type::BYTES, n - first, pieces};                                   \
    keep(rest, q, k, out, out_stride, first, n, values);                                                                                                   \
    tiles<type>(weights, da, sums, wrong ? 0 : k, rest, scales);                                                     \
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// With three of them it lacks a few registers there.
#define BLOCKS_OF_Q6_K 2
#else
#define BLOCKS_OF_Q6_K 3
#endif
KERNEL_OF(mul_tile_q8_0, Q8_0, tile_of_32, 4)
KERNEL_OF(mul_tile_q4_0, Q4_0, tile_of_32, 4)
KERNEL_OF(mul_tile_q4_1, Q4_1, tile_of_32, 4)
KERNEL_OF(mul_tile_q5_0, Q5_0, tile_of_32, 4)
KERNEL_OF(mul_tile_q5_1, Q5_1, tile_of_32, 4)
KERNEL_OF(mul_tile_mxfp4, MXFP4, tile_of_32, 4)
KERNEL_OF(mul_tile_q4_k, Q4_K, tile_of_256, 3)
KERNEL_OF(mul_tile_q5_k, Q5_K, tile_of_256, 3)
KERNEL_OF(mul_tile_q6_k, Q6_K, tile_of_256, BLOCKS_OF_Q6_K)
KERNEL_OF(mul_tile_nvfp4, NVFP4, tile_of_32, 3)
