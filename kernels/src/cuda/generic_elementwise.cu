// Elementwise ops on operands of any strides, as ops/elementwise.rs launches them; copies.
//
// elementwise_TYPE(op, out, a, b, at): `op` is a place in the list of operations.cuh, which is that of ops/elementwise.rs; `out` is contiguous, of TYPE or, for
// predicates, of bytes 0 and 1. f16 and bf16 are computed in f32 and rounded once. Every op gives the bits of kernels/src/cpu/elementwise.
// copy_BYTES(out, in, at): operand 0 is what is read, 1 what is written. where_BYTES(out, condition, a, b, at).
#include "generic.cuh"
#include "operations.cuh"

template <class T> DEVICE bool compared(unsigned op, T x, T y) {
  switch (op) {
    case LOGICAL_NOT: return x == T(0);
    case EQUAL: return x == y;
    case NOT_EQUAL: return x != y;
    case LESS: return x < y;
    case LESS_EQUAL: return x <= y;
    case GREATER: return x > y;
    case GREATER_EQUAL: return x >= y;
    case LOGICAL_AND: return (x != T(0)) & (y != T(0));
    case LOGICAL_OR: return (x != T(0)) | (y != T(0));
    case LOGICAL_XOR: return (x != T(0)) ^ (y != T(0));
    default: return false;
  }
}

template <class T> DEVICE bool float_predicate(unsigned op, T x, T y) {
  const T infinite = T(INFINITY_F);
  switch (op) {
    case IS_NAN: return x != x;
    case IS_INF: return magnitude(x) == infinite;
    case IS_FINITE: return magnitude(x) < infinite;
    default: return compared(op, x, y);
  }
}

/// Floats as they lie in memory, `S`, and as they are computed with, `T`.
template <class S, class T> struct Float {
  typedef typename S::Stored Stored;
  DEVICE void call(unsigned op, void* out, word64 i, const Stored* a, const Stored* b) {
    T x = S::load(a), y = b ? T(S::load(b)) : T(0);
    if (is_predicate(op)) static_cast<uint8_t*>(out)[i] = float_predicate(op, x, y);
    else S::store(static_cast<Stored*>(out) + i, float_op(op, x, y));
  }
};

struct F64 {
  typedef double Stored;
  DEVICE double load(const Stored* x) { return *x; }
  DEVICE void store(Stored* to, double x) { *to = x; }
};

/// Integers: what overflows wraps.
template <class T, class U> struct Int {
  typedef T Stored;
  static constexpr unsigned BITS = 8 * sizeof(T);
  static constexpr bool SIGNED = T(-1) < T(0);

  DEVICE T divided(T x, T y, bool rest) {
    if (y == 0) return 0;
    // The one quotient that has no room.
    if (SIGNED && y == T(-1)) return rest ? T(0) : T(U(0) - U(x));
    T q = x / y, r = x % y;
    bool apart = SIGNED && r != 0 && (r < 0) != (y < 0);
    if (rest) return apart ? T(r + y) : r;
    return apart ? T(q - 1) : q;
  }

  DEVICE T number(unsigned op, T x, T y) {
    U a = U(x), b = U(y);
    switch (op) {
      case NEG: return T(U(0) - a);
      case ABS: return SIGNED && x < 0 ? T(U(0) - a) : x;
      case SIGN: return x == 0 ? T(0) : SIGNED && x < 0 ? T(-1) : T(1);
      // Of 64 bits, since the product of two 16-bit numbers would be one of signed ones that overflow.
      case SQUARE: return T(U(word64(a) * word64(a)));
      case FLOOR: case CEIL: case ROUND: case TRUNC: return x;
      case BITWISE_NOT: return T(~a);
      case ADD: return T(U(a + b));
      case SUB: return T(U(a - b));
      case MUL: return T(U(word64(a) * word64(b)));
      case MAXIMUM: return x > y ? x : y;
      case MINIMUM: return x < y ? x : y;
      case FLOOR_DIVIDE: return divided(x, y, false);
      case REMAINDER: return divided(x, y, true);
      case BITWISE_AND: return T(a & b);
      case BITWISE_OR: return T(a | b);
      case BITWISE_XOR: return T(a ^ b);
      case LEFT_SHIFT: return b < BITS ? T(U(word64(a) << b)) : T(0);
      case RIGHT_SHIFT: return T(x >> (b < BITS ? unsigned(b) : BITS - 1)) * T(b < BITS || SIGNED);
      default: return 0;
    }
  }

  DEVICE void call(unsigned op, void* out, word64 i, const T* a, const T* b) {
    T x = *a, y = b ? *b : T(0);
    if (op == IS_NAN || op == IS_INF) static_cast<uint8_t*>(out)[i] = 0;
    else if (op == IS_FINITE) static_cast<uint8_t*>(out)[i] = 1;
    else if (is_predicate(op)) static_cast<uint8_t*>(out)[i] = compared(op, x, y);
    else static_cast<T*>(out)[i] = number(op, x, y);
  }
};

/// Bools: any byte but 0 is true.
struct Bool {
  typedef uint8_t Stored;
  DEVICE void call(unsigned op, void* out, word64 i, const uint8_t* a, const uint8_t* b) {
    int x = *a != 0, y = b ? *b != 0 : 0;
    bool r = false;
    switch (op) {
      case IS_NAN: case IS_INF: break;
      case IS_FINITE: r = true; break;
      case BITWISE_NOT: r = !x; break;
      case MAXIMUM: case BITWISE_OR: r = x | y; break;
      case MINIMUM: case BITWISE_AND: r = x & y; break;
      case BITWISE_XOR: r = x ^ y; break;
      default: r = compared(op, x, y);
    }
    static_cast<uint8_t*>(out)[i] = r;
  }
};

