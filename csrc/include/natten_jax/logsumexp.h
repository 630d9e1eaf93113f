// Logsumexp of a row's logits with more digits than a float32, as the backward passes need it.
//
// Kernels compute in base 2. A row's logsumexp is the sum of two float32 numbers: base2_logsumexp of the natural
// logarithm that the forward pass returns, and a remainder. Without the remainder, weights exp(logit - logsumexp) would
// have the rounding error of the logsumexp: 1% for logits of the order of 10^5, and any factor for logits larger than
// 10^7.
#pragma once

#include <cmath>
#include <cstdint>

#include "natten_jax/windows.h"

namespace natten_jax {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

/// The logsumexp in base 2, rounded to float32. Compilers must not fuse the product with a later subtraction.
NATTEN_JAX_HOST_DEVICE inline float base2_logsumexp(float logsumexp) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(logsumexp, kLog2E);
#else
  float rounded = logsumexp * kLog2E;
  asm("" : "+m"(rounded));
  return rounded;
#endif
}

/// Distances of at least this magnitude, which occur for logits above 2^40, are so large that a float32 sum with
/// `log2_sum` would lose digits of `log2_sum`. Neighboring float32 logits are then so far apart that the keys with a
/// row's largest logit have equal weights, and all other keys have weights of zero.
constexpr float kPackedRemainder = 0x1p18f;

/// Difference of a row's exact logsumexp in base 2 and its rounded one. Arrays store it as one number: see
/// `pack_remainder`.
struct Remainder {
  float distance;  ///< From the rounded logsumexp to the reference of the row's weights, in base 2.
  float log2_sum;  ///< Logarithm of the sum of these weights; zero if it is part of `distance`.
};

/// A row's logsumexp, as a natural logarithm.
struct Logsumexp {
  float value;
  Remainder remainder;
};

constexpr std::uint32_t kPackedBits = 0xfff;
constexpr float kPackedUnit = 0x1p-7f;

/// Rounds a distance as remainders store it. A large distance is rounded down to leave its last 12 bits to the
/// logarithm of the sum: equal distances stay equal, and unequal distances differ by far more.
NATTEN_JAX_HOST_DEVICE inline float packed_distance(float distance) {
  if (!(__builtin_fabsf(distance) >= kPackedRemainder)) return distance;
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, distance) + (distance < 0.f ? kPackedBits : 0);
  return __builtin_bit_cast(float, bits & ~kPackedBits);
}

/// Packs a remainder into one number. In a large number the last 12 bits hold the logarithm in units of 2^-7.
NATTEN_JAX_HOST_DEVICE inline float pack_remainder(const Remainder& remainder) {
  const float sum = remainder.distance + remainder.log2_sum;
  if (!(fmaxf(__builtin_fabsf(remainder.distance), __builtin_fabsf(sum)) >= kPackedRemainder)) return sum;
  const bool is_large = __builtin_fabsf(remainder.distance) >= kPackedRemainder;
  const float distance = is_large ? packed_distance(remainder.distance) : kPackedRemainder;
  const float log2_sum = is_large ? remainder.log2_sum : sum - kPackedRemainder;
  const float units = fminf(fmaxf(log2_sum / kPackedUnit + 0.5f, 0.f), static_cast<float>(kPackedBits));
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, distance) | static_cast<std::uint32_t>(units));
}

/// Unpacks a remainder. The weight of a logit is exp2(min(d - distance, 0) - log2_sum), where d is the distance of the
/// logit from the rounded logsumexp. The minimum undoes the rounding of the distance.
NATTEN_JAX_HOST_DEVICE inline Remainder unpack_remainder(float remainder) {
  if (!(__builtin_fabsf(remainder) >= kPackedRemainder)) return {remainder, 0.f};
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, remainder);
  return {__builtin_bit_cast(float, bits & ~kPackedBits), static_cast<float>(bits & kPackedBits) * kPackedUnit};
}

/// Remainder of a row's logsumexp.
///
/// Args:
///   logsumexp: natural logarithm, as rounded.
///   shift: reference of the row's weights, in base 2.
///   log2_sum: logarithm of the sum of these weights.
NATTEN_JAX_HOST_DEVICE inline Remainder logsumexp_remainder(float logsumexp, float shift, float log2_sum) {
  return {shift - base2_logsumexp(logsumexp), log2_sum};
}

/// Remainder if the weights are relative to a logit times a factor, with an exact product.
NATTEN_JAX_HOST_DEVICE inline Remainder logsumexp_remainder(float logsumexp, float logit, float factor,
                                                            float log2_sum) {
  return {__builtin_fmaf(logit, factor, -base2_logsumexp(logsumexp)), log2_sum};
}

}  // namespace natten_jax
