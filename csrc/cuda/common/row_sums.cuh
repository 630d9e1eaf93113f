// Rows of an accumulator, whose elements four neighboring lanes share, as mma and wgmma lay them out.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace natten_jax {

/// The sum of a row's numbers in the four lanes.
CUTE_DEVICE float sum_of_row(float of_lane) {
  of_lane += __shfl_xor_sync(0xffffffffu, of_lane, 1);
  return of_lane + __shfl_xor_sync(0xffffffffu, of_lane, 2);
}

/// The largest of them.
CUTE_DEVICE float largest_of_row(float of_lane) {
  of_lane = fmaxf(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 1));
  return fmaxf(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 2));
}

/// What a row's output is multiplied with, given the sum of its weights; nothing is seen where that is zero.
CUTE_DEVICE float normalisation(float sum) {
  return sum == 0.f ? 0.f : fast_reciprocal(sum);
}

}  // namespace natten_jax
