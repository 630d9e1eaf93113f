// What the softmaxes of all kernels compute with: conversions and functions that are one instruction, and a bound.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

namespace natten_jax {

/// Two numbers in one register, the first in the low half.
template <class Element>
CUTE_DEVICE std::uint32_t pack(float low, float high) {
  std::uint32_t result;
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

/// 2**x to about 2 ulp; flushes denormal results to zero.
CUTE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// How large the weights of an online softmax may become, in base 2, before earlier results are rescaled: most tiles
/// then rescale nothing, and half precision holds the weights (the bound is FlashAttention-4's).
constexpr float kHeadroom = 8.f;

/// 1 / x to about 1 ulp; flushes denormal numbers to zero.
CUTE_DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace natten_jax
