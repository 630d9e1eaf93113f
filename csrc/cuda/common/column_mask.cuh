// Masks of an accumulator's columns for a row: one bit per element that a thread holds of the row.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/tile_boxes.h"

namespace natten_jax {

/// The keys that a query sees form a box, and so do the queries that see a key. A row's columns in a tile of extents
/// `kTile` are the intersection of one range per dimension. A range is a difference of two sets "coordinate less than
/// cut", which are tabulated once per CTA.
///
/// Element e of a row is column 8 * (e / 2) + 2 * (lane % 4) + e % 2, as in accumulators of mma and wgmma.
template <int DeviceAxis::* kTile, cutlass::FastDivmod DeviceAxis::* kByTile>
struct BoxMask {
  std::uint32_t* words;  // [dimension][cut][lane % 4]
  int offset[3];

  CUTE_DEVICE BoxMask(std::uint32_t* words, const DeviceAxis (&axis)[3])
      : words(words), offset{0, 4 * (axis[0].*kTile + 1), 4 * (axis[0].*kTile + 1 + axis[1].*kTile + 1)} {}

  /// Number of words in the tables for tiles of at most `columns` columns.
  static constexpr int capacity(int columns) { return 4 * (columns + 2 + 2 * 2); }

  /// Fills the tables. All lanes of warps 0 to `warps` - 1 take part; the results need a barrier before use.
  ///
  /// Args:
  ///   boxes: boxes in which tiles are loaded; null: whole tiles.
  template <int kColumns>
  CUTE_DEVICE void build(const DeviceAxis (&axis)[3], int warp, int warps, const TileBoxes* boxes = nullptr) const {
    // Each lane represents one of the elements of a row that threads whose number modulo 4 is `lane4` hold.
    const int lane = threadIdx.x % 32, lane4 = warp % 4;
    const int column = 8 * (lane / 2) + 2 * lane4 + lane % 2;
    const bool is_whole = boxes == nullptr || !boxes->go_around;
    const int3 at = is_whole ? place_in_tile<kByTile>(axis, column) : place_in_boxes(*boxes, column);
#pragma unroll 1
    for (int d = 0; d < 3; ++d) {
      const int coordinate = d == 0 ? at.x : d == 1 ? at.y : at.z;
      // Each lane keeps the word of one of 32 cuts.
      for (int first = 32 * (warp / 4); first <= axis[d].*kTile; first += 32 * (warps / 4)) {
        std::uint32_t word = 0;
        const int cuts = min(axis[d].*kTile + 1 - first, 32);
        // This runs once: fetching unrolled code takes longer than looping, by 0.5% of a Hopper forward pass of 60
        // microseconds.
#pragma unroll 1
        for (int i = 0; i < cuts; ++i) {
          const std::uint32_t bits = __ballot_sync(0xffffffffu, lane < kColumns / 4 && coordinate < first + i);
          word = lane == i ? bits : word;
        }
        if (lane < cuts) words[offset[d] + 4 * (first + lane) + lane4] = word;
      }
    }
  }

  /// Bits of a row's elements whose tokens lie in [begin, end) in every dimension; `tile` is the tile's first token.
  CUTE_DEVICE std::uint32_t row(const DeviceAxis (&axis)[3], int4 begin, int4 end, int4 tile, int lane4) const {
    return between(0, axis[0].*kTile, begin.x - tile.x, end.x - tile.x, lane4) &
           between(1, axis[1].*kTile, begin.y - tile.y, end.y - tile.y, lane4) &
           between(2, axis[2].*kTile, begin.z - tile.z, end.z - tile.z, lane4);
  }

  /// Bits of the elements in the first `columns` columns.
  CUTE_DEVICE static std::uint32_t first(int columns, int lane4) {
    const int even = max(columns - 2 * lane4 + 7, 0) / 8, odd = max(columns - 2 * lane4 + 6, 0) / 8;
    const auto lowest = [](int pairs) { return pairs >= 16 ? 0xffffffffu : (1u << 2 * pairs) - 1; };
    return (lowest(even) & 0x55555555u) | (lowest(odd) & 0xaaaaaaaau);
  }

 private:
  CUTE_DEVICE std::uint32_t between(int d, int extent, int begin, int end, int lane4) const {
    const std::uint32_t* of_axis = words + offset[d] + lane4;
    return of_axis[4 * min(max(end, 0), extent)] & ~of_axis[4 * min(max(begin, 0), extent)];
  }
};

/// Tables of a BoxMask for one of the four threads that share a row, which keeps the tables' addresses.
template <class Mask>
struct LaneMask;

template <int DeviceAxis::* kTile, cutlass::FastDivmod DeviceAxis::* kByTile>
struct LaneMask<BoxMask<kTile, kByTile>> {
  using Mask = BoxMask<kTile, kByTile>;

  std::uint32_t address[3];  // of a dimension's cut 0, in shared memory

  CUTE_DEVICE LaneMask(const Mask& mask, int lane4) {
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      address[d] = cute::cast_smem_ptr_to_uint(mask.words + mask.offset[d] + lane4);
      // Opaque to the compiler, which would recompute it for every tile when registers are few.
      asm volatile("" : "+r"(address[d]));
    }
  }

  /// Bits of a row's elements whose tokens lie in [begin, end) in every dimension; `tile` is the tile's first token.
  CUTE_DEVICE std::uint32_t row(const DeviceAxis (&axis)[3], int4 begin, int4 end, int4 tile) const {
    return between(0, axis[0].*kTile, make_int2(begin.x, end.x), tile.x) &
           between(1, axis[1].*kTile, make_int2(begin.y, end.y), tile.y) &
           between(2, axis[2].*kTile, make_int2(begin.z, end.z), tile.z);
  }

  /// Bits of a row's elements with coordinates in [range.x, range.y) of a dimension. The tile has `extent` tokens and
  /// starts at `first`.
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
