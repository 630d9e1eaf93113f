// Biases of keys as kernels add them: to products of queries and keys, so that the softmax knows nothing of them.
#pragma once

#include <cfloat>
#include <cmath>
#include <cute/config.hpp>

namespace natten_jax {

/// A bias in products of queries and keys, of which a logit is `products_per_logit`. What is no number in there, for a
/// scale next to zero, is the largest one; only minus infinity hides.
CUTE_DEVICE float bias_in_products(float bias, float products_per_logit) {
  return bias == -INFINITY ? bias : fminf(fmaxf(bias * products_per_logit, -FLT_MAX), FLT_MAX);
}

}  // namespace natten_jax