template <class K> DEVICE void elementwise(unsigned op, void* out, const void* a, const void* b, const Layout& at) {
  typedef typename K::Stored Stored;
  bool one = is_of_one(op);
  for (word64 i = first_element(); i < at.n; i += element_step()) {
    long long offsets[2];
    place(at, i, offsets);
    const Stored* second = one ? nullptr : static_cast<const Stored*>(b) + offsets[1];
    K::call(op, out, i, static_cast<const Stored*>(a) + offsets[0], second);
  }
}

#define COMMA ,
#define KERNEL_OF(name, kind)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) name(unsigned op, void* out, const void* a, const void* b, Layout at) { \
    elementwise<kind>(op, out, a, b, at);                                                                                          \
  }
KERNEL_OF(elementwise_f32, Float<F32 COMMA float>)
KERNEL_OF(elementwise_f16, Float<F16 COMMA float>)
KERNEL_OF(elementwise_bf16, Float<BF16 COMMA float>)
KERNEL_OF(elementwise_f64, Float<F64 COMMA double>)
KERNEL_OF(elementwise_bool, Bool)
KERNEL_OF(elementwise_u8, Int<uint8_t COMMA uint8_t>)
KERNEL_OF(elementwise_u16, Int<uint16_t COMMA uint16_t>)
KERNEL_OF(elementwise_u32, Int<uint32_t COMMA uint32_t>)
KERNEL_OF(elementwise_u64, Int<uint64_t COMMA uint64_t>)
KERNEL_OF(elementwise_i8, Int<int8_t COMMA uint8_t>)
KERNEL_OF(elementwise_i16, Int<int16_t COMMA uint16_t>)
KERNEL_OF(elementwise_i32, Int<int32_t COMMA uint32_t>)
KERNEL_OF(elementwise_i64, Int<int64_t COMMA uint64_t>)
#undef KERNEL_OF

template <class T> DEVICE void copied(T* out, const T* in, const Layout& at) {
  for (word64 i = first_element(); i < at.n; i += element_step()) {
    long long offsets[2];
    place(at, i, offsets);
    out[offsets[1]] = in[offsets[0]];
  }
}

template <class T> DEVICE void chosen(T* out, const uint8_t* condition, const T* a, const T* b, const Layout& at) {
  for (word64 i = first_element(); i < at.n; i += element_step()) {
    long long offsets[3];
    place(at, i, offsets);
    out[i] = condition[offsets[0]] ? a[offsets[1]] : b[offsets[2]];
  }
}

#define KERNEL_OF(name, type) \
  extern "C" __global__ void __launch_bounds__(256) name(type* out, const type* in, Layout at) { copied(out, in, at); }
KERNEL_OF(copy_1, uint8_t)
KERNEL_OF(copy_2, uint16_t)
KERNEL_OF(copy_4, uint32_t)
KERNEL_OF(copy_8, uint64_t)
#undef KERNEL_OF

#define KERNEL_OF(name, type)                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256) name(type* out, const uint8_t* condition, const type* a, const type* b, Layout at) { \
    chosen(out, condition, a, b, at);                                                                                                        \
  }
KERNEL_OF(where_1, uint8_t)
KERNEL_OF(where_2, uint16_t)
KERNEL_OF(where_4, uint32_t)
KERNEL_OF(where_8, uint64_t)
#undef KERNEL_OF

/// What is around a tensor, equal to `words` of `Pad` in ops/movement.rs: elements of the result, its axes, their sizes here and in the tensor, and places before it.
struct Padding {
  word64 bytes, mode, n, rank, dims[8], from[8], low[8];
};

/// Elements of a tensor with more around it, of 1, 2, 4 or 8 bytes: `mode` 0 has `value` there (null: zero), 1 the nearest element, 2 what a mirror at the outermost shows, 3 what
/// comes from the other end.
extern "C" __global__ void __launch_bounds__(256) pad(void* out, const void* x, const void* value, Padding p) {
  for (word64 i = first_element(); i < p.n; i += element_step()) {
    word64 rest = i, from = 0, stride = 1;
    bool outside = false;
#pragma unroll 1
    for (int axis = int(p.rank) - 1; axis >= 0; axis--) {
      word64 before = rest / p.dims[axis];
      long long n = (long long)p.from[axis], at = (long long)(rest - before * p.dims[axis]) - (long long)p.low[axis];
      rest = before;
      if (at < 0 || at >= n) {
        long long period = p.mode == 3 ? n : 2 * (n - 1);
        if (p.mode == 0) outside = true;
        else if (n < 2) at = 0;
        else if (p.mode == 1) at = at < 0 ? 0 : n - 1;
        else {
          at = (at % period + period) % period;
          if (at >= n) at = period - at;
        }
      }
      from += word64(at) * stride;
      stride *= word64(n);
    }
    const void* source = outside ? value : x;
    word64 at = outside ? 0 : from;
    switch (p.bytes) {
      case 1: static_cast<uint8_t*>(out)[i] = source ? static_cast<const uint8_t*>(source)[at] : 0; break;
      case 2: static_cast<uint16_t*>(out)[i] = source ? static_cast<const uint16_t*>(source)[at] : 0; break;
      case 4: static_cast<uint32_t*>(out)[i] = source ? static_cast<const uint32_t*>(source)[at] : 0; break;
      default: static_cast<uint64_t*>(out)[i] = source ? static_cast<const uint64_t*>(source)[at] : 0;
    }
  }
}
