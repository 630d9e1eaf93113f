// The running softmax of a warp's query rows, in base 2.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm80 {

/// `kRowBlocks` accumulator blocks of 16 rows; a lane holds two rows of each.
///
/// Weights are relative to a row's reference, a logit that lags behind the largest one: earlier results are rescaled
/// only where it would make weights larger than 2^kHeadroom, which hardly happens after a row's first keys.
template <class Element, int kRowBlocks>
struct OnlineSoftmax {
  float exponent_scale;  // of the logits, in base 2; positive
  float reference[kRowBlocks][2], row_sum[kRowBlocks][2];
  // Once a reference of the warp's rows is so large that the rounding of its product would show, references are taken
  // from logits before these are multiplied: they lie here, and `reference` is zero.
  bool has_large;
  float subtracted[kRowBlocks][2];

  CUTE_DEVICE explicit OnlineSoftmax(float exponent_scale) : exponent_scale(exponent_scale), has_large(false) {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      reference[i / 2][i % 2] = -INFINITY;
      row_sum[i / 2][i % 2] = 0.f;
    }
  }

  /// Turns logits into unnormalised weights.
  template <int kColumns, int kOutputs>
  CUTE_DEVICE void update(float (&s)[kRowBlocks][kColumns][4], float (&o)[kRowBlocks][kOutputs][4]) {
    float highest_of_lane[kRowBlocks][2];
    bool exceeds = false;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      // Two partial results halve the chains of dependent instructions.
      float highest[2] = {s[m][0][r], s[m][0][r + 1]};
      CUTE_UNROLL
      for (int n = 1; n < kColumns; ++n) {
        highest[0] = fmaxf(highest[0], s[m][n][r]);
        highest[1] = fmaxf(highest[1], s[m][n][r + 1]);
      }
      const float of_lane = fmaxf(highest[0], highest[1]);
      highest_of_lane[m][i % 2] = of_lane;
      exceeds = exceeds || (of_lane - reference[m][i % 2]) * exponent_scale > kHeadroom;
    }
    if (__any_sync(0xffffffffu, exceeds || has_large)) rescale(highest_of_lane, s, o);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      const float shift = shift_of(reference[m][i % 2]);
      float sum[2] = {};
      CUTE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& weight = s[m][n][r + e];
          weight = fast_exp2(weight * exponent_scale - shift);
          sum[e] += weight;
        }
      }
      row_sum[m][i % 2] += sum[0] + sum[1];
    }
  }

  /// Completes the sums over the four lanes that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      float& sum = row_sum[i / 2][i % 2];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    }
  }

  CUTE_DEVICE float normalisation(int m, int i) const {
    return row_sum[m][i] == 0.f ? 0.f : fast_reciprocal(row_sum[m][i]);
  }

  /// The logsumexp of the lane's row `i` of all its blocks, and its remainder.
  CUTE_DEVICE float2 logsumexp(int i) const {
    float sum = row_sum[0][0], of_row = has_large ? subtracted[0][0] : reference[0][0];
    CUTE_UNROLL
    for (int j = 1; j < 2 * kRowBlocks; ++j) {
      const int m = j / 2, r = j % 2;
      sum = i == j ? row_sum[m][r] : sum;
      of_row = i == j ? (has_large ? subtracted[m][r] : reference[m][r]) : of_row;
    }
    if (sum == 0.f) return make_float2(-INFINITY, 0.f);
    const float shift = shift_of(of_row), result = shift * kLn2 + logf(sum);
    if (!has_large) return make_float2(result, logsumexp_remainder(result, shift, log2f(sum)));
    return make_float2(result, logsumexp_remainder(result, of_row, exponent_scale, log2f(sum)));
  }

 private:
  /// What the weights of a row are relative to, in base 2. A row that has seen nothing yet keeps weights of zero.
  CUTE_DEVICE float shift_of(float reference) const {
    return reference == -INFINITY ? 0.f : __fmul_rn(reference, exponent_scale);
  }

  /// Makes the largest logits the references; a lane holds those of its columns.
  template <int kColumns, int kOutputs>
  CUTE_DEVICE void rescale(const float (&highest_of_lane)[kRowBlocks][2], float (&s)[kRowBlocks][kColumns][4],
                           float (&o)[kRowBlocks][kOutputs][4]) {
    float before[kRowBlocks][2];
    bool is_large = has_large;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      float row_max = highest_of_lane[m][r];
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      before[m][r] = has_large ? subtracted[m][r] : reference[m][r];
      reference[m][r] = fmaxf(before[m][r], row_max);
      is_large = is_large || fabsf(shift_of(reference[m][r])) > kLargestRounded;
    }
    is_large = __any_sync(0xffffffffu, is_large);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      const float next = reference[m][r], had = before[m][r];
      const float fall = !is_large   ? shift_of(next) - shift_of(had)
                         : has_large ? (next - had) * exponent_scale
                                     : fmaf(next, exponent_scale, -shift_of(had));
      const float factor = had == -INFINITY ? 1.f : fast_exp2(-fall);  // of nothing
      row_sum[m][r] *= factor;
      CUTE_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        o[m][n][2 * r] *= factor;
        o[m][n][2 * r + 1] *= factor;
      }
    }
    has_large = is_large;
    if (!has_large) return;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2;
      subtracted[m][r] = reference[m][r];
      reference[m][r] = 0.f;
      const float of_row = subtracted[m][r] == -INFINITY ? 0.f : subtracted[m][r];
      CUTE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        s[m][n][2 * r] -= of_row;
        s[m][n][2 * r + 1] -= of_row;
      }
    }
  }
};

}  // namespace natten_jax::sm80
