// Conversion of key biases to terms of the unscaled products of queries and keys. Kernels add them to these products,
// so the code of the softmax does not depend on biases.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/arithmetic.cuh"
#include "natten_jax/added_logit.h"

namespace natten_jax {

/// Factor that converts a bias to a term of unscaled products: 1 / `scale`, where `scale` is the scale of the logits.
/// It is finite even for denormal scales, so that a bias of zero stays zero.
CUTE_DEVICE float products_per_logit(float scale) {
  return fminf(1.f / scale, FLT_MAX);
}

/// Computes products_per_logit faster, to about 1 ulp.
CUTE_DEVICE float fast_products_per_logit(float scale) {
  return fminf(fast_reciprocal(scale), FLT_MAX);
}

/// Converts a bias to a term of unscaled products.
CUTE_DEVICE float bias_in_products(float bias, float products_per_logit) {
  return added_product(bias, clipped_logit(bias * products_per_logit));
}

}  // namespace natten_jax
