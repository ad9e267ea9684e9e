// Reductions over any axes, and where along an axis the greatest is, as ops/reduce.rs launches them.
//
// Neighbouring axes that are both reduced or both kept act as one. So `x` is `outer` matrices of `n` rows, which are reduced, of `k` columns; a matrix is cut into
// `chunks` of `chunk` rows, and outer matrices may be reduced, too. reduce_rows_CLASS (where `k` is 1) and reduce_columns_CLASS make a part of each chunk, [outer, chunks,
// k]; where a result has only one, they store it. reduce_join_CLASS makes results of parts.
//
// Order of summation: that of kernels/src/cpu/ops/reduce.rs, with the same bits. A chunk of a row: sixteen lanes in ascending order, then by distance 8, 4, 2, 1; of fewer than
// sixteen elements, in ascending order. A chunk of columns: `phases` chains, of which a row belongs to that of its place modulo them, joined in ascending
// order. Parts of a result in ascending order. Classes: single (f16, bf16, f32; added in f32, joined in f64), double, and whole, whose order does not matter.
#include "elements.cuh"

/// In the order of `OPS` in ops/reduce.rs.
enum Op : unsigned { REDUCE_SUM, REDUCE_PROD, REDUCE_MAX, REDUCE_MIN, REDUCE_ANY, REDUCE_ALL };

/// What is done to what, equal to `Reduction` of ops/reduce.rs.
struct Reduction {
  /// Of the result's dtype: the place in PLAIN.
  word64 op, dtype, result;
  word64 outer, n, k, chunk, chunks, phases;
  /// Whether a chunk's part is a result.
  word64 direct;
  /// Of outer matrices: axes, their sizes, and which are reduced, outermost first; results in all, and matrices of each.
  word64 axes, sizes[8], reduced[8], kept, each;
};

struct Single {
  typedef float Acc;
  typedef double Part;
  DEVICE Acc identity(const Reduction& r) { return r.op == REDUCE_SUM ? 0.0f : 1.0f; }
  DEVICE Part nothing(const Reduction& r) { return r.op == REDUCE_SUM ? 0.0 : 1.0; }
  DEVICE Acc load(const Reduction& r, const void* x, word64 i) { return single_at(unsigned(r.dtype), x, i); }
  DEVICE Acc fold(const Reduction& r, Acc a, Acc b) { return r.op == REDUCE_SUM ? a + b : a * b; }
  DEVICE Part join(const Reduction& r, Part a, Part b) { return r.op == REDUCE_SUM ? a + b : a * b; }
  DEVICE Part widen(Acc a) { return a; }
  DEVICE void finish(const Reduction& r, void* out, word64 i, Part p) {
    float v = float(p);
    switch (r.dtype) {
      case OF_F16: static_cast<uint16_t*>(out)[i] = uint16_t(f32_to_half(v)); break;
      case OF_BF16: static_cast<uint16_t*>(out)[i] = uint16_t(f32_to_bf16(v)); break;
      default: static_cast<float*>(out)[i] = v;
    }
  }
};

struct Double {
  typedef double Acc;
  typedef double Part;
  DEVICE Acc identity(const Reduction& r) { return r.op == REDUCE_SUM ? 0.0 : 1.0; }
  DEVICE Part nothing(const Reduction& r) { return identity(r); }
  DEVICE Acc load(const Reduction&, const void* x, word64 i) { return element<double>(x, i); }
  DEVICE Acc fold(const Reduction& r, Acc a, Acc b) { return r.op == REDUCE_SUM ? a + b : a * b; }
  DEVICE Part join(const Reduction& r, Part a, Part b) { return fold(r, a, b); }
  DEVICE Part widen(Acc a) { return a; }
  DEVICE void finish(const Reduction&, void* out, word64 i, Part p) { static_cast<double*>(out)[i] = p; }
};

