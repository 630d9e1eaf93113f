// Orders in which CTAs take tiles, for all kernels and their launches.
//
// An order has two goals. The longest tiles come first, so that all SMs finish at about the same time. Consecutive
// tiles read the same data, so that it is still in L2.
//
//   forward pass          QueryTileSchedule maps a tile's number to its position. In the portable kernel, the number
//                         is the CTA's block index. Persistent CTAs of the Hopper kernel get tiles from TileSupply: in
//                         fixed rounds or, if there are many tiles, from a counter whenever a CTA is done. Launches
//                         that continue earlier ones, with halos, begin with the queries next to the halos.
//   backward, Hopper      KeyTileSchedule: CTAs take positions from a counter. A position is a tile's number; if there
//                         are few tiles, it is the next longest tile; if tiles take turns in adding to the query
//                         gradient, it is the next tile of the common TurnOrder.
//   backward, elsewhere   A CTA processes one tile, or iterates over several: `longest_first` in each dimension.
//
// The inner tiles of a tile are the key/value tiles that a query tile sees, or the query tiles that see a key/value
// tile. They form a box, and are read from the box's first token on, last dimension fastest (tile_walk.cuh).
// docs/kernels.md lists the gains of these orders.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/geometry.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Position of a tile.
struct TilePlace {
  int batch;
  int head;
  int group;       // dilation group
  int residue[3];  // per dimension
  int index[3];    // in the dilation group
};

/// Numbering of tiles. Indices from slowest to fastest: batch, block of heads, dilation group, tile, head.
struct TileNumbers {
  int heads_per_block;  // heads whose tiles are interleaved
  cutlass::FastDivmod by_tiles_per_group, by_groups, by_heads_per_block, by_head_blocks;

  template <cutlass::FastDivmod DeviceAxis::* kByTiles>
  CUTLASS_HOST_DEVICE TilePlace place(const DeviceAxis (&axis)[3], int tile) const {
    TilePlace result;
    int outer, in_group, in_groups, head_block;
    by_heads_per_block(outer, result.head, tile);
    by_tiles_per_group(outer, in_group, outer);
    (axis[2].*kByTiles)(in_group, result.index[2], in_group);
    (axis[1].*kByTiles)(result.index[0], result.index[1], in_group);
    by_groups(outer, result.group, outer);
    by_head_blocks(result.batch, head_block, outer);
    result.head += head_block * heads_per_block;
    axis[2].by_dilation(in_groups, result.residue[2], result.group);
    axis[1].by_dilation(result.residue[0], result.residue[1], in_groups);
    return result;
  }
};

/// The order of query tiles.
struct QueryTileSchedule {
  TileNumbers numbers;

  CUTLASS_HOST_DEVICE TilePlace place(const DeviceAxis (&axis)[3], int tile) const {
    return numbers.place<&DeviceAxis::by_q_tiles>(axis, tile);
  }

  /// Reverses causal dimensions: late queries see the most keys, and the longest work comes first.
  CUTLASS_HOST_DEVICE static int latest_first(const DeviceAxis& axis, int index) {
    return axis.is_causal() ? axis.q_tiles - 1 - index : index;
  }

  /// If keys begin at a distance before or after the queries, the nearest queries see the most keys and come first.
  CUTLASS_HOST_DEVICE static int nearest_first(const DeviceAxis& axis, int index, int distance) {
    return distance < 0 ? index : distance > 0 ? axis.q_tiles - 1 - index : latest_first(axis, index);
  }
};

#if defined(__CUDACC__)
/// Warp-collective atomicAdd(1). Returns the old value.
__device__ __forceinline__ int count_one_more(std::int32_t* counter) {
  int count = 0;
  if (threadIdx.x % 32 == 0) count = atomicAdd(counter, 1);
  return __shfl_sync(0xffffffffu, count, 0);
}
#endif

