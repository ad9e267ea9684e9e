// Products of many rows with weights of block types, by tensor cores on integers: mul_mat and mul_mat_id in prefill.
//
// Order of summation: that of kernels/src/cpu/matmul.rs and of block_vec.cu, with the same bits: the tensor cores sum the products within a block, which are
// integers, and each output is one chain over the blocks in ascending order.
//
// mul_tile_TYPE(w, q, da, sums, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales): as mul_vec_TYPE_ROWS in block_vec.cu, with ids only in an
// order of groups of 64.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉ of all matrices, gridDim.y = ⌈rows / 64⌉, or groups.
#include "chosen.cuh"
#include "formats.cuh"
#include "ptx.cuh"
#include "scales.cuh"

constexpr int OUTPUTS = 64, ROWS = 64, THREADS = 128, STAGE = 128;
typedef RowsOf<ROWS> Rows;
/// Words from row to row in shared memory: the eight rows and four words that a fragment is read from lie in different banks.
constexpr int STRIDE = STAGE / 4 + 4;

/// The scales of outputs, null for none.
struct OfOutputs {
  const Scales& scales;
  const float* values;
};

/// 128 numbers of each output and row. Blocks of 32 and runs of 16 have a scale each; blocks of 256 come in two halves, of four runs of 32 or eight of 16.
template <int SCALES> struct Tile {
  uint32_t w[OUTPUTS][STRIDE], x[ROWS][STRIDE];
  float d[OUTPUTS][SCALES], m[OUTPUTS][4], da[ROWS][4];
  int sums[ROWS][4];
  int scales[OUTPUTS][8];
  int minima[OUTPUTS][4];
};

/// A warp has 16 outputs (g and g + 8 of a lane) of all 64 rows: eight tiles of eight rows, of which a lane has rows 2t and 2t + 1.
struct Lane {
  int output, row;
  DEVICE Lane mine() {
    int lane = threadIdx.x % 32;
    return {int(threadIdx.x) / 32 * 16 + lane / 4, lane % 4 * 2};
  }
};

template <int SCALES> DEVICE void load_rows(Tile<SCALES>& tile, const signed char* q, const Rows& rows, int k, int at) {
  for (int e = threadIdx.x; e < ROWS * (STAGE / 16); e += THREADS) {
    int r = e / (STAGE / 16), i = e % (STAGE / 16) * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (rows.from[r] >= 0 && at + i < k) v = *reinterpret_cast<const uint4*>(q + size_t(rows.from[r]) * k + at + i);
    uint32_t* to = &tile.x[r][i / 4];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

/// The integer products of run `run` of 32 with eight rows.
template <int SCALES> DEVICE void dot(const Tile<SCALES>& tile, const Lane& lane, int run, int eight, int (&s)[4]) {
  int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4, base = run * 8 + t;
  const unsigned a[4] = {tile.w[lane.output][base], tile.w[lane.output + 8][base], tile.w[lane.output][base + 4], tile.w[lane.output + 8][base + 4]};
  const unsigned b[2] = {tile.x[eight * 8 + g][base], tile.x[eight * 8 + g][base + 4]};
  mma_s8(s, a, b);
}

/// The same of run `run` of 16.
template <int SCALES> DEVICE void dot_half(const Tile<SCALES>& tile, const Lane& lane, int run, int eight, int (&s)[4]) {
  int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4, base = run * 4 + t;
  mma_s8_half(s, tile.w[lane.output][base], tile.w[lane.output + 8][base], tile.x[eight * 8 + g][base]);
}

DEVICE void store(const float (&acc)[8][4], const Lane& lane, float* out, long long out_stride, int first, int n, const Rows& rows, const OfOutputs& by) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int output = first + lane.output + i / 2 * 8, row = rows.to[j * 8 + lane.row + i % 2];
      if (output < n && row >= 0) out[row * out_stride + output] = plain(with_scale(acc[j][i], by.scales, by.values, output));
    }
}

