// Staging buffer for the results of the query gradient kernel with a relative bias.
#pragma once

#include "cuda/small/bias_table.h"

namespace natten_jax::small {

/// True if a warp's results fit into the memory of its logit gradients. The results are then staged there, after the
/// logit gradients have been added up. Without separate memory for results, a CTA has six warps instead of four, for
/// example with heads of 64 and windows of 13 x 13.
constexpr bool has_results_in_sums(int record, int head_dim) {
  return bytes_of_sums(record) >= kRows * 2 * head_dim;
}

}  // namespace natten_jax::small
