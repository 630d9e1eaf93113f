// The logsumexp of a row's logits as the backward passes need it: to more digits than one float32 number has.
//
// Kernels compute in base 2, where a row's logsumexp is the sum of two float32 numbers: base2_logsumexp of the natural
// logarithm that the forward pass gives its callers, and a remainder beside it. Without the remainder, weights
// exp(logit - logsumexp) would be wrong by the rounding of the logsumexp: by 1% where logits are of the order of 10^5,
// by any factor where they are larger than 10^7.
#pragma once

#include "natten_jax/windows.h"

namespace natten_jax {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

/// Rounded to float32 before anything is subtracted: compilers must not fuse it into what uses it.
NATTEN_JAX_HOST_DEVICE inline float base2_logsumexp(float logsumexp) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(logsumexp, kLog2E);
#else
  float rounded = logsumexp * kLog2E;
  asm("" : "+m"(rounded));
  return rounded;
#endif
}

/// What base2_logsumexp leaves out of a row's logsumexp.
///
/// Args:
///   logsumexp: natural logarithm, as it was rounded.
///   shift: in base 2, what the row's weights are relative to.
///   log2_sum: logarithm of the sum of those weights.
NATTEN_JAX_HOST_DEVICE inline float logsumexp_remainder(float logsumexp, float shift, float log2_sum) {
  return (shift - base2_logsumexp(logsumexp)) + log2_sum;
}

/// The same where the weights are relative to a logit whose product with a factor is not rounded.
NATTEN_JAX_HOST_DEVICE inline float logsumexp_remainder(float logsumexp, float logit, float factor, float log2_sum) {
  return __builtin_fmaf(logit, factor, -base2_logsumexp(logsumexp)) + log2_sum;
}

}  // namespace natten_jax
