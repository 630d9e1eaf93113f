// Counts of a launch's tiles, which checked problems can make larger than any integer.
#pragma once

#include <cstdint>

namespace natten_jax {

/// A product of counts that does not wrap around: one of more than 2^31 is some number of more than 2^31.
inline std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kEnough = std::int64_t{1} << 31;
  return a == 0 || b == 0 ? 0 : a > kEnough || b > kEnough ? kEnough + 1 : a * b;
}

}  // namespace natten_jax
