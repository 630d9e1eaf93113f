// Arithmetic that the softmaxes of all kernels share: element types, wrappers of single instructions, and bounds.
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>
#include <tuple>

#include "natten_jax/logsumexp.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Properties of an element type in kernels. Types without a specialization do not compile.
///
///   Pair           CUDA's type for two neighboring elements
///   kLargestExact  largest magnitude of a logsumexp, in base 2 or natural, that needs no remainder: its rounding error
///                  is negligible in the weights of the row (natten_jax/logsumexp.h)
///   pack           converts two numbers to elements in one word, the first in the low half
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

/// Type of elements in kernels, given the element type of the problem.
template <ElementType kType>
using ElementOf =
    std::tuple_element_t<static_cast<int>(kType), std::tuple<float, cutlass::half_t, cutlass::bfloat16_t>>;

/// Converts two numbers to elements in one word, the first in the low half.
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

/// log2(x) with an error of about 2^-22, or of 3 ulp if that is more. -infinity for denormal numbers and zero. Kernels
/// pass sums of weights, which are never denormal. All results that need the logarithm of such a sum use the value that
/// this function returns.
CUTE_DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Maximum exponent, in base 2, of the weights of an online softmax. Weights are relative to a reference. If a weight
/// would exceed the bound, the kernel changes the reference and rescales earlier results. The bound is small enough for
/// half precision, and so large that most tiles rescale nothing. FlashAttention-4 has the same bound.
constexpr float kHeadroom = 8.f;

/// True if the weights of a row need the remainder of its logsumexp. False for a row without keys, whose logsumexp is
/// infinite.
template <class Element>
CUTE_DEVICE bool has_remainder(float logsumexp) {
  return fabsf(logsumexp) > ElementTraits<Element>::kLargestExact && fabsf(logsumexp) < INFINITY;
}

/// Copies a number to another register, such that the compiler cannot infer that the registers hold equal numbers. If
/// two elements of an accumulator started with equal numbers, ptxas would keep them in one register, and copy it before
/// each matrix instruction.
CUTE_DEVICE float opaque_copy(float x) {
  float copy;
  asm volatile("min.NaN.f32 %0, %1, 0f7f800000;" : "=f"(copy) : "f"(x));
  return copy;
}

/// Clamps the exponent of a weight to zero, so that rounding errors cannot make the weight larger than one. NaN stays
/// NaN.
CUTE_DEVICE float at_most_zero(float exponent) {
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(exponent));
  return exponent;
}

/// Exponent, in base 2, of the weight of a logit relative to a logsumexp with a remainder.
CUTE_DEVICE float exponent_of_large(float logit, float exponent_scale, float logsumexp, float remainder) {
  const Remainder parts = unpack_remainder(remainder);
  return at_most_zero(fmaf(logit, exponent_scale, -logsumexp) - parts.distance) - parts.log2_sum;
}

/// Weight of a logit relative to a logsumexp with a remainder.
CUTE_DEVICE float weight_of_large(float logit, float exponent_scale, float logsumexp, float remainder) {
  return fast_exp2(exponent_of_large(logit, exponent_scale, logsumexp, remainder));
}

/// Largest reference of a row's weights, in base 2, that kernels may round to float32. Its rounding error is at most
/// 2^-12.
constexpr float kLargestRounded = 4096.f;

/// 1 / x to about 1 ulp; flushes denormal numbers to zero.
CUTE_DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace natten_jax