/// Supplies persistent CTAs with tiles, round by round. Numbers past the last tile mark the end.
struct TileSupply {
  std::int32_t* next_tile;  // counts the tiles that CTAs have taken; null: CTAs take them in a fixed order
  int tiles;

#if defined(__CUDACC__)
  __device__ __forceinline__ int take(int round) const {
    if (next_tile == nullptr) {
      // Every other round runs backwards, so that no CTA always gets the shorter tiles.
      const int first = round * static_cast<int>(gridDim.x);
      return first + static_cast<int>(round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    // Tiles differ in length, and SMs in speed: a CTA that is done takes the next tile.
    return round == 0 ? blockIdx.x : gridDim.x + count_one_more(next_tile);
  }
#endif
};

/// Number of the `i`th key/value tile of a dimension, if tiles are ordered by the number of queries that see them, most
/// first. Windows at an end of the layout do not shrink. So keys from half a window to a window away from the end are
/// seen by more queries than all others, and nearer keys by fewer. If the dimension is causal, the keys of the last
/// window are seen by the fewest queries.
CUTLASS_HOST_DEVICE int longest_first(const DeviceAxis& axis, int i) {
  if (axis.is_causal()) return i;
  const bool at_end = i % 2 != 0;  // odd tiles count from the other end
  const int place = i / 2, tiles = (axis.kv_tiles + !at_end) / 2;
  const int nearest = axis.by_kv_tile.divide(axis.kernel_size / 2);
  const int last = smaller(axis.by_kv_tile.divide(axis.kernel_size + axis.kv_tile - 1), tiles);
  const int tile = place < last - nearest    ? last - 1 - place
                   : place < tiles - nearest ? place + nearest
                                             : tiles - 1 - place;
  return at_end ? axis.kv_tiles - 1 - tile : tile;
}

/// One dimension of the order in which key/value tiles add to shared results: from tile `first` down, then from the
/// last tile down. Neighboring tiles then naturally reach their common queries one after the other.
struct TurnOrder {
  int first;

  /// The `i`th tile.
  CUTLASS_HOST_DEVICE int tile(const DeviceAxis& axis, int i) const {
    return first - i + (i > first ? axis.kv_tiles : 0);
  }

  /// Number of tiles from `lowest` to `highest` that come before `tile`.
  CUTLASS_HOST_DEVICE int before(int tile, int lowest, int highest) const {
    const int highest_of_run = smaller(highest, first);
    const int first_run = larger(highest_of_run - lowest + 1, 0);
    return tile <= first ? highest_of_run - tile : first_run + highest - tile;
  }
};

/// Maximum number of key/value tiles that are sorted by length.
inline constexpr int kMostSortedTiles = 1024;

/// Order of key/value tiles on Hopper. Tiles of additional tokens, which all queries see, come first.
struct KeyTileSchedule {
  std::int32_t* next_tile;  // counts the positions that CTAs have taken, from `first_taken` on
  // [batch, heads, dilation groups, query tiles]: number of key/value tiles that have added to a query tile's dQ, in a
  // fixed order; null: in any order
  std::int32_t* turns;
  TurnOrder turn_order[3];
  int first_taken;
  int additional_tiles;  // of the whole problem
  int tiles;             // of the whole problem, including additional tokens
  int groups;            // dilation groups
  int q_tiles;           // query tiles per dilation group
  int first_sorted;      // from this position on, tiles are taken in the order of `by_length`
  TileNumbers numbers;   // of tiles of the layout
  cutlass::FastDivmod by_additional_tiles_per_head, by_heads_kv;
  std::uint16_t by_length[kMostSortedTiles];  // counted from `first_sorted`

  /// Number of the tile at a position.
  CUTLASS_HOST_DEVICE int tile_at(int position) const {
    return position < first_sorted ? position : first_sorted + by_length[position - first_sorted];
  }

  /// Position of a tile of additional tokens: batch entry, head and, as index[2], its number in the head.
  CUTLASS_HOST_DEVICE TilePlace additional_place(int tile) const {
    TilePlace result{};
    int outer;
    by_additional_tiles_per_head(outer, result.index[2], tile);
    by_heads_kv(result.batch, result.head, outer);
    return result;
  }

  /// Position of a tile of the layout.
  CUTLASS_HOST_DEVICE TilePlace place(const DeviceAxis (&axis)[3], int tile) const {
    return numbers.place<&DeviceAxis::by_kv_tiles>(axis, tile - additional_tiles);
  }

  /// Number of the tile at position `index` of a dimension's order. `distance`: from the queries to the keys. A halo of
  /// a causal dimension lies before all queries: its nearest tiles are seen by the most queries, and come first.
  CUTLASS_HOST_DEVICE int tile_of(const DeviceAxis& axis, int dimension, int index, int distance) const {
    if (turns != nullptr) return turn_order[dimension].tile(axis, index);
    return axis.is_causal() && distance <= -axis.kv_group_tokens ? axis.kv_tiles - 1 - index : index;
  }

  /// Turn counters of a dilation group's query tiles, for a row of [batch, heads].
  CUTLASS_HOST_DEVICE std::int32_t* turns_of(int row, int group) const {
    return turns + (static_cast<std::int64_t>(row) * groups + group) * q_tiles;
  }

  /// True if a CTA's first position is its block index. If tiles take turns, a tile waits for tiles at earlier
  /// positions, which must have been taken by running CTAs.
  CUTLASS_HOST_DEVICE bool starts_at_block() const { return turns == nullptr; }

#if defined(__CUDACC__)
  /// Takes the next position: the first CTA that is done gets it.
  __device__ __forceinline__ int take() const {
    const int count = count_one_more(next_tile);
    return count + (starts_at_block() ? gridDim.x : first_taken);
  }
#endif
};

/// Order of a launch's query tiles.
QueryTileSchedule schedule_query_tiles(const Problem& problem, const Geometry& geometry);

/// Computes the order of a launch's key/value tiles. The caller sets its counters.
///
/// Args:
///   additional_tiles_per_head: tiles of additional tokens.
///   takes_turns: true if tiles add to the query gradient in a fixed order.
///   multiprocessors: number of SMs of the device.
///   schedule: the result.
///
/// Fails if there are more tiles than a launch supports.
Status schedule_key_tiles(const Problem& problem, const TileShapes& tiles, const Geometry& geometry,
                          std::int64_t additional_tiles_per_head, bool takes_turns, int multiprocessors,
                          KeyTileSchedule& schedule);

}  // namespace natten_jax
