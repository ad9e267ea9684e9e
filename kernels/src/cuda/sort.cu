// Sorting along an axis: sort, argsort and topk, as ops/sort.rs launches them. The order is that of kernels/src/cpu/ops/sort.rs: equal elements stay in theirs, both zeros are
// equal, a NaN is the greatest.
//
// Lines are x[o, …, q] of [outer, n, k]; results have `count` elements of each line. `values` and `places` may be null. `flip` is −1 for descending. One block of 256 threads
// per line, as many as the host likes.
#include "elements.cuh"

constexpr int THREADS = 256, MOST = 2048;

/// An element's key and where it stands: no two are equal.
struct Entry {
  long long key;
  unsigned place;
};
DEVICE bool before(const Entry& a, const Entry& b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }

/// What is made of lines, equal to `Lines` of ops/sort.rs.
struct Lines {
  word64 dtype, bytes, outer, n, k, count;
  long long flip;
};

DEVICE long long key_of(const Lines& s, const void* x, word64 at) { return key_at(unsigned(s.dtype), x, at, true) ^ s.flip; }

DEVICE void give(const Lines& s, void* values, unsigned* places, const void* x, word64 line, word64 i, unsigned place) {
  word64 to = (line / s.k * s.count + i) * s.k + line % s.k;
  if (values) copy_element(unsigned(s.bytes), values, to, x, (long long)((line / s.k * s.n + place) * s.k + line % s.k));
  if (places) places[to] = place;
}

/// Lines of up to 2048 elements: a bitonic network (Batcher 1968).
extern "C" __global__ void __launch_bounds__(256) sort_lines(void* values, unsigned* places, const void* x, Lines s) {
  __shared__ long long keys[MOST];
  __shared__ unsigned place_of[MOST];
  int tid = threadIdx.x, size = 1;
  while (size < int(s.n)) size *= 2;
  for (word64 line = blockIdx.x; line < s.outer * s.k; line += gridDim.x) {
    word64 start = line / s.k * s.n * s.k + line % s.k;
    for (int i = tid; i < size; i += THREADS) {
      // What fills up the network comes last: nothing stands behind it.
      bool some = i < int(s.n);
      keys[i] = some ? key_of(s, x, start + word64(i) * s.k) : MOST_KEY;
      place_of[i] = some ? unsigned(i) : 0xffffffffu;
    }
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int pair = tid; pair < size / 2; pair += THREADS) {
          int i = pair / apart * 2 * apart + pair % apart, j = i + apart;
          Entry a = {keys[i], place_of[i]}, b = {keys[j], place_of[j]};
          bool up = (i & run) == 0, swap = up ? before(b, a) : before(a, b);
          if (swap) keys[i] = b.key, place_of[i] = b.place, keys[j] = a.key, place_of[j] = a.place;
        }
        __syncthreads();
      }
    }
    for (int i = tid; i < int(s.count); i += THREADS) give(s, values, places, x, line, word64(i), place_of[i]);
    __syncthreads();
  }
}

/// Lines of any length, of which few are wanted: each is the first of those behind the one before it.
extern "C" __global__ void __launch_bounds__(256) first_of_lines(void* values, unsigned* places, const void* x, Lines s) {
  __shared__ long long keys[THREADS / 32];
  __shared__ unsigned place_of[THREADS / 32];
  int tid = threadIdx.x;
  const Entry none = {MOST_KEY, 0xffffffffu};
  for (word64 line = blockIdx.x; line < s.outer * s.k; line += gridDim.x) {
    word64 start = line / s.k * s.n * s.k + line % s.k;
    Entry last = none;
    for (word64 i = 0; i < s.count; i++) {
      Entry best = none;
      for (word64 at = tid; at < s.n; at += THREADS) {
        Entry here = {key_of(s, x, start + at * s.k), unsigned(at)};
        if ((i == 0 || before(last, here)) && before(here, best)) best = here;
      }
      for (int d = 16; d > 0; d >>= 1) {
        Entry other = {__shfl_xor_sync(ALL, best.key, d), __shfl_xor_sync(ALL, best.place, d)};
        if (before(other, best)) best = other;
      }
      if (tid % 32 == 0) keys[tid / 32] = best.key, place_of[tid / 32] = best.place;
      __syncthreads();
      last = {keys[0], place_of[0]};
      for (int warp = 1; warp < THREADS / 32; warp++) {
        Entry other = {keys[warp], place_of[warp]};
        if (before(other, last)) last = other;
      }
      if (tid == 0) give(s, values, places, x, line, i, last.place);
      __syncthreads();
    }
  }
}
