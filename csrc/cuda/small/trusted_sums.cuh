// When sums of weights are trusted that are relative to no logit at all, or to some one.
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>

#include "cuda/common/row_sums.cuh"
#include "natten_jax/merge.h"

namespace natten_jax::small {

/// Between which sums of weights none of them has lost digits, given what an element type can hold.
template <class Element>
struct TrustedSums {
  static constexpr bool kHasReference = false;
  static constexpr float kLeast = 0x1p-60f, kMost = 0x1p60f;
};
template <>
struct TrustedSums<cutlass::half_t> {
  static constexpr bool kHasReference = true;
  static constexpr float kLeast = 0x1p-6f, kMost = 0x1p15f;
};

/// The logarithm of a sum that is closer to 1 than this is but what was rounded, and all that there is of a logsumexp
/// whose shift, in base 2, is below the other: as where a query sees one key, whose logit is next to 0.
constexpr float kLeastFromOne = 0x1p-10f, kLeastShift = 0x1p-6f;

/// Whether a row's sum of weights relative to `shift` is trusted. Without a branch, as && and || would be.
template <class Element>
CUTE_DEVICE int is_sum_trusted(float sum, float shift, float factor) {
  using Sums = TrustedSums<Element>;
  int has_logarithm = static_cast<int>(fabsf(sum - 1.f) >= kLeastFromOne);
  if constexpr (Sums::kHasReference) has_logarithm |= static_cast<int>(fabsf(shift * factor) >= kLeastShift);
  return static_cast<int>(sum >= Sums::kLeast) & static_cast<int>(sum <= Sums::kMost) & has_logarithm;
}

/// The largest shift in base 2 beside which a sink's weight has all digits that count.
constexpr float kMostOfSinkShift = 128.f;

/// Adds a sink to the sums of a lane's two rows, as one more weight; false where the sum of one of the warp's rows
/// would lose digits, of those that have a place.
CUTE_DEVICE bool add_sink_to_sums(float (&sums)[2], const float (&shift)[2], float sink, float factor,
                                  const int (&places)[2]) {
  float with_sink[2];
  int fits = 1;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float of_shift = __fmul_rn(shift[r], factor);
    with_sink[r] = sums[r] + fast_exp2(fmaf(sink, kLog2E, -of_shift));
    const int is_in_range = static_cast<int>(with_sink[r] >= 0x1p-60f) & static_cast<int>(with_sink[r] <= 0x1p60f),
              has_logarithm = static_cast<int>(fabsf(with_sink[r] - 1.f) >= kLeastFromOne),
              has_digits = static_cast<int>(fabsf(of_shift) <= kMostOfSinkShift);
    fits &= (is_in_range & has_logarithm & has_digits) | static_cast<int>(places[r] < 0);
  }
  if (!__all_sync(0xffffffffu, fits)) return false;
  sums[0] = with_sink[0];
  sums[1] = with_sink[1];
  return true;
}

/// A row's logsumexp, and with `with_remainder` what float32 leaves out of it.
CUTE_DEVICE Logsumexp logsumexp_of_sum(float sum, float shift, float factor, bool with_remainder) {
  const float log2_sum = fast_log2(sum);
  const float value = sum == 0.f ? -INFINITY : fmaf(__fmul_rn(shift, factor), kLn2, log2_sum * kLn2);
  const bool is_wanted = with_remainder && sum != 0.f;
  return {value, is_wanted ? logsumexp_remainder(value, shift, factor, log2_sum) : 0.f};
}

}  // namespace natten_jax::small
