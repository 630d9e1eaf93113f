// Where the kernel of query gradients with a relative bias writes its results before they go to memory.
#pragma once

#include "cuda/small/bias_table.h"

namespace natten_jax::small {

/// Whether a warp writes them where it has the gradients of logits, once these are added up: without memory for both, a
/// CTA has six warps instead of four with heads of 64 and windows of 13 x 13.
constexpr bool has_results_in_sums(int record, int head_dim) {
  return bytes_of_sums(record) >= kRows * 2 * head_dim;
}

}  // namespace natten_jax::small
