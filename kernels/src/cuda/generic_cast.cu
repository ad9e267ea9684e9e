// Casts between plain dtypes, as Rust's `as` casts them: integers wrap, floats saturate and are cut, a NaN is 0; what becomes a half is rounded once.
//
// cast_TYPE(to, out, x, n): `n` elements, both contiguous; `to` is the place of the result's dtype in dtype.rs' list, `bool` 0 up to `f64` 12.
#include "generic.cuh"

/// An f64 as an f32 that still tells on which side of it the f64 was, so that rounding it to fewer bits is as rounding once.
DEVICE float to_odd(double x) {
  float y = float(x);
  unsigned bits = __float_as_uint(y);
  if (fabs(double(y)) > fabs(x)) bits -= 1;
  return double(y) == x ? y : __uint_as_float(bits | 1u);
}

/// A float as an integer of `T` from `low` up to and without `end`.
template <class T> DEVICE T whole(double x, T least, T most, double low, double end) {
  if (x != x) return 0;
  if (x >= end) return most;
  return x < low ? least : T(x);
}

DEVICE void put(unsigned to, void* out, word64 i, double x) {
  switch (to) {
    case 0: static_cast<uint8_t*>(out)[i] = x != 0.0; break;
    case 1: static_cast<uint8_t*>(out)[i] = whole<uint8_t>(x, 0, 0xff, 0.0, 0x1p8); break;
    case 2: static_cast<uint16_t*>(out)[i] = whole<uint16_t>(x, 0, 0xffff, 0.0, 0x1p16); break;
    case 3: static_cast<uint32_t*>(out)[i] = whole<uint32_t>(x, 0, 0xffffffffu, 0.0, 0x1p32); break;
    case 4: static_cast<uint64_t*>(out)[i] = whole<uint64_t>(x, 0, ~uint64_t(0), 0.0, 0x1p64); break;
    case 5: static_cast<int8_t*>(out)[i] = whole<int8_t>(x, -128, 127, -0x1p7, 0x1p7); break;
    case 6: static_cast<int16_t*>(out)[i] = whole<int16_t>(x, -32768, 32767, -0x1p15, 0x1p15); break;
    case 7: static_cast<int32_t*>(out)[i] = whole<int32_t>(x, int32_t(0x80000000u), 0x7fffffff, -0x1p31, 0x1p31); break;
    case 8:
      static_cast<int64_t*>(out)[i] = whole<int64_t>(x, int64_t(uint64_t(1) << 63), int64_t(~uint64_t(0) >> 1), -0x1p63, 0x1p63);
      break;
    case 9: static_cast<uint16_t*>(out)[i] = uint16_t(f32_to_half(to_odd(x))); break;
    case 10: static_cast<uint16_t*>(out)[i] = uint16_t(f32_to_bf16(to_odd(x))); break;
    case 11: static_cast<float*>(out)[i] = float(x); break;
    case 12: static_cast<double*>(out)[i] = x; break;
  }
}

/// An integer, `x` by its bits.
template <bool SIGNED> DEVICE void put_whole(unsigned to, void* out, word64 i, uint64_t x) {
  switch (to) {
    case 0: static_cast<uint8_t*>(out)[i] = x != 0; return;
    case 1: case 5: static_cast<uint8_t*>(out)[i] = uint8_t(x); return;
    case 2: case 6: static_cast<uint16_t*>(out)[i] = uint16_t(x); return;
    case 3: case 7: static_cast<uint32_t*>(out)[i] = uint32_t(x); return;
    case 4: case 8: static_cast<uint64_t*>(out)[i] = x; return;
    case 11: static_cast<float*>(out)[i] = SIGNED ? float(int64_t(x)) : float(x); return;
    case 12: static_cast<double*>(out)[i] = SIGNED ? double(int64_t(x)) : double(x); return;
  }
  // A half's bits are far above those that an f64 has no room for: one of these, if any is set, says as much as all.
  bool negative = SIGNED && int64_t(x) < 0;
  uint64_t size = negative ? 0 - x : x;
  if (size >> 53) size = (size & ~uint64_t(0xfff)) | uint64_t((size & 0xfff) != 0) << 12;
  double value = double(size);
  put(to, out, i, negative ? -value : value);
}

/// out[i] = start + i · step.
extern "C" __global__ void __launch_bounds__(256) arange(unsigned to, void* out, double start, double step, word64 n) {
  for (word64 i = first_element(); i < n; i += element_step()) put(to, out, i, start + double(i) * step);
}

struct FromF64 {
  typedef double Stored;
  DEVICE double load(const double* x) { return *x; }
};

template <class S> DEVICE void cast_floats(unsigned to, void* out, const typename S::Stored* x, word64 n) {
  for (word64 i = first_element(); i < n; i += element_step()) put(to, out, i, double(S::load(x + i)));
}

template <class T, bool SIGNED> DEVICE void cast_integers(unsigned to, void* out, const T* x, word64 n) {
  // Signs are extended by way of T itself.
  for (word64 i = first_element(); i < n; i += element_step()) put_whole<SIGNED>(to, out, i, uint64_t(x[i]));
}

extern "C" __global__ void __launch_bounds__(256) cast_bool(unsigned to, void* out, const uint8_t* x, word64 n) {
  for (word64 i = first_element(); i < n; i += element_step()) put_whole<false>(to, out, i, x[i] != 0);
}

#define KERNEL_OF(name, kind) \
  extern "C" __global__ void __launch_bounds__(256) name(unsigned to, void* out, const kind::Stored* x, word64 n) { cast_floats<kind>(to, out, x, n); }
KERNEL_OF(cast_f16, F16)
KERNEL_OF(cast_bf16, BF16)
KERNEL_OF(cast_f32, F32)
KERNEL_OF(cast_f64, FromF64)
#undef KERNEL_OF

#define KERNEL_OF(name, type, is_signed) \
  extern "C" __global__ void __launch_bounds__(256) name(unsigned to, void* out, const type* x, word64 n) { cast_integers<type, is_signed>(to, out, x, n); }
KERNEL_OF(cast_u8, uint8_t, false)
KERNEL_OF(cast_u16, uint16_t, false)
KERNEL_OF(cast_u32, uint32_t, false)
KERNEL_OF(cast_u64, uint64_t, false)
KERNEL_OF(cast_i8, int8_t, true)
KERNEL_OF(cast_i16, int16_t, true)
KERNEL_OF(cast_i32, int32_t, true)
KERNEL_OF(cast_i64, int64_t, true)
#undef KERNEL_OF