template <class F> DEVICE void tile_of_32(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out, long long out_stride, int first, int n, int k, const Rows& rows, const OfOutputs& by) {
  __shared__ Tile<4> tile;
  int blocks = k / 32, eights = rows.eights(0, 8);
  Lane lane = Lane::mine();
  float acc[8][4] = {};
#pragma unroll 1
  for (int start = 0; start < blocks; start += 4) {
    load_rows(tile, q, rows, k, start * 32);
    for (int e = threadIdx.x; e < OUTPUTS * 4; e += THREADS) {
      int o = e / 4, b = e % 4;
      bool some = start + b < blocks;
      uint32_t words[8] = {};
      float d = 0.0f, m = 0.0f;
      if (some && first + o < n) F::unpack(AnyPlace<F::BYTES>{w + (size_t(first + o) * blocks + start + b) * F::BYTES}, words, d, m);
#pragma unroll
      for (int i = 0; i < 8; i++) tile.w[o][b * 8 + i] = words[i];
      tile.d[o][b] = d, tile.m[o][b] = m;
      some = some && rows.from[o] >= 0;
      size_t at = some ? size_t(rows.from[o]) * blocks + start + b : 0;
      tile.da[o][b] = some ? da[at] : 0.0f;
      tile.sums[o][b] = F::MINIMUM && some ? sums[at] : 0;
    }
    __syncthreads();
    int count = min(4, blocks - start);
#pragma unroll 1
    for (int b = 0; b < count; b++) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (j >= eights) break;
        int s[4] = {};
        dot(tile, lane, b, j, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
          acc[j][i] = fmaf(float(s[i]) * tile.da[r][b], tile.d[o][b], acc[j][i]);
          if (F::MINIMUM) acc[j][i] = fmaf(float(tile.sums[r][b]) * tile.da[r][b], tile.m[o][b], acc[j][i]);
        }
      }
    }
    __syncthreads();
  }
  store(acc, lane, out, out_stride, first, n, rows, by);
}

/// Runs of 16, of blocks of 64.
template <class F> DEVICE void tile_of_16(const uint8_t* w, const signed char* q, const float* da, const int*, float* out, long long out_stride, int first, int n, int k, const Rows& rows, const OfOutputs& by) {
  constexpr int RUNS = STAGE / 16;
  __shared__ Tile<RUNS> tile;
  int runs = k / 16, eights = rows.eights(0, 8);
  Lane lane = Lane::mine();
  float acc[8][4] = {};
#pragma unroll 1
  for (int start = 0; start < runs; start += RUNS) {
    load_rows(tile, q, rows, k, start * 16);
    for (int e = threadIdx.x; e < OUTPUTS * RUNS; e += THREADS) {
      int o = e / RUNS, b = e % RUNS, run = start + b;
      uint32_t words[4] = {};
      float d = 0.0f;
      if (run < runs && first + o < n) F::unpack(AnyPlace<4 * F::BYTES>{w + (size_t(first + o) * (runs / 4) + run / 4) * 4 * F::BYTES}, run % 4, words, d);
#pragma unroll
      for (int i = 0; i < 4; i++) tile.w[o][b * 4 + i] = words[i];
      tile.d[o][b] = d;
      if (b < 4) tile.da[o][b] = start + 2 * b < runs && rows.from[o] >= 0 ? da[size_t(rows.from[o]) * (runs / 2) + start / 2 + b] : 0.0f;
    }
    __syncthreads();
    int count = min(RUNS, runs - start);
#pragma unroll 1
    for (int b = 0; b < count; b++) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (j >= eights) break;
        int s[4] = {};
        dot_half(tile, lane, b, j, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
          acc[j][i] = fmaf(float(s[i]) * tile.da[r][b / 2], tile.d[o][b], acc[j][i]);
        }
      }
    }
    __syncthreads();
  }
  store(acc, lane, out, out_stride, first, n, rows, by);
}

/// Scales, minima and words of four runs of a block of 256.
template <bool FIVE> DEVICE void unpack_half(Mixed<FIVE>, Tile<4>& tile, const AnyPlace<Mixed<FIVE>::BYTES>& from, int o, int half, int run) {
  typedef Mixed<FIVE> F;
  int scale, min;
  F::scale_min(from, half * 4 + run, scale, min);
  tile.scales[o][run] = scale, tile.minima[o][run] = min;
  tile.d[o][0] = F::d(from), tile.m[o][0] = F::dmin(from);
}
DEVICE void unpack_half(Q6_K, Tile<4>& tile, const AnyPlace<Q6_K::BYTES>& from, int o, int half, int run) {
  for (int i = 0; i < 2; i++) tile.scales[o][2 * run + i] = Q6_K::scale(from, half * 8 + 2 * run + i);
  tile.d[o][0] = Q6_K::d(from);
}

