// Online softmax of the forward kernel's rows, in base 2.
#pragma once

#include <cute/tensor.hpp>

#include "cuda/common/arithmetic.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "natten_jax/logsumexp.h"
#include "natten_jax/merge.h"

namespace natten_jax::sm90 {

/// Four lanes share two rows of an accumulator. Even lanes complete the sums of the first row, odd lanes the sums of
/// the second row. Completing both rows in every lane would double the code, and longer code slows down small windows.
CUTE_DEVICE bool completes_second_row() {
  return threadIdx.x % 2 != 0;
}

/// Returns the element for the row that the lane completes.
template <class T>
CUTE_DEVICE T of_completed_row(const T (&rows)[2]) {
  return completes_second_row() ? rows[1] : rows[0];
}

/// Broadcasts a value per row from the lanes that completed the rows.
CUTE_DEVICE void share_with_row(float completed, float (&rows)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) rows[i] = __shfl_sync(0xffffffffu, completed, i, 4);
}

/// Softmax of the row that a lane completes.
struct RowSums {
  float normalisation;  // factor of the row's output
  Logsumexp logsumexp;

  /// Merges in the logsumexp and packed remainder of earlier launches. Returns the factor of their output.
  CUTE_DEVICE float merge(float2 earlier) {
    const Shares shares = merge_logsumexps(logsumexp, {earlier.x, unpack_remainder(earlier.y)});
    normalisation *= shares.own;
    return shares.other;
  }

  /// Adds a sink.
  CUTE_DEVICE void add(float sink) { normalisation *= add_sink(logsumexp, sink); }
};

/// Running softmax of the rows of accumulators that a thread holds.
///
/// A row's weights are relative to an earlier maximum, which stays until a weight would exceed 2^kHeadroom.
template <class Element>
struct OnlineSoftmax {
  float exponent_scale;  // factor of the logits, in base 2
  float reference[2];    // logit that the weights are relative to
  float shift[2];        // reference * exponent_scale
  float row_sum[2], rescale[2];
  float tile_sum[2];  // of a tile's weights
  bool must_rescale[2];
  bool is_large;  // some `shift` in the warp is so large that its rounding error changes weights

  CUTE_DEVICE void start() {
    reference[0] = reference[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
    is_large = false;
  }

  /// Updates the references with a tile's largest logits. If `must_rescale`, earlier results must be multiplied by
  /// `rescale`.
  template <class Logits>
  CUTE_DEVICE void find_references(AccumulatorRows<Logits> s) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      // Two partial maxima per row halve the chains of dependent instructions.
      float highest[2] = {reference[i], s(i, 2)};
      CUTE_UNROLL
      for (int n = 0; n < s.kColumns; ++n) {
        float& partial = highest[n / 2 % 2];
        partial = fmaxf(partial, s(i, n));
      }
      float of_row = fmaxf(highest[0], highest[1]);
      of_row = fmaxf(of_row, __shfl_xor_sync(0xffffffffu, of_row, 1));
      of_row = fmaxf(of_row, __shfl_xor_sync(0xffffffffu, of_row, 2));
      must_rescale[i] = (of_row - reference[i]) * exponent_scale > kHeadroom;
      const float next = must_rescale[i] ? of_row : reference[i];
      // A row without visible keys so far keeps weights of zero.
      shift[i] = next == -INFINITY ? 0.f : __fmul_rd(next, exponent_scale);
      rescale[i] = fast_exp2(reference[i] * exponent_scale - shift[i]);
      reference[i] = next;
    }
  }

  /// Replaces logits by unnormalised weights, and packs these in pairs.
  template <class Logits, class Pairs>
  CUTE_DEVICE void weigh(AccumulatorRows<Logits> s, Pairs& pairs) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float sums[s.kColumns];
      CUTE_UNROLL
      for (int n = 0; n < s.kColumns; ++n) {
        float& weight = s(i, n);
        weight = fast_exp2(weight * exponent_scale - shift[i]);
        sums[n] = n < 2 ? weight : sums[n - 2] + weight;
        if (n % 2 == 1) pairs(s.element(i, n) / 2) = pack<Element>(s(i, n - 1), weight);
      }
      tile_sum[i] = sums[s.kColumns - 1] + sums[s.kColumns - 2];
    }
  }

  /// True if a tile needs more than `add_weights`: rescaling, or a correction of large logits. Logits rarely exceed the
  /// bound of `is_large`. If they do, their exact products may exceed the rounded `shift` by more than the weights'
  /// half precision, or even float32, can hold.
  CUTE_DEVICE bool is_special() const {
    return __any_sync(0xffffffffu, must_rescale[0] || must_rescale[1] || is_large);
  }

  /// Corrects the weights of large logits: makes them relative to the exact scaled reference instead of the rounded
  /// `shift` (rounded down, so that no weight of a row vanishes). This is rare but sits in the middle of the loop, so
  /// it uses selects: branches would make the kernel's code an eighth longer, and forward passes of 60 microseconds 1%
  /// slower.
  template <class Logits, class Pairs>
  CUTE_DEVICE void correct_weights(AccumulatorRows<Logits> s, Pairs& pairs) {
    is_large = __any_sync(0xffffffffu, fabsf(shift[0]) > kLargestRounded || fabsf(shift[1]) > kLargestRounded);
    if (!is_large) return;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float excess = reference[i] == -INFINITY ? 0.f : fmaf(reference[i], exponent_scale, -shift[i]);
      // If float32 cannot represent the largest logit's weight, the row is one-hot: every other logit is smaller by at
      // least half of this excess, and gets a weight of zero. Rescaled earlier results are also dropped, because their
      // factor may be infinite.
      const bool is_one_hot = excess > 126.f;
      const float factor = is_one_hot ? 0.f : fast_exp2(-excess);
      const float is_one_above = is_one_hot ? fast_exp2(fminf(0.75f * excess, 127.f)) : INFINITY;
      float sum = 0.f;
      CUTE_UNROLL
      for (int n = 0; n < s.kColumns; ++n) {
        float& weight = s(i, n);
        weight = weight > is_one_above ? 1.f : weight * factor;
        sum += weight;
        if (n % 2 == 1) pairs(s.element(i, n) / 2) = pack<Element>(s(i, n - 1), weight);
      }
      tile_sum[i] = sum;
      rescale[i] = is_one_hot ? 0.f : rescale[i] * factor;
    }
  }

  CUTE_DEVICE void add_weights() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) row_sum[i] = (must_rescale[i] ? row_sum[i] * rescale[i] : row_sum[i]) + tile_sum[i];
  }

  /// Completes the sums over the four threads that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
  }

  /// Complete sums of the row that the lane completes.
  CUTE_DEVICE RowSums sums() const {
    const float sum = of_completed_row(row_sum), largest = of_completed_row(reference);
    if (sum == 0.f) return {0.f, {-INFINITY, {}}};
    const float log2_sum = fast_log2(sum), logsumexp = (largest * exponent_scale + log2_sum) * kLn2,
                base2 = base2_logsumexp(logsumexp);
    const float distance =
        is_large ? fmaf(largest, exponent_scale, -base2) : __fmul_rd(largest, exponent_scale) - base2;
    return {1.f / sum, {logsumexp, {distance, log2_sum}}};
  }
};

}  // namespace natten_jax::sm90
