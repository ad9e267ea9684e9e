// Elementary functions on operands of any strides, as ops/elementwise.rs launches them, with the bits of kernels/src/cpu/math.
//
// function_TYPE(op, out, a, b, at): `op` is a place in the list of functions.cuh, which is that of ops/elementwise.rs; `out` is contiguous. f16 and bf16 are computed in f32 and rounded
// once. geglu_f32(out, a, b, n) is of contiguous numbers.
#include "generic.cuh"
#include "functions.cuh"

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
