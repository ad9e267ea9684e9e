// Elementary functions on operands of any strides, as ops/functions.rs launches them, with the bits of kernels/src/cpu/math.
//
// function_TYPE(op, out, a, b, at): `op` is a place in the list below, which is that of ops/functions.rs; `out` is contiguous. f16 and bf16 are computed in f32 and rounded
// once. geglu_f32(out, a, b, n) is of contiguous numbers.
#include "generic.cuh"
#include "math.cuh"

enum Op : unsigned {
  EXP, EXPM1, LOG, LOG1P, LOG2, SIN, COS, TAN, ASIN, ACOS, ATAN, SINH, COSH, TANH, ASINH, ACOSH, ATANH, ERF, ERFINV, SIGMOID, SILU,
  // of two
  POW, ATAN2, LOGADDEXP,
};

DEVICE float called(unsigned op, float x, float y) {
  switch (op) {
    case EXP: return math::exp(x);
    case EXPM1: return math::expm1(x);
    case LOG: return math::log(x);
    case LOG1P: return math::log1p(x);
    case LOG2: return math::log2(x);
    case SIN: return math::sin(x);
    case COS: return math::cos(x);
    case TAN: return math::tan(x);
    case ASIN: return math::asin(x);
    case ACOS: return math::acos(x);
    case ATAN: return math::atan(x);
    case SINH: return math::sinh(x);
    case COSH: return math::cosh(x);
    case TANH: return tanh_f32(x);
    case ASINH: return math::asinh(x);
    case ACOSH: return math::acosh(x);
    case ATANH: return math::atanh(x);
    case ERF: return math::erf(x);
    case ERFINV: return math::erfinv(x);
    case SIGMOID: return math::sigmoid(x);
    case SILU: return math::silu(x);
    case POW: return math::pow(x, y);
    case ATAN2: return math::atan2(x, y);
    case LOGADDEXP: return math::logaddexp(x, y);
    default: return quiet_nan();
  }
}

template <class E> DEVICE void function(unsigned op, typename E::Stored* out, const typename E::Stored* a, const typename E::Stored* b, const Layout& at) {
  for (word64 i = first_element(); i < at.n; i += element_step()) {
    long long offsets[2];
    place(at, i, offsets);
    E::store(out + i, called(op, E::load(a + offsets[0]), op < POW ? 0.0f : E::load(b + offsets[1])));
  }
}

#define KERNEL_OF(name, type)                                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) name(unsigned op, type::Stored* out, const type::Stored* a, const type::Stored* b, Layout at) { \
    function<type>(op, out, a, b, at);                                                                                                                          \
  }
KERNEL_OF(function_f32, F32)
KERNEL_OF(function_f16, F16)
KERNEL_OF(function_bf16, BF16)
#undef KERNEL_OF

/// gelu_tanh(a) · b, in the order of kernels/src/cpu/elementwise/float.rs.
extern "C" __global__ void __launch_bounds__(256) geglu_f32(float* out, const float* a, const float* b, word64 n) {
  for (word64 i = first_element(); i < n; i += element_step()) {
    float x = a[i], inner = x * (x * x * 0.044715f + 1.0f) * 0.7978846f;
    out[i] = x * ((tanh_f32(inner) + 1.0f) * 0.5f) * b[i];
  }
}
