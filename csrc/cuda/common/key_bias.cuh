// Key biases as kernels add them: to products of queries and keys, so that the softmax does not depend on them.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/arithmetic.cuh"
#include "natten_jax/added_logit.h"

namespace natten_jax {

/// Factor that converts a bias to a term of products, given the scale of the logits. Finite for denormal scales, so
/// that a bias of zero stays zero.
CUTE_DEVICE float products_per_logit(float scale) {
  return fminf(1.f / scale, FLT_MAX);
}

/// Approximate products_per_logit, to about 1 ulp.
CUTE_DEVICE float fast_products_per_logit(float scale) {
  return fminf(fast_reciprocal(scale), FLT_MAX);
}

/// Converts a bias to a term of products.
CUTE_DEVICE float bias_in_products(float bias, float products_per_logit) {
  return added_product(bias, clipped_logit(bias * products_per_logit));
}

}  // namespace natten_jax
