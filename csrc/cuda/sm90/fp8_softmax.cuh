// Softmax of the forward kernel for 8-bit floats. Its weights are e4m3 numbers.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

/// Rounds four numbers to e4m3 and packs them into a word. `first` is in the lowest byte.
CUTE_DEVICE std::uint32_t pack_e4m3(float first, float second, float third, float fourth) {
  std::uint32_t word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(word)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return word;
}

/// Running softmax of the two rows of which a thread holds elements.
///
/// The weights of a row are relative to a reference, which is an earlier maximum of the row's logits. The reference
/// changes only if a weight would otherwise saturate. So the exponentials of a tile do not wait for its maximum, which
/// is computed at the same time.
struct Float8Softmax {
  float exponent_scale;  // Scale of the logits, times log2(e).
  float reference[2];    // Per row: unscaled logit to which weights are relative.
  float limit[2];        // Per row: largest unscaled logit that does not change the reference.
  float shift[2];        // Per row: reference * exponent_scale - kWeightExponent.
  float row_sum[2];
  float rescale[2];  // Per row: factor by which results of earlier tiles are multiplied.

  CUTE_DEVICE void start() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      reference[i] = limit[i] = -INFINITY;
      shift[i] = row_sum[i] = 0.f;
    }
  }

  /// Computes unnormalized weights from the logits of a tile. Packs them in words of four, in the order of the register
  /// operand of the next product.
  ///
  /// Args:
  ///   visible: per row, a mask with a bit per logit. If `kIsMasked`, logits with cleared bits are masked out.
  template <bool kIsMasked, class Logits, class Words>
  CUTE_DEVICE void weigh(AccumulatorRows<Logits> s, Words& words, const std::uint32_t (&visible)[2]) {
    TileSums tile = weigh_by<kIsMasked>(s, words, visible,
                                        [&](float logit, int i) { return fmaf(logit, exponent_scale, -shift[i]); });
    rescale[0] = rescale[1] = 1.f;
    if (__any_sync(0xffffffffu, tile.highest[0] > limit[0] || tile.highest[1] > limit[1])) {
      move_references(tile.highest);
      // Scale the difference between a logit and the reference instead of the logit. The difference is exact, but the
      // rounding error of a large scaled logit would change the weight.
      tile = weigh_by<false>(s, words, visible, [&](float logit, int i) {
        return fmaf(logit - (reference[i] == -INFINITY ? 0.f : reference[i]), exponent_scale, kWeightExponent);
      });
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) row_sum[i] = row_sum[i] * rescale[i] + tile.sum[i];
  }

  /// Adds up the partial sums of the four threads that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
  }

  /// Normalization and logsumexp of the row that the lane completes (`completes_second_row`).
  CUTE_DEVICE RowSums sums() const {
    const float sum = select_completed_row(row_sum), largest = select_completed_row(reference);
    if (sum == 0.f) return {0.f, {-INFINITY, {}}};
    const float log2_sum = fast_log2(sum) - kWeightExponent, logsumexp = fmaf(largest, exponent_scale, log2_sum) * kLn2;
    return {1.f / sum, {logsumexp, logsumexp_remainder(logsumexp, largest, exponent_scale, log2_sum)}};
  }

 private:
  /// Per row: the maximum of the thread's logits in a tile, and the sum of their weights.
  struct TileSums {
    float highest[2], sum[2];
  };

  /// Sets each row's reference to its largest logit so far, including the current tile.
  CUTE_DEVICE void move_references(const float (&highest)[2]) {
    // If the shift is so large that its rounding error might change weights, the limit becomes -infinity. All later
    // logits then exceed the limit, so `weigh` scales differences from the reference in all later tiles.
    constexpr float kLargestShift = 1 << 18;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float next = fmaxf(reference[i], highest[i]);
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
      // As long as a row has attended to no key, its weights are zero.
      const bool has_keys = next != -INFINITY;
      shift[i] = has_keys ? fmaf(next, exponent_scale, -kWeightExponent) : 0.f;
      rescale[i] = has_keys ? fast_exp2((reference[i] - next) * exponent_scale) : 0.f;
      reference[i] = next;
      const float excess = __fdividef(kLargestExponent - kWeightExponent, exponent_scale);
      limit[i] = fabsf(shift[i]) > kLargestShift ? -INFINITY : next + excess;
    }
  }

  /// Computes the weights, sums and maxima of a tile. `exponent` converts a logit to the base-2 exponent of its weight.
  /// The columns are processed in chunks. The weights of a chunk are added and packed only after the exponentials of
  /// the next two chunks have been started.
  template <bool kIsMasked, class Logits, class Words, class Exponent>
  CUTE_DEVICE static TileSums weigh_by(AccumulatorRows<Logits> s, Words& words, const std::uint32_t (&visible)[2],
                                       const Exponent& exponent) {
    constexpr int kChunkColumns = 4, kLag = 2, kChunks = s.kColumns / kChunkColumns;
    TileSums tile;
    float sums[2][kChunkColumns], weights[kLag + 1][2][kChunkColumns];
    for_each(make_int_sequence<kChunks + kLag>{}, [&](auto number) {
      constexpr int kStarted = number, kDone = kStarted - kLag;
      if constexpr (kStarted < kChunks) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float logit[kChunkColumns];
          CUTE_UNROLL
          for (int m = 0; m < kChunkColumns; ++m) {
            const int n = kStarted * kChunkColumns + m;
            if (kIsMasked && !(visible[i] & 1u << n)) s(i, n) = -INFINITY;
            logit[m] = s(i, n);
            weights[kStarted % (kLag + 1)][i][m] = fast_exp2(exponent(logit[m], i));
          }
          const float highest = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
          tile.highest[i] = kStarted == 0 ? highest : fmaxf(tile.highest[i], highest);
        }
      }
      if constexpr (kDone >= 0) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float (&weight)[kChunkColumns] = weights[kDone % (kLag + 1)][i];
          CUTE_UNROLL
          for (int m = 0; m < kChunkColumns; ++m) sums[i][m] = kDone == 0 ? weight[m] : sums[i][m] + weight[m];
          words(2 * kDone + i) = pack_e4m3(weight[0], weight[1], weight[2], weight[3]);
        }
      }
    });
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) tile.sum[i] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
    return tile;
  }
};

}  // namespace natten_jax::sm90
