// Copies columns of regions that extend across a seam, the edge at which a wrapped dimension continues at its other
// end.
#pragma once

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Like CtaItems, but for problems with a wrapped dimension.
struct WrappingItems : CtaItems {
  static constexpr bool kMayWrap = true;

  using CtaItems::CtaItems;
};

/// Copies columns with all threads, in the shared memory layout of TMA boxes. TMA cannot load these boxes: a seam may
/// divide a box anywhere, and TMA fills elements outside of the array with zeros.
template <int kHeadDim>
struct SeamCopy {
  static constexpr int kChunks = kHeadDim / 8;
  int token_bytes;

  CUTE_DEVICE SeamCopy(int heads, int, int) : token_bytes(heads * 2 * kHeadDim) {}

  /// Starts to copy a region's columns from two arrays. `first` and `second` are the addresses of the item's first row
  /// in these arrays.
  CUTE_DEVICE void box(const Tables& tables, const void* first, const void* second, std::uint32_t stage) const {
    const int chunk = threadIdx.x % kChunks;
    const char* const first_source = static_cast<const char*>(first) + chunk * 16;
    const char* const second_source = static_cast<const char*>(second) + chunk * 16;
#pragma unroll 4
    for (int i = threadIdx.x / kChunks; i < tables.columns; i += blockDim.x / kChunks) {
      const int2 column = tables.column_offsets[i];
      const std::uint32_t to = (stage + column.y) ^ chunk << 4;
      copy_chunk(to, advance(first_source, column.x, token_bytes), 16);
      copy_chunk(to + tables.second, advance(second_source, column.x, token_bytes), 16);
    }
  }

  /// Copies the keys and values that a region's queries see.
  template <class Params>
  CUTE_DEVICE void keys(const Params& p, const Tables& tables, const Item& item, std::uint32_t stage) const {
    const int key_row = item.key_row(p);
    box(tables, row_of(p.key, key_row, kHeadDim), row_of(p.value, key_row, kHeadDim), stage);
  }
};

template <int kHeadDim, bool kHasBoxes>
using ColumnCopies = std::conditional_t<kHasBoxes, SeamCopy<kHeadDim>, ColumnCopy<kHeadDim>>;

}  // namespace natten_jax::small
