// What the generic kernels share: where an element is, whatever the strides.
//
// All of them run with blocks of 256 threads and as many blocks as the host likes: each thread goes on by the whole grid. No shared memory.
#pragma once
#include "common.cuh"

/// `n` elements of `rank` axes, outermost first, and the strides, in elements, of up to four operands. Equal to `Layout` of ops/layout.rs.
struct Layout {
  word64 n, rank, dims[8];
  long long strides[4][8];
};

/// Where element `i` of the operands `0 .. K` is.
template <int K> DEVICE void place(const Layout& at, word64 i, long long (&offsets)[K]) {
  for (int k = 0; k < K; k++) offsets[k] = 0;
  for (int axis = int(at.rank) - 1; axis >= 0; axis--) {
    word64 here = i % at.dims[axis];
    i /= at.dims[axis];
    for (int k = 0; k < K; k++) offsets[k] += (long long)here * at.strides[k][axis];
  }
}

DEVICE word64 first_element() { return word64(blockIdx.x) * 256 + threadIdx.x; }
DEVICE word64 element_step() { return word64(gridDim.x) * 256; }
