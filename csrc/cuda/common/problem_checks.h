// Checks of a problem before its kernels are launched.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Returns an error if elements have 32 bits.
inline Status check_half_elements(const Problem& problem) {
  if (problem.element_type != ElementType::kFloat32) return {};
  return Status::invalid_argument("query has dtype float32, but must have float16 or bfloat16");
}

/// Returns an error if a head dimension is not a multiple of `step`, or if it is larger than `largest`.
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

/// Returns an error if a token would have 2^31 bytes or more with heads of `largest_head_dim` elements. Elements have
/// `largest_element` bytes.
inline Status check_token_bytes(const Problem& problem, std::int64_t largest_head_dim, std::int64_t largest_element) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (problem.heads <= kMost / (largest_head_dim * largest_element)) return {};
  return Status::invalid_argument("query has " + std::to_string(problem.heads) +
                                  " heads, with which a token has 2^31 bytes or more");
}

/// Returns an error if an array has 2^31 rows or more. Each head of each token is a row.
inline Status check_rows(const Problem& problem) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const auto& [name, tokens, heads] :
       {std::tuple{"query", problem.queries(), problem.heads}, std::tuple{"key", problem.keys(), problem.heads_kv},
        std::tuple{"additional_keys", problem.additional_kv, problem.heads_kv}}) {
    // Each factor fits into 31 bits, so the product of two factors fits into 64 bits. This product is checked before it
    // is multiplied by the third factor.
    if (tokens > kMost || tokens * heads > kMost || tokens * heads * problem.batch > kMost) {
      return Status::invalid_argument(std::string(name) + " has 2^31 heads of all its tokens or more");
    }
  }
  return {};
}

/// Returns an error if a dimension wraps, for kernels that do not support this.
inline Status check_no_seams(const Problem& problem) {
  if (!wraps(problem)) return {};
  return Status::invalid_argument("a dimension wraps, but the kernels for these tiles have no windows that wrap");
}

}  // namespace natten_jax
