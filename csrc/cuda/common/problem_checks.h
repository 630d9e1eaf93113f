// What launches check of a problem before its kernels run.
#pragma once

#include <cstdint>
#include <string>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// An error where elements do not have 16 bits.
inline Status check_half_elements(const Problem& problem) {
  if (problem.element_type != ElementType::kFloat32) return {};
  return Status::invalid_argument("query has dtype float32, but must have float16 or bfloat16");
}

/// An error where heads are not multiples of `step` wide, or wider than `largest`.
inline Status check_head_dims(const Problem& problem, std::int64_t step, std::int64_t largest) {
  for (const std::int64_t head_dim : {problem.head_dim, problem.head_dim_v}) {
    if (head_dim % step != 0 || head_dim > largest) {
      return Status::invalid_argument("a head dimension is " + std::to_string(head_dim) +
                                      ", but must be a multiple of " + std::to_string(step) + " and at most " +
                                      std::to_string(largest));
    }
  }
  return {};
}

}  // namespace natten_jax
