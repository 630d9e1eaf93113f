// TMA loads to shared memory. They load tiles and boxes of tokens, which tensor maps describe, or contiguous bytes.
// Requires compute capability 9.0.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/tma/barriers.cuh"

namespace natten_jax {

constexpr int kSwizzledRow = 128;  // bytes

/// Elements per swizzled row. Heads are loaded in chunks of this many elements.
template <class Element>
constexpr int kChunkOf = kSwizzledRow / static_cast<int>(sizeof(Element));
/// Elements per swizzled row for elements of 16 bits.
constexpr int kChunk = 64;

/// Number of rows of `kElements` elements in which a head is loaded or stored. If the head ends inside of the last row,
/// the elements after its end are loaded as zeros and not stored.
template <int kElements>
CUTE_DEVICE int rows_of_head(int head_dim) {
  return (head_dim + kElements - 1) / kElements;
}

/// Loads a tile, with one TMA copy per chunk of the head dimension. `z`, `y`, `x` and `slot` are coordinates of a map
/// from encode_head_map. Threads with few registers should choose a smaller `kUnroll`.
template <int kUnroll = 4, class Element>
CUTE_DEVICE void load_tile(const CUtensorMap* map, std::uint64_t* barrier, Element* destination, int chunks,
                           int tile_rows, int z, int y, int x, int slot) {
  constexpr int kElements = kChunkOf<Element>;
#pragma unroll kUnroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cute::SM90_TMA_LOAD_5D::copy(map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 destination + chunk * tile_rows * kElements, chunk * kElements, z, y, x, slot);
  }
}

/// Loads a box of a map from encode_box_map to shared memory. `element` is the index of the box's first element among
/// the elements of all heads of a token.
CUTE_DEVICE void load_box(const CUtensorMap& map, std::uint32_t to, std::uint32_t barrier, int element, int x, int y,
                          int z, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];"
      :
      : "r"(to), "l"(&map), "r"(element), "r"(x), "r"(y), "r"(z), "r"(batch), "r"(barrier)
      : "memory");
}

/// Loads contiguous bytes to shared memory. `bytes` must be a multiple of 16.
CUTE_DEVICE void load_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace natten_jax
