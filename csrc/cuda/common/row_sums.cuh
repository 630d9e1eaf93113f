// Reductions over the rows of an accumulator. In the layouts of mma and wgmma, four neighboring lanes share a row.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace natten_jax {

/// Sum of a row, given the partial sum of each of its four lanes.
CUTE_DEVICE float sum_of_row(float lane_sum) {
  lane_sum += __shfl_xor_sync(0xffffffffu, lane_sum, 1);
  return lane_sum + __shfl_xor_sync(0xffffffffu, lane_sum, 2);
}

/// Maximum of a row, given the maximum of each of its four lanes.
CUTE_DEVICE float largest_of_row(float lane_maximum) {
  lane_maximum = fmaxf(lane_maximum, __shfl_xor_sync(0xffffffffu, lane_maximum, 1));
  return fmaxf(lane_maximum, __shfl_xor_sync(0xffffffffu, lane_maximum, 2));
}

/// Factor that normalizes the output of a row, given the sum of its weights. If the row has no keys, sum and factor are
/// zero.
CUTE_DEVICE float normalisation(float sum) {
  return sum == 0.f ? 0.f : fast_reciprocal(sum);
}

}  // namespace natten_jax
