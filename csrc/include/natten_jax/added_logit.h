// Operands that are added to logits: key biases, relative biases and sinks.
#pragma once

#include <cfloat>
#include <cmath>

#include "natten_jax/windows.h"

namespace natten_jax {

/// Biases at or below this hide their key, as -infinity does. It is half of the lowest float, so that masks made with
/// the lowest number of a type mean the same in every kernel, whatever is added to or multiplied with them.
constexpr float kHiddenLogit = 0.5f * -FLT_MAX;

/// Larger biases are clipped to this, which is finite in base 2 and in a sum with a product.
constexpr float kLargestLogit = 0.5f * FLT_MAX;

/// An operand as kernels add it: -infinity if it hides its key. Infinity becomes NaN, since its softmax is undefined.
NATTEN_JAX_HOST_DEVICE inline float added_logit(float bias) {
  const float finite_or_nan = bias < INFINITY ? fminf(bias, kLargestLogit) : NAN;
  return bias <= kHiddenLogit ? -INFINITY : finite_or_nan;
}

/// Clips a number to the magnitude of kLargestLogit. The result is finite, even if the number is not.
NATTEN_JAX_HOST_DEVICE inline float clipped_by_min_max(float x) {
  return fminf(fmaxf(x, -kLargestLogit), kLargestLogit);
}

/// Clips in the same way, in one instruction if the device has it.
NATTEN_JAX_HOST_DEVICE inline float clipped_logit(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  float result;  // both bounds in one instruction: the smaller magnitude, with the product of the signs
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(kLargestLogit));
  return result;
#else
  return clipped_by_min_max(x);
#endif
}

/// Returns added_logit as a term of unscaled products of queries and keys.
///
/// Args:
///   bias: the operand.
///   clipped_product: the bias over the scale of the logits, clipped to a number whose sum with a product is finite, so
///     that it neither hides its key nor makes another bias NaN.
NATTEN_JAX_HOST_DEVICE inline float added_product(float bias, float clipped_product) {
  // A bias times zero is zero if the bias is finite, and NaN otherwise, which makes the sum NaN.
  const float factor_of_bias = bias <= kHiddenLogit ? INFINITY : 0.f;
  return factor_of_bias * bias + clipped_product;
}

}  // namespace natten_jax
