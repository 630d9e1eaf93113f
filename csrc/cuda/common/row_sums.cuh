// Reductions over rows of an accumulator, whose elements are shared by four neighboring lanes (mma and wgmma layouts).
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace natten_jax {

/// Sum of a row over the four lanes.
CUTE_DEVICE float sum_of_row(float of_lane) {
  of_lane += __shfl_xor_sync(0xffffffffu, of_lane, 1);
  return of_lane + __shfl_xor_sync(0xffffffffu, of_lane, 2);
}

/// Maximum of a row over the four lanes.
CUTE_DEVICE float largest_of_row(float of_lane) {
  of_lane = fmaxf(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 1));
  return fmaxf(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 2));
}

/// Factor of a row's output, given the sum of its weights. The sum is zero if the row sees no keys.
CUTE_DEVICE float normalisation(float sum) {
  return sum == 0.f ? 0.f : fast_reciprocal(sum);
}

}  // namespace natten_jax
