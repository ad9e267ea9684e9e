// Several elementwise ops in one launch, as ops/group.rs makes them: what is between them never comes to memory.
//
// group_TYPE(program, inputs, at): each op gives the bits that it gives by itself; f16 and bf16 are rounded after each.
#include "generic.cuh"
#include "functions.cuh"
#include "operations.cuh"

constexpr int INPUTS = 4, MOST = 8, FUNCTIONS = 64;

/// Ops in their order, equal to `words` of ops/group.rs: a place in the list of operations.cuh, or FUNCTIONS and one in that of functions.cuh; the two operands, which are an
/// input, or INPUTS and the number of an op before it (of an op of one the second is the first again); and where its contiguous result goes, 0 for nowhere.
struct Program {
  word64 count, op[MOST], a[MOST], b[MOST], out[MOST];
};
/// Addresses; of what is not there the first one's.
struct Inputs {
  word64 at[INPUTS];
};

template <class E> DEVICE void group(const Program& program, const Inputs& inputs, const Layout& at) {
  typedef typename E::Stored Stored;
  for (word64 i = first_element(); i < at.n; i += element_step()) {
    long long offsets[INPUTS];
    place(at, i, offsets);
    float values[INPUTS + MOST];
#pragma unroll
    for (int k = 0; k < INPUTS; k++) values[k] = E::load(led_to<const Stored>(inputs.at[k]) + offsets[k]);
#pragma unroll 1
    for (int n = 0; n < int(program.count); n++) {
      unsigned op = unsigned(program.op[n]);
      float x = values[program.a[n]], y = values[program.b[n]];
      Stored rounded;
      E::store(&rounded, op < FUNCTIONS ? float_op(op, x, y) : called(op - FUNCTIONS, x, y));
      values[INPUTS + n] = E::load(&rounded);
      if (program.out[n]) led_to<Stored>(program.out[n])[i] = rounded;
    }
  }
}

#define KERNEL_OF(name, type) \
  extern "C" __global__ void __launch_bounds__(256) name(Program program, Inputs inputs, Layout at) { group<type>(program, inputs, at); }
KERNEL_OF(group_f32, F32)
KERNEL_OF(group_f16, F16)
KERNEL_OF(group_bf16, BF16)
