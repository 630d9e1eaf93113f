// Helpers for wgmma products: the check for the end of narrow heads, and the positions of a thread's elements in an
// accumulator.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "cuda/sm90/forms.h"
#include "cuda/tma/boxes.cuh"

namespace natten_jax::sm90 {

using namespace cute;

constexpr int kWarp = 32, kWarpgroup = 128;  // threads

/// True if a product over the head dimension ends before k-step `step`, in a form with `kSteps` k-steps. The product
/// must end with the last chunk of the head, because shared memory after that chunk is not loaded and contains stale
/// data. Every check adds a branch, and ptxas allocates registers differently with every branch. So the function checks
/// `head_dim` only at the end of each chunk and, in the form's last chunk, at every k-step. Most heads end at these
/// k-steps.
template <int kSteps>
CUTE_DEVICE bool end_before(int step, int head_dim) {
  constexpr int kChunkSteps = kChunk / kStep;
  const bool is_checked = step > 0 && (step % kChunkSteps == 0 || step > kSteps - kChunkSteps);
  return is_checked && step * kStep >= head_dim;
}

/// View of a 64-row accumulator as the two rows of which a thread holds elements. The rows are eight apart. In each
/// row, the thread holds pairs of neighboring columns, and consecutive pairs are eight columns apart.
template <class Accumulator>
struct AccumulatorRows {
  Accumulator& elements;

  /// Number of elements of a row that a thread holds.
  static constexpr int kColumns = decltype(cute::size(Accumulator{}))::value / 2;

  CUTE_DEVICE explicit AccumulatorRows(Accumulator& elements) : elements(elements) {}

  /// Index in the accumulator of the `n`th element that the thread holds of row `row`.
  static constexpr int element(int row, int n) { return n / 2 * 4 + 2 * row + n % 2; }

  CUTE_DEVICE auto& operator()(int row, int n) const { return elements(element(row, n)); }

  /// Writes `replacement` to all elements that are masked out. `visible` contains a mask word per row
  /// (cuda/common/column_mask.cuh), in which the bits of these elements are not set.
  CUTE_DEVICE void replace_masked(const std::uint32_t (&visible)[2], float replacement) const {
    CUTE_UNROLL
    for (int e = 0; e < size(elements); ++e) {
      const std::uint32_t bit = 1u << (2 * (e / 4) + e % 2);
      if (!(visible[(e / 2) % 2] & bit)) elements(e) = replacement;
    }
  }
};

}  // namespace natten_jax::sm90
