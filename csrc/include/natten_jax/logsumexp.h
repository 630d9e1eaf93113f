// Logsumexp of a row's logits with more digits than a float32, as the backward passes need it.
//
// Kernels compute in base 2. In base 2, a row's logsumexp is the sum of two float32 numbers. The first number is
// base2_logsumexp of the natural logarithm that the forward pass returns. The second number is a remainder.
//
// Without the remainder, the rounding error of the logsumexp would cause errors of the weights exp(logit - logsumexp).
// The errors would be about 1% for logits of about 10^5. For logits above 10^7, the weights could be wrong by any
// factor.
#pragma once

#include <cmath>
#include <cstdint>

#include "natten_jax/windows.h"

namespace natten_jax {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

/// The logsumexp in base 2, rounded to float32. The compiler must not fuse this multiplication with a later
/// subtraction.
NATTEN_JAX_HOST_DEVICE inline float base2_logsumexp(float logsumexp) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(logsumexp, kLog2E);
#else
  float rounded = logsumexp * kLog2E;
  asm("" : "+m"(rounded));
  return rounded;
#endif
}

/// Remainders of at least this magnitude are packed differently. They occur for logits above 2^40. A float32 sum of
/// their `distance` and `log2_sum` would lose digits of `log2_sum`. Neighboring float32 logits of this size are so far
/// apart that only the keys with the row's largest logit have weights above zero. These weights are equal.
constexpr float kPackedRemainder = 0x1p18f;

/// Difference between a row's exact logsumexp and the rounded one, in base 2. It is the sum of both fields.
/// `pack_remainder` packs the two fields into the single number that arrays store.
struct Remainder {
  float distance;  ///< Logit to which the row's weights are relative, minus the rounded logsumexp; in base 2.
  float log2_sum;  ///< Base-2 logarithm of the sum of these weights; zero if `distance` includes it.
};

/// A row's logsumexp, as a natural logarithm.
struct Logsumexp {
  float value;
  Remainder remainder;
};

constexpr std::uint32_t kPackedBits = 0xfff;
constexpr float kPackedUnit = 0x1p-7f;

/// Rounds a distance to the number that a packed remainder holds. Large distances are rounded down, so that their last
/// 12 bits can hold the logarithm of the sum. Equal distances stay equal. Unequal large distances differ by far more
/// than the rounding.
NATTEN_JAX_HOST_DEVICE inline float packed_distance(float distance) {
  if (!(__builtin_fabsf(distance) >= kPackedRemainder)) return distance;
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, distance) + (distance < 0.f ? kPackedBits : 0);
  return __builtin_bit_cast(float, bits & ~kPackedBits);
}

/// Packs a remainder into one number. If its magnitude is below kPackedRemainder, the number is the sum of both fields.
/// Otherwise its last 12 bits hold `log2_sum` in units of 2^-7.
NATTEN_JAX_HOST_DEVICE inline float pack_remainder(const Remainder& remainder) {
  const float sum = remainder.distance + remainder.log2_sum;
  if (!(fmaxf(__builtin_fabsf(remainder.distance), __builtin_fabsf(sum)) >= kPackedRemainder)) return sum;
  const bool is_large = __builtin_fabsf(remainder.distance) >= kPackedRemainder;
  const float distance = is_large ? packed_distance(remainder.distance) : kPackedRemainder;
  const float log2_sum = is_large ? remainder.log2_sum : sum - kPackedRemainder;
  const float units = fminf(fmaxf(log2_sum / kPackedUnit + 0.5f, 0.f), static_cast<float>(kPackedBits));
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, distance) | static_cast<std::uint32_t>(units));
}

/// Unpacks a remainder. The weight of a logit is exp2(min(d - distance, 0) - log2_sum), where d is the logit minus the
/// rounded logsumexp, in base 2. For the row's largest logit, d - distance may be positive, because a large distance
/// was rounded down; the minimum corrects this.
NATTEN_JAX_HOST_DEVICE inline Remainder unpack_remainder(float remainder) {
  if (!(__builtin_fabsf(remainder) >= kPackedRemainder)) return {remainder, 0.f};
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, remainder);
  return {__builtin_bit_cast(float, bits & ~kPackedBits), static_cast<float>(bits & kPackedBits) * kPackedUnit};
}

/// Remainder of a row's logsumexp.
///
/// Args:
///   logsumexp: the rounded logsumexp, a natural logarithm.
///   shift: logit to which the row's weights are relative, in base 2.
///   log2_sum: base-2 logarithm of the sum of these weights.
NATTEN_JAX_HOST_DEVICE inline Remainder logsumexp_remainder(float logsumexp, float shift, float log2_sum) {
  return {shift - base2_logsumexp(logsumexp), log2_sum};
}

/// Remainder of a row's logsumexp if the weights are relative to `logit` times `factor`. The product is not rounded.
NATTEN_JAX_HOST_DEVICE inline Remainder logsumexp_remainder(float logsumexp, float logit, float factor,
                                                            float log2_sum) {
  return {__builtin_fmaf(logit, factor, -base2_logsumexp(logsumexp)), log2_sum};
}

}  // namespace natten_jax
