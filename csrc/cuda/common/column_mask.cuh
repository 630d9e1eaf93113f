// Masks of an accumulator's columns. The mask of a row has one bit for each of its elements that the thread holds.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/tile_boxes.h"

namespace natten_jax {

/// Computes masks from tables. The keys that a query attends to form a box, and so do the queries that attend to a key.
/// So a mask is an intersection of one range of coordinates per dimension. The mask of a range [begin, end) contains
/// the elements with `coordinate < end`, except those with `coordinate < begin`. The masks of `coordinate < cut` for
/// all cuts are tabulated once per CTA. `kTile` is the member of DeviceAxis that contains the extent of a tile.
///
/// Element e of a row is in column 8 * (e / 2) + 2 * (lane % 4) + e % 2, as in accumulators of mma and wgmma.
template <int DeviceAxis::* kTile, cutlass::FastDivmod DeviceAxis::* kByTile>
struct BoxMask {
  std::uint32_t* words;  // [dimension][cut][lane % 4]
  int offset[3];

  CUTE_DEVICE BoxMask(std::uint32_t* words, const DeviceAxis (&axis)[3])
      : words(words), offset{0, 4 * (axis[0].*kTile + 1), 4 * (axis[0].*kTile + 1 + axis[1].*kTile + 1)} {}

  /// Number of words in the tables for tiles of at most `columns` columns.
  static constexpr int capacity(int columns) { return 4 * (columns + 2 + 2 * 2); }

  /// Fills the tables. All lanes of warps 0 to `warps` - 1 must call this. A barrier must follow before the tables are
  /// used.
  ///
  /// Args:
  ///   boxes: boxes in which tiles are loaded; null if tiles are loaded as a whole.
  template <int kColumns>
  CUTE_DEVICE void build(const DeviceAxis (&axis)[3], int warp, int warps, const TileBoxes* boxes = nullptr) const {
    // Lane i computes the bit of element i of a row, in the masks of threads whose lane number modulo 4 is `lane4`.
    const int lane = threadIdx.x % 32, lane4 = warp % 4;
    const int column = 8 * (lane / 2) + 2 * lane4 + lane % 2;
    const bool is_whole = boxes == nullptr || !boxes->has_seams;
    const int3 at = is_whole ? position_in_tile<kByTile>(axis, column) : position_in_boxes(*boxes, column);
#pragma unroll 1
    for (int d = 0; d < 3; ++d) {
      const int coordinate = d == 0 ? at.x : d == 1 ? at.y : at.z;
      // Computes 32 cuts at a time: lane i keeps the word of cut `first` + i.
      for (int first = 32 * (warp / 4); first <= axis[d].*kTile; first += 32 * (warps / 4)) {
        std::uint32_t word = 0;
        const int cuts = min(axis[d].*kTile + 1 - first, 32);
        // The loop is not unrolled, because a CTA fills the tables only once. Fetching the instructions of unrolled
        // code would make a Hopper forward pass of 60 microseconds 0.5% slower.
#pragma unroll 1
        for (int i = 0; i < cuts; ++i) {
          const std::uint32_t bits = __ballot_sync(0xffffffffu, lane < kColumns / 4 && coordinate < first + i);
          word = lane == i ? bits : word;
        }
        if (lane < cuts) words[offset[d] + 4 * (first + lane) + lane4] = word;
      }
    }
  }

  /// Mask of a row: the elements whose tokens lie in [begin, end) in every dimension. `tile` is the tile's first token.
  CUTE_DEVICE std::uint32_t row(const DeviceAxis (&axis)[3], int4 begin, int4 end, int4 tile, int lane4) const {
    return between(0, axis[0].*kTile, begin.x - tile.x, end.x - tile.x, lane4) &
           between(1, axis[1].*kTile, begin.y - tile.y, end.y - tile.y, lane4) &
           between(2, axis[2].*kTile, begin.z - tile.z, end.z - tile.z, lane4);
  }

  /// Mask of the elements in the first `columns` columns.
  CUTE_DEVICE static std::uint32_t first(int columns, int lane4) {
    const int even = max(columns - 2 * lane4 + 7, 0) / 8, odd = max(columns - 2 * lane4 + 6, 0) / 8;
    const auto lowest = [](int pairs) { return pairs >= 16 ? 0xffffffffu : (1u << 2 * pairs) - 1; };
    return (lowest(even) & 0x55555555u) | (lowest(odd) & 0xaaaaaaaau);
  }

 private:
  CUTE_DEVICE std::uint32_t between(int d, int extent, int begin, int end, int lane4) const {
    const std::uint32_t* axis_words = words + offset[d] + lane4;
    return axis_words[4 * min(max(end, 0), extent)] & ~axis_words[4 * min(max(begin, 0), extent)];
  }
};

/// A BoxMask for one of the four threads that share a row. It keeps the addresses of the tables in registers.
template <class Mask>
struct LaneMask;

template <int DeviceAxis::* kTile, cutlass::FastDivmod DeviceAxis::* kByTile>
struct LaneMask<BoxMask<kTile, kByTile>> {
  using Mask = BoxMask<kTile, kByTile>;

  std::uint32_t address[3];  // shared-memory address of cut 0, per dimension

  CUTE_DEVICE LaneMask(const Mask& mask, int lane4) {
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      address[d] = cute::cast_smem_ptr_to_uint(mask.words + mask.offset[d] + lane4);
      // Hides from the compiler how the address was computed. Otherwise, if registers are scarce, the compiler would
      // recompute the address for every tile.
      asm volatile("" : "+r"(address[d]));
    }
  }

  /// Mask of a row: the elements whose tokens lie in [begin, end) in every dimension. `tile` is the tile's first token.
  CUTE_DEVICE std::uint32_t row(const DeviceAxis (&axis)[3], int4 begin, int4 end, int4 tile) const {
    return between(0, axis[0].*kTile, make_int2(begin.x, end.x), tile.x) &
           between(1, axis[1].*kTile, make_int2(begin.y, end.y), tile.y) &
           between(2, axis[2].*kTile, make_int2(begin.z, end.z), tile.z);
  }

  /// Mask of the elements whose coordinates in dimension `d` lie in [range.x, range.y). In this dimension, the tile has
  /// `extent` tokens and starts at `first`.
  CUTE_DEVICE std::uint32_t between(int d, int extent, int2 range, int first) const {
    return less(d, extent, range.y - first) & ~less(d, extent, range.x - first);
  }

 private:
  CUTE_DEVICE std::uint32_t less(int d, int extent, int cut) const {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address[d] + 16 * min(max(cut, 0), extent)));
    return word;
  }
};

/// Columns are keys, rows are queries.
using KeyColumnMask = BoxMask<&DeviceAxis::kv_tile, &DeviceAxis::by_kv_tile>;
/// Columns are queries, rows are keys.
using QueryColumnMask = BoxMask<&DeviceAxis::q_tile, &DeviceAxis::by_q_tile>;

}  // namespace natten_jax