template <class F> DEVICE void tile_of_256(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out, long long out_stride, int first, int n, int k, const Rows& rows, const OfOutputs& by) {
  __shared__ Tile<4> tile;
  int blocks = k / 256, eights = rows.eights(0, 8);
  Lane lane = Lane::mine();
  float acc[8][4] = {};
  int inner[8][4], low[8][4];
#pragma unroll 1
  for (int step = 0; step < 2 * blocks; step++) {
    int block = step / 2, half = step % 2;
    load_rows(tile, q, rows, k, step * STAGE);
    for (int e = threadIdx.x; e < OUTPUTS * 4; e += THREADS) {
      int o = e / 4, run = e % 4;
      if (first + o < n) {
        AnyPlace<F::BYTES> from{w + (size_t(first + o) * blocks + block) * F::BYTES};
        for (int i = 0; i < 8; i++) tile.w[o][run * 8 + i] = F::word(from, half * 4 + run, i);
        unpack_half(F(), tile, from, o, half, run);
      }
      int row = rows.from[o];
      tile.sums[o][run] = row >= 0 ? sums[size_t(row) * (k / 32) + step * 4 + run] : 0;
      if (run == 0) tile.da[o][0] = row >= 0 ? da[size_t(row) * blocks + block] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (j >= eights) break;
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) inner[j][i] = 0, low[j][i] = 0;
      }
#pragma unroll 1
      for (int run = 0; run < 4; run++) {
        if (F::MINIMUM) {
          int s[4] = {};
          dot(tile, lane, run, j, s);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
            inner[j][i] += tile.scales[o][run] * s[i];
            low[j][i] += tile.minima[o][run] * tile.sums[r][run];
          }
        } else {
#pragma unroll
          for (int sixteen = 0; sixteen < 2; sixteen++) {
            int s[4] = {};
            dot_half(tile, lane, 2 * run + sixteen, j, s);
#pragma unroll
            for (int i = 0; i < 4; i++) inner[j][i] += tile.scales[lane.output + i / 2 * 8][2 * run + sixteen] * s[i];
          }
        }
      }
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
          float v = F::MINIMUM ? fmaf(float(inner[j][i]), tile.d[o][0], -(float(low[j][i]) * tile.m[o][0])) : float(inner[j][i]) * tile.d[o][0];
          acc[j][i] = fmaf(v, tile.da[r][0], acc[j][i]);
        }
      }
    }
    __syncthreads();
  }
  store(acc, lane, out, out_stride, first, n, rows, by);
}

#define KERNEL_OF(name, type, tiles, blocks)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out,          \
                                                         long long out_stride, int n, int k, int rows, Further further, const int* ids,                \
                                                         const int* order, int experts, int used, int per_token, word64* bad, Scales scales) {         \
    __shared__ Rows here;                                                                                                                              \
    int number, first = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;                                                                           \
    if (!rows_of_block(here.from, here.to, rows, ids, order, used, per_token)) return;                                                                  \
    /* Of an expert that there is none of, the products are those of no numbers. */                                                                     \
    bool wrong = !to_expert(w, size_t(n) * (k / type::LEN) * type::BYTES, ids, here.to[0], experts, bad);                                               \
    const float* values = wrong ? nullptr : scales.of(number);                                                                \
    if (values) to_expert(values, size_t(scales.each), ids, here.to[0], experts, bad);                                                                  \
    tiles<type>(w, q, da, sums, out, out_stride, first, n, wrong ? 0 : k, here, {scales, values});                                                     \
  }
KERNEL_OF(mul_tile_q8_0, Q8_0, tile_of_32, 6)
KERNEL_OF(mul_tile_q4_0, Q4_0, tile_of_32, 6)
KERNEL_OF(mul_tile_q4_1, Q4_1, tile_of_32, 6)
KERNEL_OF(mul_tile_q5_0, Q5_0, tile_of_32, 6)
KERNEL_OF(mul_tile_q5_1, Q5_1, tile_of_32, 6)
KERNEL_OF(mul_tile_mxfp4, MXFP4, tile_of_32, 6)
KERNEL_OF(mul_tile_q4_k, Q4_K, tile_of_256, 3)
KERNEL_OF(mul_tile_q5_k, Q5_K, tile_of_256, 3)
KERNEL_OF(mul_tile_q6_k, Q6_K, tile_of_256, 4)
KERNEL_OF(mul_tile_nvfp4, NVFP4, tile_of_16, 6)
