// The softmax of the forward kernel's rows, tile by tile, in base 2.
#pragma once

#include <cute/tensor.hpp>

#include "cuda/common/arithmetic.cuh"

namespace natten_jax::sm90 {

using namespace cute;

/// The accumulator of one warpgroup's 64 rows, of which a thread holds two, and their running softmax.
struct OnlineSoftmax {
  float exponent_scale;  // of the logits, in base 2
  float row_max[2], row_sum[2], rescale[2];

  CUTE_DEVICE void start(float scale) {
    exponent_scale = scale;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  /// Turns logits into unnormalised weights; `rescale` is what earlier results shrink by.
  template <class Logits>
  CUTE_DEVICE void update(Logits& s) {
    // Two partial results a row halve the chains of dependent instructions.
    float highest[2][2] = {{row_max[0], s(4)}, {row_max[1], s(6)}};
    CUTE_UNROLL
    for (int e = 0; e < size(s); ++e) {
      float& partial = highest[(e / 2) % 2][(e / 4) % 2];
      partial = fmaxf(partial, s(e));
    }
    float shift[2], sum[2][2] = {};
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float of_row = fmaxf(highest[i][0], highest[i][1]);
      of_row = fmaxf(of_row, __shfl_xor_sync(0xffffffffu, of_row, 1));
      of_row = fmaxf(of_row, __shfl_xor_sync(0xffffffffu, of_row, 2));
      // A row that has seen nothing yet keeps weights of zero.
      shift[i] = of_row == -INFINITY ? 0.f : of_row * exponent_scale;
      rescale[i] = fast_exp2(row_max[i] * exponent_scale - shift[i]);
      row_max[i] = of_row;
    }
    CUTE_UNROLL
    for (int e = 0; e < size(s); ++e) {
      s(e) = fast_exp2(s(e) * exponent_scale - shift[(e / 2) % 2]);
      sum[(e / 2) % 2][(e / 4) % 2] += s(e);
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) row_sum[i] = row_sum[i] * rescale[i] + (sum[i][0] + sum[i][1]);
  }

  /// Completes the sums over the four threads that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
  }

  CUTE_DEVICE float normalisation(int row) const { return row_sum[row] == 0.f ? 0.f : 1.f / row_sum[row]; }

  CUTE_DEVICE float logsumexp(int row) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return row_sum[row] == 0.f ? -INFINITY : (row_max[row] * exponent_scale + __log2f(row_sum[row])) * kLn2;
  }
};

}  // namespace natten_jax::sm90
