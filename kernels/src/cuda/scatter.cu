// Writing by index: scatter_along_axis and scatter_nd into a copy of the tensor, as ops/scatter.rs launches them. An index is of any integer dtype; a negative one counts from
// the end; one out of range is reported, and writes nothing.
//
// Updates are applied in their order, as in kernels/src/cpu/ops/scatter.rs: all that may meet are one thread's.
#include "elements.cuh"

/// In the order of `REDUCE` of ops/scatter.rs.
enum Fold : unsigned { FOLD_SET, FOLD_ADD, FOLD_MUL, FOLD_MAX, FOLD_MIN };

template <class T> DEVICE T float_fold(unsigned how, T a, T b) {
  switch (how) {
    case FOLD_ADD: return a + b;
    case FOLD_MUL: return a * b;
    case FOLD_MAX: return a > b || a != a ? a : b;
    default: return a < b || a != a ? a : b;
  }
}

DEVICE word64 whole_fold(unsigned how, bool is_signed, word64 a, word64 b) {
  switch (how) {
    case FOLD_ADD: return a + b;
    case FOLD_MUL: return a * b;
  }
  bool less = is_signed ? (long long)a < (long long)b : a < b;
  return less == (how == FOLD_MAX) ? b : a;
}

/// out[to] = what becomes of it and updates[at].
DEVICE void fold_element(unsigned how, unsigned dtype, unsigned bytes, void* out, word64 to, const void* updates, word64 at) {
  if (how == FOLD_SET) return copy_element(bytes, out, to, updates, (long long)at);
  if (dtype == OF_F64) {
    static_cast<double*>(out)[to] = float_fold(how, element<double>(out, to), element<double>(updates, at));
    return;
  }
  if (is_float(dtype)) {
    float v = float_fold(how, single_at(dtype, out, to), single_at(dtype, updates, at));
    if (dtype == OF_F16) static_cast<uint16_t*>(out)[to] = uint16_t(f32_to_half(v));
    else if (dtype == OF_BF16) static_cast<uint16_t*>(out)[to] = uint16_t(f32_to_bf16(v));
    else static_cast<float*>(out)[to] = v;
    return;
  }
  word64 v = whole_fold(how, dtype >= OF_I8, whole_at(dtype, out, to), whole_at(dtype, updates, at));
  copy_element(bytes, out, to, &v, 0);
}

/// Sizes of the indices, equal to `words` of ops/scatter.rs: `lines` lines of `m` along the axis, whose elements are `apart` apart, and what there is of the axes, outermost
/// first (of the axis itself 1). Of the tensor: `n` along the axis, and strides in elements.
struct Lines {
  word64 how, dtype, bytes, lines, m, apart, n, stride, rank, sizes[8], of_indices[8], of_tensor[8];
};

/// A thread has a line.
extern "C" __global__ void __launch_bounds__(256) scatter_along_axis(void* out, const void* updates, const void* ids, unsigned ids_dtype, Lines s, word64* bad) {
  for (word64 line = first_element(); line < s.lines; line += element_step()) {
    word64 rest = line, from = 0, base = 0;
#pragma unroll 1
    for (int axis = int(s.rank) - 1; axis >= 0; axis--) {
      word64 before = rest / s.sizes[axis], here = rest - before * s.sizes[axis];
      from += here * s.of_indices[axis], base += here * s.of_tensor[axis];
      rest = before;
    }
#pragma unroll 1
    for (word64 i = 0; i < s.m; i++) {
      word64 at = from + i * s.apart;
      long long row = wrapped(index_at(ids_dtype, ids, at), s.n, bad);
      if (row >= 0) fold_element(unsigned(s.how), unsigned(s.dtype), unsigned(s.bytes), out, base + word64(row) * s.stride, updates, at);
    }
  }
}

/// Tuples of indices into the first axes, equal to `words` of ops/scatter.rs: how many, indices of each, and what they are below; elements of what a tuple names; shares of the
/// places that tuples name.
struct Tuples {
  word64 how, dtype, bytes, all, width, sizes[8], inside, shares;
};

/// A thread has an element of all places that leave one rest when divided by the shares, and looks at all tuples.
extern "C" __global__ void __launch_bounds__(256, 4) scatter_nd(void* out, const void* updates, const void* ids, unsigned ids_dtype, Tuples s, word64* bad) {
  for (word64 e = first_element(); e < s.inside * s.shares; e += element_step()) {
    word64 share = e / s.inside, q = e - share * s.inside;
#pragma unroll 1
    for (word64 t = 0; t < s.all; t++) {
      word64 place = 0;
      bool inside = true;
#pragma unroll 1
      for (word64 axis = 0; axis < s.width && inside; axis++) {
        long long i = wrapped(index_at(ids_dtype, ids, t * s.width + axis), s.sizes[axis], bad);
        inside = i >= 0;
        place = place * s.sizes[axis] + word64(inside ? i : 0);
      }
      if (inside && place % s.shares == share)
        fold_element(unsigned(s.how), unsigned(s.dtype), unsigned(s.bytes), out, place * s.inside + q, updates, t * s.inside + q);
    }
  }
}
