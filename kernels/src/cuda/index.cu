// Reading by index: take, take_along_axis and gather_nd, as ops/index.rs launches them. An index is of any integer dtype; a negative one
// counts from the end; one out of range is reported, and what it names is zeros.
//
// Elements are of 1, 2, 4 or 8 bytes. Each thread makes an element and goes on by the whole grid.
#include "elements.cuh"

/// out[o, i, q] = x[o, ids[i], q], of x [outer, n, k] and `count` ids.
extern "C" __global__ void __launch_bounds__(256) take(unsigned bytes, unsigned dtype, void* out, const void* x, const void* ids, word64 outer, word64 n, word64 k, word64 count,
                                                      word64* bad) {
  for (word64 e = first_element(); e < outer * count * k; e += element_step()) {
    word64 q = e % k, i = e / k % count, o = e / k / count;
    long long row = wrapped(index_at(dtype, ids, i), n, bad);
    copy_element(bytes, out, e, x, row < 0 ? -1 : (long long)((o * n + word64(row)) * k + q));
  }
}

/// out[o, i, q] = x[o, ids[o, i, q], q], of x [outer, n, k] and ids [outer, m, k].
extern "C" __global__ void __launch_bounds__(256) take_along_axis(unsigned bytes, unsigned dtype, void* out, const void* x, const void* ids, word64 outer, word64 n, word64 k,
                                                                 word64 m, word64* bad) {
  for (word64 e = first_element(); e < outer * m * k; e += element_step()) {
    word64 q = e % k, o = e / k / m;
    long long row = wrapped(index_at(dtype, ids, e), n, bad);
    copy_element(bytes, out, e, x, row < 0 ? -1 : (long long)((o * n + word64(row)) * k + q));
  }
}

/// Tuples of indices into the first axes of each of a batch, equal to `Tuples` of ops/index.rs.
struct Tuples {
  /// Tuples in all and of each of the batch; indices of a tuple and what they are below; elements of what a tuple names.
  word64 all, each, width, sizes[8], inside;
};

/// out[t, q] = x[batch of t, tuple t, q].
extern "C" __global__ void __launch_bounds__(256) gather_nd(unsigned bytes, unsigned dtype, void* out, const void* x, const void* ids, Tuples of, word64* bad) {
  for (word64 e = first_element(); e < of.all * of.inside; e += element_step()) {
    word64 q = e % of.inside, t = e / of.inside, block = t / of.each;
    bool inside = true;
    for (word64 axis = 0; axis < of.width && inside; axis++) {
      long long i = wrapped(index_at(dtype, ids, t * of.width + axis), of.sizes[axis], bad);
      inside = i >= 0;
      block = block * of.sizes[axis] + word64(inside ? i : 0);
    }
    copy_element(bytes, out, e, x, inside ? (long long)(block * of.inside + q) : -1);
  }
}
