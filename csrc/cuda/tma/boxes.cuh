// Boxes of tokens that the copy engine moves, as tensor maps describe them: compute capability 9.0.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/tma/barriers.cuh"

namespace natten_jax {

constexpr int kSwizzledRow = 128;  // bytes

/// Elements of a swizzled row: head dimensions are loaded in chunks of this many.
template <class Element>
constexpr int kChunkOf = kSwizzledRow / static_cast<int>(sizeof(Element));
/// The same for elements of 16 bits.
constexpr int kChunk = 64;

/// Rows of `kElements` elements that a head is loaded or stored in; of the last one, what lies past the head is zero,
/// or is not stored.
template <int kElements>
CUTE_DEVICE int rows_of_head(int head_dim) {
  return (head_dim + kElements - 1) / kElements;
}

/// Loads a tile, chunk by chunk of its head dimension; coordinates come as a head map has its dimensions. Threads that
/// have few registers unroll less.
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

/// Loads a box of an array's heads, of which `element` is the first one's first element, to an address in shared
/// memory.
CUTE_DEVICE void load_box(const CUtensorMap& map, std::uint32_t to, std::uint32_t barrier, int element, int x, int y,
                          int z, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];"
      :
      : "r"(to), "l"(&map), "r"(element), "r"(x), "r"(y), "r"(z), "r"(batch), "r"(barrier)
      : "memory");
}

/// Loads bytes that follow each other, chunks of 16, to an address in shared memory.
CUTE_DEVICE void load_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace natten_jax
