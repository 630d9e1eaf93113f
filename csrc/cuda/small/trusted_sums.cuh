// Accuracy checks of softmax sums. Forward kernels for small windows do not subtract the maximum from a row's logits.
// They subtract a number `shift`: zero or, in float16, the largest of the row's logits for a few keys. A sum that
// passes these checks is accurate enough, which is called "trusted" here. If a row of a tile fails, the kernels compute
// the tile again, relative to the maximum of each row.
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>

#include "cuda/common/row_sums.cuh"
#include "natten_jax/merge.h"

namespace natten_jax::small {

/// Bounds of a row's sum of weights. Between them, all digits of the weights are representable in the element type.
/// `kHasReference` is true if weights are relative to a logit of the row, and false if they are relative to 0.
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

/// Bounds for the logarithm of a sum. If the sum differs from 1 by less than kLeastFromOne, its logarithm consists
/// mostly of rounding errors. This matters only if the magnitude of the shift, in base 2, is below kLeastShift, because
/// the logarithm is then almost the whole logsumexp. An example is a query that sees a single key, with a logit near 0.
constexpr float kLeastFromOne = 0x1p-10f, kLeastShift = 0x1p-6f;

/// Returns 1 if a row's sum of weights is trusted. The weights are relative to `shift`, which `factor` converts to base
/// 2. Conditions are integers and combined bitwise, because logical operators would generate branches.
template <class Element>
CUTE_DEVICE int is_sum_trusted(float sum, float shift, float factor) {
  using Sums = TrustedSums<Element>;
  int has_logarithm = static_cast<int>(fabsf(sum - 1.f) >= kLeastFromOne);
  if constexpr (Sums::kHasReference) has_logarithm |= static_cast<int>(fabsf(shift * factor) >= kLeastShift);
  return static_cast<int>(sum >= Sums::kLeast) & static_cast<int>(sum <= Sums::kMost) & has_logarithm;
}

/// Largest base-2 shift for which the sink's weight keeps full precision.
constexpr float kMostOfSinkShift = 128.f;

/// Adds a sink to the sums of a lane's two rows, as an additional weight. If the sum of any row of the warp would lose
/// digits, returns false and leaves all sums unchanged. Rows whose element of `indices` is negative are outside of the
/// layout and are ignored. The caller need not apply `added_logit` to the sink, because the weight of a sink of at most
/// kHiddenLogit underflows to zero.
CUTE_DEVICE bool add_sink_to_sums(float (&sums)[2], const float (&shift)[2], float sink, float factor,
                                  const int (&indices)[2]) {
  float with_sink[2];
  int fits = 1;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float scaled_shift = __fmul_rn(shift[r], factor);
    with_sink[r] = sums[r] + fast_exp2(fmaf(sink, kLog2E, -scaled_shift));
    const int is_in_range = static_cast<int>(with_sink[r] >= 0x1p-60f) & static_cast<int>(with_sink[r] <= 0x1p60f),
              has_logarithm = static_cast<int>(fabsf(with_sink[r] - 1.f) >= kLeastFromOne),
              has_digits = static_cast<int>(fabsf(scaled_shift) <= kMostOfSinkShift);
    fits &= (is_in_range & has_logarithm & has_digits) | static_cast<int>(indices[r] < 0);
  }
  if (!__all_sync(0xffffffffu, fits)) return false;
  sums[0] = with_sink[0];
  sums[1] = with_sink[1];
  return true;
}

/// Returns the logsumexp of a row whose weights are relative to `shift`.
CUTE_DEVICE Logsumexp logsumexp_of_sum(float sum, float shift, float factor) {
  if (sum == 0.f) return {-INFINITY, {}};
  const float log2_sum = fast_log2(sum), value = fmaf(__fmul_rn(shift, factor), kLn2, log2_sum * kLn2);
  return {value, logsumexp_remainder(value, shift, factor, log2_sum)};
}

}  // namespace natten_jax::small
