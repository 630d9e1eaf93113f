// The logsumexp of a row's logits as the backward passes need it: to more digits than one float32 number has.
//
// Kernels compute in base 2, where a row's logsumexp is the sum of two float32 numbers: base2_logsumexp of the natural
// logarithm that the forward pass gives its callers, and a remainder beside it. Without the remainder, weights
// exp(logit - logsumexp) would be wrong by the rounding of the logsumexp: by 1% where logits are of the order of 10^5,
// by any factor where they are larger than 10^7.
#pragma once

#include <cmath>
#include <cstdint>

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

/// From this magnitude on, a distance added to the logarithm of a sum in float32 loses digits of the logarithm. It
/// occurs for logits above 2^40. These are so far apart that the weights of a row are equal or zero.
constexpr float kPackedRemainder = 0x1p18f;

/// A remainder in parts.
struct RemainderParts {
  float distance;  ///< From the rounded logsumexp to what the row's weights are relative to, in base 2.
  float log2_sum;  ///< Of those weights; zero where `distance` has it.
};

constexpr std::uint32_t kPackedBits = 0xfff;
constexpr float kPackedUnit = 0x1p-7f;

/// A distance as remainders hold it. A large one is rounded down to leave its last 12 bits to the logarithm of the sum:
/// equal distances stay equal, and unequal ones differ by far more.
NATTEN_JAX_HOST_DEVICE inline float packed_distance(float distance) {
  if (!(__builtin_fabsf(distance) >= kPackedRemainder)) return distance;
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, distance) + (distance < 0.f ? kPackedBits : 0);
  return __builtin_bit_cast(float, bits & ~kPackedBits);
}

/// Packs both parts into one number. In a large number the last 12 bits hold the logarithm in units of 2^-7.
NATTEN_JAX_HOST_DEVICE inline float pack_remainder(float distance, float log2_sum) {
  if (!(__builtin_fabsf(distance) >= kPackedRemainder)) {
    const float sum = distance + log2_sum;
    if (!(__builtin_fabsf(sum) >= kPackedRemainder)) return sum;
    distance = kPackedRemainder;
    log2_sum = sum - kPackedRemainder;
  }
  const float units = fminf(fmaxf(log2_sum / kPackedUnit + 0.5f, 0.f), static_cast<float>(kPackedBits));
  return __builtin_bit_cast(
      float, __builtin_bit_cast(std::uint32_t, packed_distance(distance)) | static_cast<std::uint32_t>(units));
}

/// The parts of a remainder. A weight relative to them is exp2(min(d - distance, 0) - log2_sum), where d is how far its
/// logit is from the rounded logsumexp: the minimum undoes the rounding of the distance.
NATTEN_JAX_HOST_DEVICE inline RemainderParts unpack_remainder(float remainder) {
  if (!(__builtin_fabsf(remainder) >= kPackedRemainder)) return {remainder, 0.f};
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, remainder);
  return {__builtin_bit_cast(float, bits & ~kPackedBits), static_cast<float>(bits & kPackedBits) * kPackedUnit};
}

/// Rounding error of base2_logsumexp for a row.
///
/// Args:
///   logsumexp: natural logarithm, as it was rounded.
///   shift: in base 2, what the row's weights are relative to.
///   log2_sum: logarithm of the sum of those weights.
NATTEN_JAX_HOST_DEVICE inline float logsumexp_remainder(float logsumexp, float shift, float log2_sum) {
  return pack_remainder(shift - base2_logsumexp(logsumexp), log2_sum);
}

/// The same where the weights are relative to a logit whose product with a factor is not rounded.
NATTEN_JAX_HOST_DEVICE inline float logsumexp_remainder(float logsumexp, float logit, float factor, float log2_sum) {
  return pack_remainder(__builtin_fmaf(logit, factor, -base2_logsumexp(logsumexp)), log2_sum);
}

}  // namespace natten_jax
