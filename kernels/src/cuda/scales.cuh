// The scales of weights that have one for each rectangle of them.
#pragma once
#include "common.cuh"

/// Scales of rectangles of the matrices of a launch; 0: there are none. A rectangle is `height` outputs of `wide` chunks, `across` of them are side by side, and a matrix
/// has `each` (of an expert's, too). Where there are several across, a block's outputs are within one's height.
struct Scales {
  word64 values[3];
  int height, wide, across, each;
  /// Those of a launch's matrix `number`. Not by an index, for which a thread would have a copy of them all in its memory.
  __device__ __forceinline__ const float* of(int number) const { return led_to<const float>(number == 0 ? values[0] : number == 1 ? values[1] : values[2]); }
};

/// An output with its own scale, if it has one.
DEVICE float with_scale(float sum, const Scales& scales, const float* values, int output) {
  return values && scales.across == 1 ? sum * values[output / scales.height] : sum;
}
