// The softmax of the forward kernel for 8-bit floats: weights are e4m3 numbers.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

/// Four numbers in one word, the first in the lowest byte.
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

/// The running softmax of the rows of accumulators that a thread holds. Weights are always relative to the largest
/// logit so far: earlier results are multiplied where they are added up, which costs nothing more.
struct Float8Softmax {
  float exponent_scale;  // of the logits, in base 2
  float reference[2];    // the largest logit so far
  float shift[2];        // the same, scaled, less the exponent of its weight
  float row_sum[2];
  float rescale[2];  // what earlier results are multiplied with

  CUTE_DEVICE void start() {
    reference[0] = reference[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
  }

  template <class Logits>
  CUTE_DEVICE void find_references(AccumulatorRows<Logits> s) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      // Two partial results a row halve the chains of dependent instructions.
      float highest[2] = {reference[i], s(i, 2)};
      CUTE_UNROLL
      for (int n = 0; n < s.kColumns; ++n) {
        float& partial = highest[n / 2 % 2];
        partial = fmaxf(partial, s(i, n));
      }
      float next = fmaxf(highest[0], highest[1]);
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
      next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
      // A row that has seen nothing yet keeps weights of zero. Differences are exact, so that nothing is rescaled where
      // the reference stays.
      const bool has_seen = next != -INFINITY;
      shift[i] = has_seen ? fmaf(next, exponent_scale, -kWeightExponent) : 0.f;
      rescale[i] = has_seen ? fast_exp2((reference[i] - next) * exponent_scale) : 0.f;
      reference[i] = next;
    }
  }

  /// Turns logits into unnormalised weights: words of four, as the register operand has them.
  template <class Logits, class Words>
  CUTE_DEVICE void weigh(AccumulatorRows<Logits> s, Words& words) {
    // Rounding the shift must not change weights: where it might, differences of logits are scaled.
    constexpr float kLargestShift = 1 << 18;
    if (__any_sync(0xffffffffu, fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kLargestShift)) {
      weigh_by(s, words, [&](float logit, int i) {
        return fmaf(logit - (reference[i] == -INFINITY ? 0.f : reference[i]), exponent_scale, kWeightExponent);
      });
    } else {
      weigh_by(s, words, [&](float logit, int i) { return fmaf(logit, exponent_scale, -shift[i]); });
    }
  }

  /// Completes the sums over the four threads that share a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
  }

  /// Once these are complete.
  CUTE_DEVICE RowSums sums(int i) const {
    if (row_sum[i] == 0.f) return {0.f, -INFINITY, 0.f};
    const float log2_sum = fast_log2(row_sum[i]) - kWeightExponent;
    const float logsumexp = fmaf(reference[i], exponent_scale, log2_sum) * kLn2;
    return {1.f / row_sum[i], logsumexp, logsumexp_remainder(logsumexp, reference[i], exponent_scale, log2_sum)};
  }

 private:
  template <class Logits, class Words, class Exponent>
  CUTE_DEVICE void weigh_by(AccumulatorRows<Logits> s, Words& words, const Exponent& exponent) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float sums[4];
      CUTE_UNROLL
      for (int group = 0; group < s.kColumns / 4; ++group) {
        float weight[4];
        CUTE_UNROLL
        for (int n = 0; n < 4; ++n) {
          weight[n] = fast_exp2(exponent(s(i, 4 * group + n), i));
          sums[n] = group == 0 ? weight[n] : sums[n] + weight[n];
        }
        words(group / 2 * 4 + group % 2 * 2 + i) = pack_e4m3(weight[0], weight[1], weight[2], weight[3]);
      }
      row_sum[i] = row_sum[i] * rescale[i] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  }
};

}  // namespace natten_jax::sm90
