// Elements of any plain dtype: their values, and keys that order as they do (kernels/src/cpu/ops/keys.rs).
#pragma once
#include "generic.cuh"

/// The plain dtypes, in the order of `PLAIN` in ops/layout.rs.
enum Dtype : unsigned { OF_BOOL, OF_U8, OF_U16, OF_U32, OF_U64, OF_I8, OF_I16, OF_I32, OF_I64, OF_F16, OF_BF16, OF_F32, OF_F64 };

template <class T> DEVICE T element(const void* x, word64 i) { return static_cast<const T*>(x)[i]; }

/// The value of an integer in 64 bits, its sign extended; of a bool 0 or 1.
DEVICE word64 whole_at(unsigned dtype, const void* x, word64 i) {
  switch (dtype) {
    case OF_BOOL: return element<uint8_t>(x, i) != 0;
    case OF_U8: return element<uint8_t>(x, i);
    case OF_U16: return element<uint16_t>(x, i);
    case OF_U32: return element<uint32_t>(x, i);
    case OF_I8: return word64((long long)element<int8_t>(x, i));
    case OF_I16: return word64((long long)element<int16_t>(x, i));
    case OF_I32: return word64((long long)element<int32_t>(x, i));
    default: return element<uint64_t>(x, i);
  }
}

/// An f32, or a half as one.
DEVICE float single_at(unsigned dtype, const void* x, word64 i) {
  switch (dtype) {
    case OF_F16: return half_to_f32(element<uint16_t>(x, i));
    case OF_BF16: return bf16_to_f32(element<uint16_t>(x, i));
    default: return element<float>(x, i);
  }
}

/// An index; what no signed number holds is the largest one, which is outside of every axis.
DEVICE long long index_at(unsigned dtype, const void* x, word64 i) {
  word64 bits = whole_at(dtype, x, i);
  return dtype == OF_U64 && bits >> 63 ? (long long)(~word64(0) >> 1) : (long long)bits;
}

/// An index with negative ones counted from the end; below 0 where it is outside, after saying so.
DEVICE long long wrapped(long long index, word64 n, word64* bad) {
  long long at = index < 0 ? index + (long long)n : index;
  if (at >= 0 && at < (long long)n) return at;
  report(bad, index, n > 0 ? n : 1);
  return -1;
}

constexpr long long MOST_KEY = (long long)(~word64(0) >> 1), LEAST_KEY = -MOST_KEY - 1;

/// Signed bits of a float, turned over so that they order as it does.
template <class T> DEVICE long long float_key(T bits, T infinity, bool zeros_are_equal) {
  constexpr T most = T(~(T(1) << (8 * sizeof(T) - 1)));
  T magnitude = T(bits & most);
  if (magnitude > infinity) return MOST_KEY;
  if (zeros_are_equal && magnitude == 0) return 0;
  return bits < 0 ? (long long)T(bits ^ most) : (long long)bits;
}

/// An integer that orders as the element does: NaN is the greatest, −0 is below 0 unless they are equal.
DEVICE long long key_at(unsigned dtype, const void* x, word64 i, bool zeros_are_equal) {
  switch (dtype) {
    case OF_F16: return float_key<int16_t>(element<int16_t>(x, i), 0x7c00, zeros_are_equal);
    case OF_BF16: return float_key<int16_t>(element<int16_t>(x, i), 0x7f80, zeros_are_equal);
    case OF_F32: return float_key<int32_t>(element<int32_t>(x, i), 0x7f800000, zeros_are_equal);
    case OF_F64: return float_key<int64_t>(element<int64_t>(x, i), int64_t(0x7ff0000000000000), zeros_are_equal);
    case OF_U64: return (long long)(element<uint64_t>(x, i) ^ word64(LEAST_KEY));
    default: return (long long)whole_at(dtype, x, i);
  }
}

DEVICE bool is_float(unsigned dtype) { return dtype >= OF_F16; }

/// The same with the order turned over where `flip` is −1; a NaN stays the greatest.
DEVICE long long flipped(unsigned dtype, long long key, long long flip) { return is_float(dtype) && key == MOST_KEY ? key : key ^ flip; }

/// Stores the element that has this key (with both zeros apart).
DEVICE void put_key(unsigned dtype, void* out, word64 i, long long key, long long flip) {
  bool nan = is_float(dtype) && key == MOST_KEY;
  key ^= flip;
  switch (dtype) {
    case OF_BOOL: case OF_U8: case OF_I8: static_cast<uint8_t*>(out)[i] = uint8_t(key); break;
    case OF_U16: case OF_I16: static_cast<uint16_t*>(out)[i] = uint16_t(key); break;
    case OF_U32: case OF_I32: static_cast<uint32_t*>(out)[i] = uint32_t(key); break;
    case OF_U64: static_cast<uint64_t*>(out)[i] = word64(key) ^ word64(LEAST_KEY); break;
    case OF_I64: static_cast<uint64_t*>(out)[i] = word64(key); break;
    case OF_F16: static_cast<uint16_t*>(out)[i] = nan ? 0x7e00 : uint16_t(key < 0 ? key ^ 0x7fff : key); break;
    case OF_BF16: static_cast<uint16_t*>(out)[i] = nan ? 0x7fc0 : uint16_t(key < 0 ? key ^ 0x7fff : key); break;
    case OF_F32: static_cast<uint32_t*>(out)[i] = nan ? 0x7fc00000u : uint32_t(key < 0 ? key ^ 0x7fffffff : key); break;
    case OF_F64: static_cast<uint64_t*>(out)[i] = nan ? word64(0x7ff8) << 48 : word64(key < 0 ? key ^ MOST_KEY : key); break;
  }
}

/// Copies an element of so many bytes: 1, 2, 4 or 8; from nowhere it is zeros.
DEVICE void copy_element(unsigned bytes, void* out, word64 i, const void* x, long long at) {
  switch (bytes) {
    case 1: static_cast<uint8_t*>(out)[i] = at < 0 ? 0 : element<uint8_t>(x, word64(at)); break;
    case 2: static_cast<uint16_t*>(out)[i] = at < 0 ? 0 : element<uint16_t>(x, word64(at)); break;
    case 4: static_cast<uint32_t*>(out)[i] = at < 0 ? 0 : element<uint32_t>(x, word64(at)); break;
    default: static_cast<uint64_t*>(out)[i] = at < 0 ? 0 : element<uint64_t>(x, word64(at)); break;
  }
}
