// Online softmax of rows of logits in the forward kernel, in base 2.
#pragma once

#include <cute/tensor.hpp>

#include "cuda/common/arithmetic.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "natten_jax/logsumexp.h"
#include "natten_jax/merge.h"

namespace natten_jax::sm90 {

/// True if the lane completes the second of its two rows. Four lanes share two rows of an accumulator. After the last
/// key tile, even lanes compute the normalization and logsumexp of the first row, and odd lanes compute those values
/// for the second row. If every lane computed both, this code would be twice as long, and longer code slows down passes
/// with small windows.
CUTE_DEVICE bool completes_second_row() {
  return threadIdx.x % 2 != 0;
}

/// Returns the element of `rows` for the row that the lane completes.
template <class T>
CUTE_DEVICE T select_completed_row(const T (&rows)[2]) {
  return completes_second_row() ? rows[1] : rows[0];
}

/// Exchanges values between the four lanes that share two rows. `completed` is the value for the row that the lane
/// completes, and `rows` receives the values for both rows.
CUTE_DEVICE void share_with_row(float completed, float (&rows)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) rows[i] = __shfl_sync(0xffffffffu, completed, i, 4);
}

/// Normalization and logsumexp of the row that a lane completes.
struct RowSums {
  float normalisation;  // factor by which the row's output is multiplied
  Logsumexp logsumexp;

  /// Merges the row with results of earlier launches: a logsumexp and its packed remainder. Returns the factor by which
  /// the output of these launches is multiplied.
  CUTE_DEVICE float merge(float2 earlier) {
    const Shares shares = merge_logsumexps(logsumexp, {earlier.x, unpack_remainder(earlier.y)});
    normalisation *= shares.own;
    return shares.other;
  }

  /// Adds a sink, which is a logit without a key, to the row.
  CUTE_DEVICE void add(float sink) { normalisation *= add_sink(logsumexp, sink); }
};

/// Running softmax of the two rows of which a thread holds elements.
///
/// The weights of a row are relative to a reference, which is an earlier maximum of the row's logits. The reference
/// changes only if a weight would otherwise exceed 2^kHeadroom.
template <class Element>
struct OnlineSoftmax {
  float exponent_scale;  // Scale of the logits, times log2(e).
  float reference[2];    // Per row: unscaled logit to which weights are relative.
  float shift[2];        // Per row: reference * exponent_scale, rounded down.
  float row_sum[2], rescale[2];
  float tile_sum[2];  // per row: sum of the current tile's weights
  bool must_rescale[2];
  bool is_large;  // some row of the warp has a `shift` whose rounding error changes weights

  CUTE_DEVICE void start() {
    reference[0] = reference[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
    is_large = false;
  }

  /// Sets the reference of a row to the row's largest logit so far, if a weight of the current tile would otherwise
  /// exceed 2^kHeadroom. In this case, also sets `must_rescale`, and results of earlier tiles must be multiplied by
  /// `rescale`.
  template <class Logits>
  CUTE_DEVICE void find_references(AccumulatorRows<Logits> s) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      // Two partial maxima per row halve the length of the chain of dependent instructions.
      float highest[2] = {reference[i], s(i, 2)};
      CUTE_UNROLL
      for (int n = 0; n < s.kColumns; ++n) {
        float& partial = highest[n / 2 % 2];
        partial = fmaxf(partial, s(i, n));
      }
      float row_maximum = fmaxf(highest[0], highest[1]);
      row_maximum = fmaxf(row_maximum, __shfl_xor_sync(0xffffffffu, row_maximum, 1));
      row_maximum = fmaxf(row_maximum, __shfl_xor_sync(0xffffffffu, row_maximum, 2));
      must_rescale[i] = (row_maximum - reference[i]) * exponent_scale > kHeadroom;
      const float next = must_rescale[i] ? row_maximum : reference[i];
      // As long as a row has attended to no key, its weights are zero.
      shift[i] = next == -INFINITY ? 0.f : __fmul_rd(next, exponent_scale);
      rescale[i] = fast_exp2(reference[i] * exponent_scale - shift[i]);
      reference[i] = next;
    }
  }

  /// Replaces the logits by unnormalized weights. Also packs the weights in pairs, for the next product.
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

  /// True if some row of the warp must be rescaled, or has logits so large that weights must be corrected (`is_large`).
  /// Logits are rarely this large. If they are, the product of a logit and `exponent_scale` may exceed the rounded
  /// `shift` by so much that the weight overflows the 16-bit element type, or even float32.
  CUTE_DEVICE bool is_special() const {
    return __any_sync(0xffffffffu, must_rescale[0] || must_rescale[1] || is_large);
  }

  /// Corrects the weights of large logits. The corrected weights are relative to the exact product of reference and
  /// `exponent_scale`. The original weights are relative to `shift`, which is this product rounded down. If `shift`
  /// were rounded up, all weights of a row could become zero.
  ///
  /// Corrections are rare, but their code is in the middle of the loop over tiles. This code uses selects, because
  /// branches would make the kernel's code an eighth longer and slow down forward passes of 60 microseconds by 1%.
  template <class Logits, class Pairs>
  CUTE_DEVICE void correct_weights(AccumulatorRows<Logits> s, Pairs& pairs) {
    is_large = __any_sync(0xffffffffu, fabsf(shift[0]) > kLargestRounded || fabsf(shift[1]) > kLargestRounded);
    if (!is_large) return;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float excess = reference[i] == -INFINITY ? 0.f : fmaf(reference[i], exponent_scale, -shift[i]);
      // If float32 cannot represent the weight of the largest logit, only keys with this logit get a weight above zero.
      // Every other logit is smaller by at least half of `excess`, so its weight is zero. The factor for results of
      // earlier tiles (`rescale`) is then set to zero, because it may be infinite.
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

  /// Adds up the partial sums of the four threads that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
  }

  /// Normalization and logsumexp of the row that the lane completes.
  CUTE_DEVICE RowSums sums() const {
    const float sum = select_completed_row(row_sum), largest = select_completed_row(reference);
    if (sum == 0.f) return {0.f, {-INFINITY, {}}};
    const float log2_sum = fast_log2(sum), logsumexp = (largest * exponent_scale + log2_sum) * kLn2,
                base2 = base2_logsumexp(logsumexp);
    const float distance =
        is_large ? fmaf(largest, exponent_scale, -base2) : __fmul_rd(largest, exponent_scale) - base2;
    return {1.f / sum, {logsumexp, {distance, log2_sum}}};
  }
};

}  // namespace natten_jax::sm90
