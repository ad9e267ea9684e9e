// Products of few rows with weights of few bits: what half_vec.cu and float8_vec.cu have in common.
//
// Order of summation: halves.cuh. A block has sixteen outputs, and each of its eight warps a range of `k`.
#pragma once
#include "chosen.cuh"
#include "halves.cuh"

constexpr int OUTPUTS = 16, THREADS = 32 * RANGES;

/// The sums of one range.
template <class W, int EIGHTS, bool WIDE>
DEVICE void range(const typename W::Stored* w, const float* x, long long x_stride, int n, int k, int first, const int* from, const Scales& scales, const float* values,
                  float (&sums)[EIGHTS][4]) {
  // Chunks of weights that a lane asks for before it uses the first of them.
  constexpr int AHEAD = !WIDE ? 1 : EIGHTS < 4 ? 4 : 2;
  // Numbers of a single eight with them; of more there are not so many registers.
  constexpr bool EARLY = EIGHTS == 1;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, each = chunks_of_range(k), begin = int(threadIdx.x) / 32 * each;
  int end = min(begin + each, (k + CHUNK - 1) / CHUNK);
  // Outputs that are none read the last one's.
  const typename W::Stored* low = w + size_t(min(first + g, n - 1)) * k;
  const typename W::Stored* high = w + size_t(min(first + g + 8, n - 1)) * k;
  const float* rows[EIGHTS];
#pragma unroll
  for (int e = 0; e < EIGHTS; e++) rows[e] = from[8 * e + g] < 0 ? nullptr : x + from[8 * e + g] * x_stride;
  Walk walk(scales, band_of(scales, values, first), begin);
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk += AHEAD) {
    typename W::Eight words[AHEAD][2];
    float early[EARLY ? AHEAD : 1][8];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int at = (chunk + i) * CHUNK + 8 * t, until = chunk + i < end ? k : 0;
      words[i][0] = eight_weights<WIDE>(low, at, until), words[i][1] = eight_weights<WIDE>(high, at, until);
      if constexpr (EARLY) eight_numbers<WIDE>(rows[0], at, until, early[i]);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (chunk + i >= end) break;
      uint32_t of_low[W::PARTS][4], of_high[W::PARTS][4];
      W::cut(words[i][0], of_low), W::cut(words[i][1], of_high);
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        uint32_t parts[PARTS_OF_X][4];
        if constexpr (EARLY) {
          take_on<W>(early[i], walk.now);
          cut(early[i], parts);
        } else {
          float numbers[8];
          eight_numbers<WIDE>(rows[e], (chunk + i) * CHUNK + 8 * t, k, numbers);
          take_on<W>(numbers, walk.now);
          cut(numbers, parts);
        }
        multiply<W>(sums[e], of_low, of_high, parts);
      }
      if constexpr (W::SCALED) walk.next(scales, chunk + i + 1 < end);
    }
  }
}

template <class W, int EIGHTS>
DEVICE void product(const typename W::Stored* w, const float* x, long long x_stride, float* out, long long out_stride, int n, int k, int rows, const Further& further,
                    const int* ids, const int* order, int experts, int used, int per_token, word64* bad, const Scales& scales = {}) {
  constexpr int ROWS = 8 * EIGHTS;
  // Some places more in a row, so that the lanes of a warp store into different banks.
  __shared__ float all[RANGES][ROWS][OUTPUTS + 4];
  // What each row reads and makes; −1 for none.
  __shared__ int from[ROWS], to[ROWS];
  int tid = threadIdx.x, number, first = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS;
  const float* values = scales.of(number);
  if (!rows_of_block(from, to, rows, ids, order, used, per_token)) return;
  bool wrong = !to_expert(w, size_t(n) * k, ids, to[0], experts, bad);
  if (wrong) values = nullptr;
  if (values) to_expert(values, size_t(scales.each), ids, to[0], experts, bad);
  float sums[EIGHTS][4] = {};
  if (!wrong) {
    if (is_wide(w, x, x_stride, k)) range<W, EIGHTS, true>(w, x, x_stride, n, k, first, from, scales, values, sums);
    else range<W, EIGHTS, false>(w, x, x_stride, n, k, first, from, scales, values, sums);
  }
  int lane = tid % 32;
#pragma unroll
  for (int e = 0; e < EIGHTS; e++)
#pragma unroll
    for (int i = 0; i < 4; i++) all[tid / 32][8 * e + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sums[e][i];
  __syncthreads();
  for (int e = tid; e < ROWS * OUTPUTS; e += THREADS) {
    int row = e / OUTPUTS, output = e % OUTPUTS;
    if (to[row] < 0 || first + output >= n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RANGES; i++) sum += all[i][row][output];
    if constexpr (W::SCALED) sum = with_scale(sum, scales, values, first + output);
    out[to[row] * out_stride + first + output] = plain(sum);
  }
}
