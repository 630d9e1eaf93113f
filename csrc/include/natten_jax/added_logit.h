// Operands that are added to logits: key biases, relative biases and sinks.
#pragma once

#include <cfloat>
#include <cmath>

#include "natten_jax/windows.h"

namespace natten_jax {

/// A bias at or below this number hides its key (masks it out), as -infinity does. The number is half of the lowest
/// float32. So masks with the lowest float32 hide keys in every kernel, even after a kernel has added a number to a
/// bias or multiplied it.
constexpr float kHiddenLogit = 0.5f * -FLT_MAX;

/// Biases above this number are clipped to it. It stays finite if it is converted to base 2, or added to a product of a
/// query and a key.
constexpr float kLargestLogit = 0.5f * FLT_MAX;

/// Converts an operand to the number that kernels add to a logit. If the operand hides its key, the result is
/// -infinity. Infinity becomes NaN, because the softmax of an infinite logit is undefined.
NATTEN_JAX_HOST_DEVICE inline float added_logit(float bias) {
  const float finite_or_nan = bias < INFINITY ? fminf(bias, kLargestLogit) : NAN;
  return bias <= kHiddenLogit ? -INFINITY : finite_or_nan;
}

/// Clips a number to the range from -kLargestLogit to kLargestLogit. The result is finite for every number, including
/// infinities and NaN.
NATTEN_JAX_HOST_DEVICE inline float clipped_by_min_max(float x) {
  return fminf(fmaxf(x, -kLargestLogit), kLargestLogit);
}

/// Clips a number to the range of clipped_by_min_max, in one instruction if the device has it.
NATTEN_JAX_HOST_DEVICE inline float clipped_logit(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  float result;  // the smaller of both magnitudes, with the product of both signs
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(kLargestLogit));
  return result;
#else
  return clipped_by_min_max(x);
#endif
}

/// Converts an operand like added_logit, but to a term that kernels add to products of queries and keys before these
/// are scaled.
///
/// Args:
///   bias: the operand.
///   clipped_product: `bias` divided by the scale of the logits, and clipped so that its sum with a product is finite.
///     Without clipping, a finite bias could become -infinity, which hides its key, or infinity, whose softmax is NaN.
NATTEN_JAX_HOST_DEVICE inline float added_product(float bias, float clipped_product) {
  // If the bias hides its key, the product below is -infinity. Otherwise the product is zero if the bias is finite, and
  // NaN if the bias is infinity or NaN. A product of NaN makes the result NaN.
  const float factor_of_bias = bias <= kHiddenLogit ? INFINITY : 0.f;
  return factor_of_bias * bias + clipped_product;
}

}  // namespace natten_jax