/// Sums and products of integers, the greatest key, whether one is or is not 0. Integers wrap in 64 bits, of which the lower ones are what they are in fewer.
struct Whole {
  typedef word64 Acc;
  typedef word64 Part;
  DEVICE Acc identity(const Reduction& r) {
    if (r.op == REDUCE_MAX || r.op == REDUCE_MIN) return word64(LEAST_KEY);
    return r.op == REDUCE_PROD;
  }
  DEVICE Part nothing(const Reduction& r) { return identity(r); }
  DEVICE long long flip(const Reduction& r) { return r.op == REDUCE_MIN ? -1 : 0; }
  DEVICE Acc load(const Reduction& r, const void* x, word64 i) {
    unsigned dtype = unsigned(r.dtype);
    switch (r.op) {
      case REDUCE_MAX: case REDUCE_MIN: return word64(flipped(dtype, key_at(dtype, x, i, false), flip(r)));
      case REDUCE_ANY: return is_zero(dtype, x, i) ? 0 : 1;
      case REDUCE_ALL: return is_zero(dtype, x, i) ? 1 : 0;
      default: return whole_at(dtype, x, i);
    }
  }
  DEVICE bool is_zero(unsigned dtype, const void* x, word64 i) {
    switch (dtype) {
      case OF_F16: case OF_BF16: return (element<uint16_t>(x, i) & 0x7fff) == 0;
      case OF_F32: return (element<uint32_t>(x, i) & 0x7fffffffu) == 0;
      case OF_F64: return element<uint64_t>(x, i) << 1 == 0;
      default: return whole_at(dtype, x, i) == 0;
    }
  }
  DEVICE Acc fold(const Reduction& r, Acc a, Acc b) {
    switch (r.op) {
      case REDUCE_SUM: return a + b;
      case REDUCE_PROD: return a * b;
      case REDUCE_MAX: case REDUCE_MIN: return (long long)b > (long long)a ? b : a;
      default: return a | b;
    }
  }
  DEVICE Part join(const Reduction& r, Part a, Part b) { return fold(r, a, b); }
  DEVICE Part widen(Acc a) { return a; }
  DEVICE void finish(const Reduction& r, void* out, word64 i, Part p) {
    switch (r.op) {
      case REDUCE_MAX: case REDUCE_MIN: put_key(unsigned(r.dtype), out, i, (long long)p, flip(r)); break;
      case REDUCE_ANY: static_cast<uint8_t*>(out)[i] = p != 0; break;
      case REDUCE_ALL: static_cast<uint8_t*>(out)[i] = p == 0; break;
      default: put_key(unsigned(r.result), out, i, (long long)(r.result == OF_U64 ? p ^ word64(LEAST_KEY) : p), 0);
    }
  }
};

template <class C> DEVICE void keep(const Reduction& r, void* out, word64 i, typename C::Part part) {
  if (r.direct) C::finish(r, out, i, part);
  else static_cast<typename C::Part*>(out)[i] = part;
}

/// Sixteen threads make the part of a chunk; blocks have sixteen of these groups.
template <class C> DEVICE void rows(const Reduction& r, void* out, const void* x) {
  int lane = threadIdx.x % 16;
  word64 items = r.outer * r.chunks, groups = word64(gridDim.x) * 16, mine = word64(blockIdx.x) * 16 + threadIdx.x / 16;
  // Two groups are a warp, whose threads go on together.
  for (word64 item = mine; item - mine + word64(blockIdx.x) * 16 < items; item += groups) {
    bool some = item < items;
    word64 from = some ? item % r.chunks * r.chunk : 0, count = some ? min(r.n - from, r.chunk) : 0;
    word64 start = some ? item / r.chunks * r.n + from : 0;
    bool is_short = count < 16;
    typename C::Acc acc = C::identity(r);
    for (word64 i = is_short ? 0 : lane; i < count; i += is_short ? 1 : 16) acc = C::fold(r, acc, C::load(r, x, start + i));
    typename C::Acc alone = acc;
    for (int d = 8; d > 0; d >>= 1) acc = C::fold(r, acc, __shfl_down_sync(ALL, acc, d, 16));
    if (some && lane == 0) keep<C>(r, out, item, C::widen(is_short ? alone : acc));
  }
}

