// Softmax of the forward kernel for 8-bit floats: weights are e4m3 numbers.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

/// Packs four numbers into a word, the first in the lowest byte.
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

/// Running softmax of the rows of accumulators that a thread holds.
///
/// Weights are relative to an earlier maximum until a logit exceeds it so far that its weight would saturate. So
/// exponentials do not wait for the maximum of their tile, which is computed at the same time.
struct Float8Softmax {
  float exponent_scale;  // factor of the logits, in base 2
  float reference[2];    // logit that the weights are relative to
  float limit[2];        // the largest logit for which the reference stays
  float shift[2];        // the scaled reference minus the exponent of its weight
  float row_sum[2];
  float rescale[2];  // factor of earlier results

  CUTE_DEVICE void start() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      reference[i] = limit[i] = -INFINITY;
      shift[i] = row_sum[i] = 0.f;
    }
  }

  /// Replaces logits by unnormalised weights, packed in words of four in the order of the register operand.
  ///
  /// Args:
  ///   visible: if masked, a bit per logit; logits with cleared bits are hidden.
  template <bool kIsMasked, class Logits, class Words>
  CUTE_DEVICE void weigh(AccumulatorRows<Logits> s, Words& words, const std::uint32_t (&visible)[2]) {
    TileSums tile = weigh_by<kIsMasked>(s, words, visible,
                                        [&](float logit, int i) { return fmaf(logit, exponent_scale, -shift[i]); });
    rescale[0] = rescale[1] = 1.f;
    if (__any_sync(0xffffffffu, tile.highest[0] > limit[0] || tile.highest[1] > limit[1])) {
      move_references(tile.highest);
      // Differences of logits are exact; rounding the scaled value of a large logit would change weights.
      tile = weigh_by<false>(s, words, visible, [&](float logit, int i) {
        return fmaf(logit - (reference[i] == -INFINITY ? 0.f : reference[i]), exponent_scale, kWeightExponent);
      });
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) row_sum[i] = row_sum[i] * rescale[i] + tile.sum[i];
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
    const float log2_sum = fast_log2(sum) - kWeightExponent, logsumexp = fmaf(largest, exponent_scale, log2_sum) * kLn2;
    return {1.f / sum, {logsumexp, logsumexp_remainder(logsumexp, largest, exponent_scale, log2_sum)}};
  }

 private:
  /// Maxima and sums of a tile's elements that the thread holds.
  struct TileSums {
    float highest[2], sum[2];
  };

  /// Sets the references to the largest logits so far.
  CUTE_DEVICE void move_references(const float (&highest)[2]) {
    // If rounding the shift might change weights, a limit of -inf selects the path that scales only differences of
    // logits.
    constexpr float kLargestShift = 1 << 18;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float next = fmaxf(reference[i], highest[i]);
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
      // A row without visible keys so far keeps weights of zero.
      const bool has_seen = next != -INFINITY;
      shift[i] = has_seen ? fmaf(next, exponent_scale, -kWeightExponent) : 0.f;
      rescale[i] = has_seen ? fast_exp2((reference[i] - next) * exponent_scale) : 0.f;
      reference[i] = next;
      const float excess = __fdividef(kLargestExponent - kWeightExponent, exponent_scale);
      limit[i] = fabsf(shift[i]) > kLargestShift ? -INFINITY : next + excess;
    }
  }

  /// Processes the columns in chunks: a chunk's weights are added and packed after the exponentials of two more chunks
  /// have been started.
  template <bool kIsMasked, class Logits, class Words, class Exponent>
  CUTE_DEVICE static TileSums weigh_by(AccumulatorRows<Logits> s, Words& words, const std::uint32_t (&visible)[2],
                                       const Exponent& exponent) {
    constexpr int kOfChunk = 4, kLag = 2, kChunks = s.kColumns / kOfChunk;
    TileSums tile;
    float sums[2][kOfChunk], weights[kLag + 1][2][kOfChunk];
    for_each(make_int_sequence<kChunks + kLag>{}, [&](auto number) {
      constexpr int kStarted = number, kDone = kStarted - kLag;
      if constexpr (kStarted < kChunks) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float logit[kOfChunk];
          CUTE_UNROLL
          for (int m = 0; m < kOfChunk; ++m) {
            const int n = kStarted * kOfChunk + m;
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
          const float (&weight)[kOfChunk] = weights[kDone % (kLag + 1)][i];
          CUTE_UNROLL
          for (int m = 0; m < kOfChunk; ++m) sums[i][m] = kDone == 0 ? weight[m] : sums[i][m] + weight[m];
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
