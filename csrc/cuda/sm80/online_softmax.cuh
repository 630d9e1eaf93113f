// Online softmax of a warp's query rows, in base 2.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/common/row_sums.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm80 {

/// Online softmax of `kRowBlocks` accumulator blocks of 16 rows. A lane holds elements of two rows of each block.
///
/// A weight is exp2(logit * exponent_scale + offset). The offset of a row is the negative of an earlier maximum of the
/// row's logits, in base 2. The offset changes, and earlier results are rescaled, only if a weight would exceed
/// 2^kHeadroom. This is rare after a row's first keys.
///
/// If an offset is so large that its rounding would change weights, the warp subtracts the maximum from the logits
/// before it multiplies them by `exponent_scale`. The offsets are zero from then on. The subtracted maxima are kept in
/// shared memory, so that rows without large logits need no registers for them. Methods access them by `subtracted(i)`,
/// which returns a reference to the subtracted maximum of the lane's row `i`.
template <int kRowBlocks>
struct OnlineSoftmax {
  /// Offset of a row that has had no finite logits so far. With this offset, every finite logit exceeds the headroom,
  /// and a logit of -infinity has a weight of zero.
  static constexpr float kNothing = FLT_MAX;

  float exponent_scale;  // scale of the logits times log2(e); positive
  float headroom;        // kHeadroom; -infinity once maxima are subtracted, so that every later step calls `rescale`
  float offset[kRowBlocks][2], row_sum[kRowBlocks][2];

  CUTE_DEVICE explicit OnlineSoftmax(float exponent_scale) : exponent_scale(exponent_scale), headroom(kHeadroom) {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      offset[i / 2][i % 2] = kNothing;
      row_sum[i / 2][i % 2] = 0.f;
    }
  }

  /// Replaces the logits of a step by unnormalized weights, and adds these to `row_sum`. Rescales the output if needed.
  template <int kColumns, int kOutputs, class Subtracted>
  CUTE_DEVICE void update(float (&s)[kRowBlocks][kColumns][4], float (&o)[kRowBlocks][kOutputs][4],
                          const Subtracted& subtracted) {
    float lane_maxima[kRowBlocks][2];
    bool exceeds = false;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      // Two partial maxima halve the chains of dependent instructions.
      float highest[2] = {s[m][0][r], s[m][0][r + 1]};
      CUTE_UNROLL
      for (int n = 1; n < kColumns; ++n) {
        highest[0] = fmaxf(highest[0], s[m][n][r]);
        highest[1] = fmaxf(highest[1], s[m][n][r + 1]);
      }
      const float lane_maximum = fmaxf(highest[0], highest[1]);
      lane_maxima[m][i % 2] = lane_maximum;
      exceeds = exceeds || fmaf(lane_maximum, exponent_scale, offset[m][i % 2]) > headroom;
    }
    if (__any_sync(0xffffffffu, exceeds)) rescale(lane_maxima, s, o, subtracted);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      float sum = 0.f;
      CUTE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& weight = s[m][n][r + e];
          weight = fast_exp2(fmaf(weight, exponent_scale, offset[m][i % 2]));
          sum = n == 0 && e == 0 ? weight : sum + weight;
        }
      }
      row_sum[m][i % 2] += sum;
    }
  }

  /// Adds `row_sum` over the four lanes that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      row_sum[i / 2][i % 2] = sum_of_row(row_sum[i / 2][i % 2]);
    }
  }

  /// Logsumexp of row `i` of the lane's 2 * `kRowBlocks` rows.
  template <class Subtracted>
  CUTE_DEVICE Logsumexp logsumexp(int i, const Subtracted& subtracted) const {
    float sum = row_sum[0][0], row_reference = -offset[0][0];
    CUTE_UNROLL
    for (int j = 1; j < 2 * kRowBlocks; ++j) {
      sum = i == j ? row_sum[j / 2][j % 2] : sum;
      row_reference = i == j ? -offset[j / 2][j % 2] : row_reference;
    }
    if (sum == 0.f) return {-INFINITY, {}};
    const float log2_sum = fast_log2(sum);
    if (!subtracts()) {
      const float result = row_reference * kLn2 + log2_sum * kLn2;
      return {result, logsumexp_remainder(result, row_reference, log2_sum)};
    }
    const float logit = subtracted(i), result = __fmul_rn(logit, exponent_scale) * kLn2 + log2_sum * kLn2;
    return {result, logsumexp_remainder(result, logit, exponent_scale, log2_sum)};
  }

 private:
  CUTE_DEVICE bool subtracts() const { return headroom < 0.f; }

  /// Sets each offset to the negative of the row's maximum, and rescales earlier results. `highest` holds the maxima
  /// over the lane's columns and receives the maxima over all columns of the step.
  template <int kColumns, int kOutputs, class Subtracted>
  CUTE_DEVICE void rescale(float (&highest)[kRowBlocks][2], float (&s)[kRowBlocks][kColumns][4],
                           float (&o)[kRowBlocks][kOutputs][4], const Subtracted& subtracted) {
    float factor[kRowBlocks][2], next[kRowBlocks][2];
    bool is_large = subtracts();
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      highest[m][r] = largest_of_row(highest[m][r]);
      next[m][r] = fminf(offset[m][r], -__fmul_rn(highest[m][r], exponent_scale));
      factor[m][r] = fast_exp2(next[m][r] - offset[m][r]);
      // Bitwise operators, because short-circuit evaluation would branch.
      is_large |= (fabsf(next[m][r]) > kLargestRounded) & (next[m][r] != kNothing);
    }
    if (__any_sync(0xffffffffu, is_large)) {
      subtract(highest, s, factor, subtracted);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 2 * kRowBlocks; ++i) offset[i / 2][i % 2] = next[i / 2][i % 2];
    }
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      row_sum[m][r] *= factor[m][r];
      CUTE_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        o[m][n][2 * r] *= factor[m][r];
        o[m][n][2 * r + 1] *= factor[m][r];
      }
    }
  }

  /// Subtracts from each row's logits the row's maximum so far. Sets `factor` to the factors that rescale earlier
  /// weights.
  template <int kColumns, class Subtracted>
  CUTE_DEVICE void subtract(const float (&highest)[kRowBlocks][2], float (&s)[kRowBlocks][kColumns][4],
                            float (&factor)[kRowBlocks][2], const Subtracted& subtracted) {
    float had[kRowBlocks][2];
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      const float by_offset = offset[m][r] == kNothing ? -kNothing : -offset[m][r] * fast_reciprocal(exponent_scale);
      had[m][r] = subtracts() ? subtracted(i) : by_offset;
    }
    __syncwarp();  // all lanes that share a row have read its subtracted maximum
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      const float next = fmaxf(had[m][r], highest[m][r]);
      const float rise = subtracts() ? (next - had[m][r]) * exponent_scale : fmaf(next, exponent_scale, offset[m][r]);
      factor[m][r] = had[m][r] == -kNothing ? 1.f : fast_exp2(-rise);  // 1 without earlier weights
      CUTE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        s[m][n][2 * r] -= next;
        s[m][n][2 * r + 1] -= next;
      }
      offset[m][r] = 0.f;
      subtracted(i) = next;
    }
    __syncwarp();
    headroom = -INFINITY;
  }
};

}  // namespace natten_jax::sm80