template <class C> DEVICE void columns(const Reduction& r, void* out, const void* x) {
  word64 items = r.outer * r.chunks * r.k;
  for (word64 item = first_element(); item < items; item += element_step()) {
    word64 unit = item / r.k, column = item - unit * r.k, matrix = unit / r.chunks, from = (unit - matrix * r.chunks) * r.chunk;
    word64 start = (matrix * r.n + from) * r.k + column, count = min(r.n - from, r.chunk);
    typename C::Part part = C::nothing(r);
    for (word64 phase = 0; phase < r.phases; phase++) {
      typename C::Acc acc = C::identity(r);
      for (word64 row = phase; row < count; row += r.phases) acc = C::fold(r, acc, C::load(r, x, start + row * r.k));
      part = phase == 0 ? C::widen(acc) : C::join(r, part, C::widen(acc));
    }
    keep<C>(r, out, item, part);
  }
}

template <class C> DEVICE void joined(const Reduction& r, void* out, const void* parts) {
  for (word64 item = first_element(); item < r.kept * r.k; item += element_step()) {
    word64 column = item % r.k;
    typename C::Part acc = C::nothing(r);
    for (word64 over = 0; over < r.each; over++) {
      // The matrix by a counter over the kept axes and one over the reduced ones.
      word64 kept = item / r.k, reduced = over, unit = 0, stride = 1;
      for (int axis = int(r.axes) - 1; axis >= 0; axis--) {
        word64 size = max(r.sizes[axis], word64(1)), &counter = r.reduced[axis] ? reduced : kept;
        unit += counter % size * stride;
        counter /= size;
        stride *= size;
      }
      for (word64 chunk = 0; chunk < r.chunks; chunk++) acc = C::join(r, acc, element<typename C::Part>(parts, (unit * r.chunks + chunk) * r.k + column));
    }
    C::finish(r, out, item, acc);
  }
}

#define KERNEL_OF(name, step) \
  extern "C" __global__ void __launch_bounds__(256, 4) name(void* out, const void* x, Reduction r) { step(r, out, x); }
KERNEL_OF(reduce_rows_single, rows<Single>)
KERNEL_OF(reduce_rows_double, rows<Double>)
KERNEL_OF(reduce_rows_whole, rows<Whole>)
KERNEL_OF(reduce_columns_single, columns<Single>)
KERNEL_OF(reduce_columns_double, columns<Double>)
KERNEL_OF(reduce_columns_whole, columns<Whole>)
KERNEL_OF(reduce_join_single, joined<Single>)
KERNEL_OF(reduce_join_double, joined<Double>)
KERNEL_OF(reduce_join_whole, joined<Whole>)
#undef KERNEL_OF

/// out[o, q] = where in x[o, …, q] of [outer, n, k] the greatest is, or the least where `flip` is −1; the first of equal ones, a NaN before all. `n` is above 0 and below
/// 2³². A warp for each; blocks of 256 threads, as many as the host likes.
extern "C" __global__ void __launch_bounds__(256) arg_extreme(unsigned dtype, int flip, unsigned* out, const void* x, word64 outer, word64 n, word64 k) {
  int lane = threadIdx.x % 32;
  for (word64 item = word64(blockIdx.x) * 8 + threadIdx.x / 32; item < outer * k; item += word64(gridDim.x) * 8) {
    word64 start = item / k * n * k + item % k;
    long long most = LEAST_KEY;
    unsigned place = 0xffffffffu;
    for (word64 i = lane; i < n; i += 32) {
      long long key = flipped(dtype, key_at(dtype, x, start + i * k, true), flip);
      if (place == 0xffffffffu || key > most) most = key, place = unsigned(i);
    }
    for (int d = 16; d > 0; d >>= 1) {
      long long other = __shfl_xor_sync(ALL, most, d);
      unsigned at = __shfl_xor_sync(ALL, place, d);
      if (at != 0xffffffffu && (place == 0xffffffffu || other > most || (other == most && at < place))) most = other, place = at;
    }
    if (lane == 0) out[item] = place;
  }
}
