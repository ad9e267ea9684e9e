// Whether memory is what it was: a number for all of its bytes, which depends on where each is.
//
// checksum_words(words, n, sum): adds to `sum` a number for each of `n` words of 64 bits. It is the same however the sum is split, since integers are added;
// nobody who wants two memories with one sum is kept from making them. Blocks of 256 threads, any number of them.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) checksum_words(const word64* words, word64 n, word64* sum) {
  word64 mine = 0, step = word64(gridDim.x) * blockDim.x;
  for (word64 i = word64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    // The finaliser of MurmurHash3, of the word and of an odd multiple of its place.
    word64 x = words[i] ^ (i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
    mine += x ^ x >> 33;
  }
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_xor_sync(ALL, mine, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}
