// Which rows a block of a product's kernel reads and makes, and whose expert's weights it takes.
#pragma once
#include "common.cuh"

/// What a block has of rows: the activations that they read, and the results that they make, −1 for none.
template <int ROWS> struct RowsOf {
  int from[ROWS], to[ROWS];
  /// How many eights of `most` from row `first` on have one. Those that are none come last.
  __device__ __forceinline__ int eights(int first, int most) const {
    int count = most;
    while (count > 0 && to[first + 8 * count - 8] < 0) count--;
    return count;
  }
};

/// Which of a launch's blocks one is, without ids: those of the same outputs are neighbours, up to BAND of them, so that weights come from memory once and then from the cache.
constexpr int BAND = 16;
struct Turned {
  int across, down;
  /// The one that is `across` by its own number.
  DEVICE Turned of(int across) {
    word64 number = word64(blockIdx.y) * gridDim.x + across, band = number / (word64(gridDim.x) * BAND), rest = number % (word64(gridDim.x) * BAND);
    int height = min(BAND, int(gridDim.y) - int(band) * BAND);
    return {int(rest / height), int(band) * BAND + int(rest % height)};
  }
};

/// Of `ROWS` rows of a block the activations that each reads and the result that it makes, −1 for none: with an order a group of it, with ids and no order one row, else
/// neighbours; the block's is number `down` of rows, groups or neighbours. False where there is nothing to do. All threads call it.
template <int ROWS> DEVICE bool rows_of_block(int (&from)[ROWS], int (&to)[ROWS], int rows, const int* ids, const int* order, int used, int per_token, int down = int(blockIdx.y)) {
  int tid = threadIdx.x;
  if (tid < ROWS) {
    int row = ids && !order ? (tid == 0 ? down : -1) : down * ROWS + tid;
    if (order) row = order[row];
    else if (row >= rows) row = -1;
    to[tid] = row;
    from[tid] = row < 0 || !ids ? row : row / used * per_token + (per_token > 1 ? row % used : 0);
  }
  __syncthreads();
  return to[0] >= 0;
}

/// Moves weights to the expert of row `row`, of `elements` each; without ids there is one. False, after a report, where there is none of its number.
template <class W> DEVICE bool to_expert(const W*& w, size_t elements, const int* ids, int row, int experts, word64* bad) {
  if (!ids) return true;
  int id = ids[row];
  long long expert = id < 0 ? (long long)id + experts : id;
  if (expert < 0 || expert >= experts) {
    if (threadIdx.x == 0 && blockIdx.x == 0) report(bad, id, word64(max(experts, 1)));
    return false;
  }
  w += size_t(expert) * elements;
  return true;
}
