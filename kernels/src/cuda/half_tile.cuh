// Products of many rows with weights of few bits: what half_tile.cu and float8_tile.cu have in common.
//
// Order of summation: halves.cuh. A block of 128 threads has 64 outputs of 64 rows.
#pragma once
#include "chosen.cuh"
#include "halves.cuh"

constexpr int OUTPUTS = 64, ROWS = 64, THREADS = 128;
typedef RowsOf<ROWS> Rows;
/// Lanes' words of a row of a chunk.
constexpr int QUAD = CHUNK / 8;

/// A chunk of each output and row, cut into parts. What the lanes of a warp read at once lies together.
template <class W> struct Tile {
  uint4 w[W::PARTS][OUTPUTS][QUAD], x[PARTS_OF_X][ROWS][QUAD];
};

/// Times that a thread brings eight weights and eight activations of a chunk.
constexpr int EACH = OUTPUTS * QUAD / THREADS;
static_assert(OUTPUTS == ROWS, "as many outputs as rows");

/// What a thread brings of a chunk, between memory and the tile.
template <class W> struct Brought {
  typename W::Eight w[EACH];
  float x[EACH][8];
};

/// `from` are the activations of its rows, −1 for none.
template <class W, bool WIDE>
DEVICE void bring(Brought<W>& brought, const typename W::Stored* w, const float* x, long long x_stride, int n, int k, int first, const int (&from)[EACH], int chunk) {
  int tid = threadIdx.x, at = chunk * CHUNK + tid % QUAD * 8;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int place = tid / QUAD + i * (THREADS / QUAD), output = min(first + place, n - 1);
    brought.w[i] = eight_weights<WIDE>(w + size_t(output) * k, at, k);
    eight_numbers<WIDE>(from[i] >= 0 ? x + from[i] * x_stride : nullptr, at, k, brought.x[i]);
  }
}

DEVICE uint4 words(const uint32_t (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }
DEVICE void words(const uint4& from, uint32_t (&w)[4]) { w[0] = from.x, w[1] = from.y, w[2] = from.z, w[3] = from.w; }

template <class W> DEVICE void put(Tile<W>& tile, Brought<W>& brought, float scale) {
  int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int place = tid / QUAD + i * (THREADS / QUAD), quarter = tid % QUAD;
    uint32_t of_w[W::PARTS][4], of_x[PARTS_OF_X][4];
    W::cut(brought.w[i], of_w);
    take_on<W>(brought.x[i], scale);
    cut(brought.x[i], of_x);
#pragma unroll
    for (int p = 0; p < W::PARTS; p++) tile.w[p][place][quarter] = words(of_w[p]);
#pragma unroll
    for (int p = 0; p < PARTS_OF_X; p++) tile.x[p][place][quarter] = words(of_x[p]);
  }
}

template <class W, bool WIDE>
DEVICE void product(Tile<W>& tile, int first, const typename W::Stored* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, const Rows& rows,
                    const Scales& scales = {}, const float* values = nullptr) {
  // A warp has 32 outputs of 32 rows: two times sixteen of four eights.
  int tid = threadIdx.x, g = tid % 32 / 4, t = tid % 4, of_w = tid / 32 % 2 * 32, of_x = tid / 64 * 32;
  int chunks = (k + CHUNK - 1) / CHUNK, each = chunks_of_range(k), eights = rows.eights(of_x, 4), from[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) from[i] = rows.from[tid / QUAD + i * (THREADS / QUAD)];
  float sums[2][4][4] = {}, all[2][4][4] = {};
  Brought<W> brought;
  const float* band = band_of(scales, values, first);
  bring<W, WIDE>(brought, w, x, x_stride, n, k, first, from, 0);
#pragma unroll 1
  for (int chunk = 0, left = each; chunk < chunks; chunk++) {
    // Not a walk, which would take registers all the time.
    put(tile, brought, band ? band[chunk / scales.wide] : 1.0f);
    __syncthreads();
    if (chunk + 1 < chunks) bring<W, WIDE>(brought, w, x, x_stride, n, k, first, from, chunk + 1);
    uint32_t low[2][W::PARTS][4], high[2][W::PARTS][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int p = 0; p < W::PARTS; p++) {
        words(tile.w[p][of_w + 16 * m + g][t], low[m][p]);
        words(tile.w[p][of_w + 16 * m + 8 + g][t], high[m][p]);
      }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j >= eights) break;
      uint32_t parts[PARTS_OF_X][4];
#pragma unroll
      for (int p = 0; p < PARTS_OF_X; p++) words(tile.x[p][of_x + 8 * j + g][t], parts[p]);
#pragma unroll
      for (int m = 0; m < 2; m++) multiply<W>(sums[m][j], low[m], high[m], parts);
    }
    if (--left == 0 || chunk + 1 == chunks) {
      left = each;
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) all[m][j][i] += sums[m][j][i], sums[m][j][i] = 0.0f;
    }
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int output = first + of_w + 16 * m + g + i / 2 * 8, row = rows.to[of_x + 8 * j + 2 * t + i % 2];
        if (output < n && row >= 0) {
          if constexpr (W::SCALED) all[m][j][i] = with_scale(all[m][j][i], scales, values, output);
          out[row * out_stride + output] = plain(all[m][j][i]);
        }
      }
}
