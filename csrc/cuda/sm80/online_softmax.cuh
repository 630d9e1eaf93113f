// The running softmax of a warp's query rows, in base 2.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"

namespace natten_jax::sm80 {

/// `kRowBlocks` accumulator blocks of 16 rows; a lane holds two rows of each.
///
/// Weights are relative to a row's reference, a logit that lags behind the largest one: earlier results are rescaled
/// only where it would make weights larger than 2^kHeadroom, which hardly happens after a row's first keys.
template <int kRowBlocks>
struct OnlineSoftmax {
  float exponent_scale;  // of the logits, in base 2; positive
  float reference[kRowBlocks][2], row_sum[kRowBlocks][2];

  CUTE_DEVICE explicit OnlineSoftmax(float exponent_scale) : exponent_scale(exponent_scale) {
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
    if (__any_sync(0xffffffffu, exceeds)) rescale(highest_of_lane, o);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      // A row that has seen nothing yet keeps weights of zero.
      const float shift = reference[m][i % 2] == -INFINITY ? 0.f : reference[m][i % 2] * exponent_scale;
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

  /// Of the lane's row `i` of all its blocks.
  CUTE_DEVICE float logsumexp(int i) const {
    constexpr float kLn2 = 0.6931471805599453f;
    float sum = row_sum[0][0], of_row = reference[0][0];
    CUTE_UNROLL
    for (int j = 1; j < 2 * kRowBlocks; ++j) {
      sum = i == j ? row_sum[j / 2][j % 2] : sum;
      of_row = i == j ? reference[j / 2][j % 2] : of_row;
    }
    return sum == 0.f ? -INFINITY : of_row * exponent_scale * kLn2 + logf(sum);
  }

 private:
  /// Makes the largest logits the references; a lane holds those of its columns.
  template <int kOutputs>
  CUTE_DEVICE void rescale(const float (&highest_of_lane)[kRowBlocks][2], float (&o)[kRowBlocks][kOutputs][4]) {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      float& of_row = reference[m][i % 2];
      float row_max = highest_of_lane[m][i % 2];
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      const float next = fmaxf(of_row, row_max);
      const float factor = next == -INFINITY ? 1.f : fast_exp2((of_row - next) * exponent_scale);
      of_row = next;
      row_sum[m][i % 2] *= factor;
      CUTE_UNROLL
      for (int n = 0; n < kOutputs; ++n) {
        o[m][n][r] *= factor;
        o[m][n][r + 1] *= factor;
      }
    }
  }
};

}  // namespace natten_jax::sm80
