// Common parts of wgmma products: the end of narrow heads, and the positions of a thread's result elements.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "cuda/sm90/forms.h"
#include "cuda/tma/boxes.cuh"

namespace natten_jax::sm90 {

using namespace cute;

constexpr int kWarp = 32, kWarpgroup = 128;  // threads

/// True if products over a head end before k-step `step`, in a form with `kSteps` k-steps. Shared memory after the
/// chunks of a head is not loaded and holds stale data. Each check adds a branch, and ptxas allocates registers
/// differently with every branch. So only the end of each chunk and every step of the form's last chunk are checked,
/// because most heads end there.
template <int kSteps>
CUTE_DEVICE bool end_before(int step, int head_dim) {
  constexpr int kOfChunk = kChunk / kStep;
  const bool is_asked = step > 0 && (step % kOfChunk == 0 || step > kSteps - kOfChunk);
  return is_asked && step * kStep >= head_dim;
}

/// View of a 64-row accumulator as the two rows, eight apart, that a thread holds elements of. Elements are pairs of
/// neighboring columns; the pairs are eight columns apart.
template <class Accumulator>
struct AccumulatorRows {
  Accumulator& elements;

  /// Elements per row.
  static constexpr int kColumns = decltype(cute::size(Accumulator{}))::value / 2;

  CUTE_DEVICE explicit AccumulatorRows(Accumulator& elements) : elements(elements) {}

  /// Index in the accumulator of a row's n-th element.
  static constexpr int element(int row, int n) { return n / 2 * 4 + 2 * row + n % 2; }

  CUTE_DEVICE auto& operator()(int row, int n) const { return elements(element(row, n)); }

  /// Replaces the elements whose bits in their row's mask word (cuda/common/column_mask.cuh) are not set.
  CUTE_DEVICE void hide(const std::uint32_t (&visible)[2], float replacement) const {
    CUTE_UNROLL
    for (int e = 0; e < size(elements); ++e) {
      const std::uint32_t bit = 1u << (2 * (e / 4) + e % 2);
      if (!(visible[(e / 2) % 2] & bit)) elements(e) = replacement;
    }
  }
};

}  // namespace natten_jax::sm90
