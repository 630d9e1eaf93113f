// Staging buffer for the results of the query gradient kernel with a relative bias.
#pragma once

#include "cuda/small/bias_table.h"

namespace natten_jax::small {

/// True if a warp stages its results in the memory of the logit gradients, after these are added up: without separate
/// memory for results, a CTA has six warps instead of four with heads of 64 and windows of 13 x 13.
constexpr bool has_results_in_sums(int record, int head_dim) {
  return bytes_of_sums(record) >= kRows * 2 * head_dim;
}

}  // namespace natten_jax::small
