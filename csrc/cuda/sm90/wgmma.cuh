// What the products of warpgroups have in common: where they end, and where a thread's elements of results lie.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "cuda/sm90/forms.h"
#include "cuda/tma/boxes.cuh"

namespace natten_jax::sm90 {

using namespace cute;

constexpr int kWarp = 32, kWarpgroup = 128;  // threads

/// Whether products of heads, in a form for those of `kSteps` steps, end before a step: what lies behind the chunks of
/// a head is not loaded, and holds whatever was there before. Each question is a branch, at which ptxas orders
/// registers anew, so it is asked at the end of each chunk and, as most heads end there, at every step of the form's
/// last one.
template <int kSteps>
CUTE_DEVICE bool end_before(int step, int head_dim) {
  constexpr int kOfChunk = kChunk / kStep;
  const bool is_asked = step > 0 && (step % kOfChunk == 0 || step > kSteps - kOfChunk);
  return is_asked && step * kStep >= head_dim;
}

/// An accumulator of 64 rows by the two rows, eight apart, that a thread holds elements of: neighbors in pairs, which
/// are eight columns apart.
template <class Accumulator>
struct AccumulatorRows {
  Accumulator& elements;

  /// Elements of a row.
  static constexpr int kColumns = decltype(cute::size(Accumulator{}))::value / 2;

  CUTE_DEVICE explicit AccumulatorRows(Accumulator& elements) : elements(elements) {}

  /// The number in the accumulator of a row's n-th element.
  static constexpr int element(int row, int n) { return n / 2 * 4 + 2 * row + n % 2; }

  CUTE_DEVICE auto& operator()(int row, int n) const { return elements(element(row, n)); }

  /// Replaces the elements whose bits in the word of their row (cuda/common/column_mask.cuh) are not set.
  CUTE_DEVICE void hide(const std::uint32_t (&visible)[2], float replacement) const {
    CUTE_UNROLL
    for (int e = 0; e < size(elements); ++e) {
      const std::uint32_t bit = 1u << (2 * (e / 4) + e % 2);
      if (!(visible[(e / 2) % 2] & bit)) elements(e) = replacement;
    }
  }
};

}  // namespace natten_jax::sm90
