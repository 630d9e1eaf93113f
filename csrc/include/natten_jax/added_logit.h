// Operands that are added to logits: key biases, relative biases and sinks.
#pragma once

#include <cfloat>
#include <cmath>

#include "natten_jax/windows.h"

namespace natten_jax {

/// A bias that is no greater hides its key, as -infinity does: half of the lowest float. Masks that are made with the
/// lowest number of a type so mean the same in every kernel, whatever is added to them or multiplied with them.
constexpr float kHiddenLogit = 0.5f * -FLT_MAX;

/// The largest bias as a term of products: its sum with a product does not overflow.
constexpr float kLargestProduct = 0.5f * FLT_MAX;

/// An operand as kernels add it: -infinity where it hides its key. A logit of infinity has no softmax: it becomes NaN.
NATTEN_JAX_HOST_DEVICE inline float added_logit(float bias) {
  const float not_above = bias < INFINITY ? bias : NAN;
  return bias <= kHiddenLogit ? -INFINITY : not_above;
}

/// The same as a term of unscaled products of queries and keys.
///
/// Args:
///   bias: the operand.
///   product: the bias over the scale of the logits. Where it is too large it becomes the largest number that may be
///     added to a finite product, so that it neither hides its key nor turns into NaN beside one that does.
NATTEN_JAX_HOST_DEVICE inline float added_product(float bias, float product) {
  const float finite = fminf(fmaxf(product, -kLargestProduct), kLargestProduct),
              not_above = bias < INFINITY ? finite : NAN;
  return bias <= kHiddenLogit ? -INFINITY : not_above;
}

}  // namespace natten_jax
