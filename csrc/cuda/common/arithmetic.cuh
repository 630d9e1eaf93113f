// Common arithmetic of all kernels' softmaxes: element types, single-instruction functions, and bounds.
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>
#include <tuple>

#include "natten_jax/logsumexp.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Properties of an element type in kernels. Types without a specialisation do not compile.
///
///   Pair           two neighboring elements, with CUDA's conversions
///   kLargestExact  the largest logit or logsumexp, in base 2 or not, whose rounding does not change weights that are
///                  relative to it (natten_jax/logsumexp.h)
///   pack           two numbers in one word, the first in the low half
template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<float> {
  using Pair = float2;
  static constexpr float kLargestExact = 16.f;
};

template <>
struct ElementTraits<cutlass::half_t> {
  using Pair = __half2;
  static constexpr float kLargestExact = 256.f;

  CUTE_DEVICE static std::uint32_t pack(float low, float high) {
    std::uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
};

template <>
struct ElementTraits<cutlass::bfloat16_t> {
  using Pair = __nv_bfloat162;
  static constexpr float kLargestExact = 256.f;

  CUTE_DEVICE static std::uint32_t pack(float low, float high) {
    std::uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
};

/// Element type of a problem, by its number.
template <ElementType kType>
using ElementOf =
    std::tuple_element_t<static_cast<int>(kType), std::tuple<float, cutlass::half_t, cutlass::bfloat16_t>>;

/// Packs two numbers into a word, the first in the low half.
template <class Element>
CUTE_DEVICE std::uint32_t pack(float low, float high) {
  return ElementTraits<Element>::pack(low, high);
}

/// 2**x to about 2 ulp; flushes denormal results to zero.
CUTE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) to about 2^-22, or to 3 ulp if that is more; -infinity for denormal numbers and zero. Used for rows' sums of
/// weights, which are never denormal. All results that depend on a sum use the same logarithm of it.
CUTE_DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Maximum exponent of an online softmax's weights, in base 2, before earlier results are rescaled. Most tiles then
/// rescale nothing, and half precision holds the weights (the bound is FlashAttention-4's).
constexpr float kHeadroom = 8.f;

/// True if weights relative to a row's logsumexp need its remainder. Rows without keys, whose logsumexp is infinite, do
/// not.
template <class Element>
CUTE_DEVICE bool has_remainder(float logsumexp) {
  return fabsf(logsumexp) > ElementTraits<Element>::kLargestExact && fabsf(logsumexp) < INFINITY;
}

/// Copies a number to another register, opaque to the compiler. If an accumulator starts with equal numbers,
/// ptxas would keep one register for both and copy it before each matrix instruction.
CUTE_DEVICE float same_in_another_register(float x) {
  float copy;
  asm volatile("min.NaN.f32 %0, %1, 0f7f800000;" : "=f"(copy) : "f"(x));
  return copy;
}

/// Clamps the exponent of a weight, which rounding must not make larger than one. NaN stays NaN.
CUTE_DEVICE float at_most_zero(float exponent) {
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(exponent));
  return exponent;
}

/// Exponent of a logit's weight relative to a logsumexp with a remainder, in base 2.
CUTE_DEVICE float exponent_of_large(float logit, float exponent_scale, float logsumexp, float remainder) {
  const Remainder parts = unpack_remainder(remainder);
  return at_most_zero(fmaf(logit, exponent_scale, -logsumexp) - parts.distance) - parts.log2_sum;
}

/// Weight of a logit relative to a logsumexp with a remainder.
CUTE_DEVICE float weight_of_large(float logit, float exponent_scale, float logsumexp, float remainder) {
  return fast_exp2(exponent_of_large(logit, exponent_scale, logsumexp, remainder));
}

/// Largest logit in base 2 that weights may be relative to after rounding: its rounding error is at most 2^-12.
constexpr float kLargestRounded = 4096.f;

/// 1 / x to about 1 ulp; flushes denormal numbers to zero.
CUTE_DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace natten_jax
