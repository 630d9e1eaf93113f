// Where a thread's elements of a wgmma accumulator lie.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

namespace natten_jax::sm90 {

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
