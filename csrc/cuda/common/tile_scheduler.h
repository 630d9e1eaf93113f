// Which tile a block takes next, and why: the orders of all kernels, for the kernels and for their launches.
//
// Two things are wanted of an order. The longest tiles come first, so that all multiprocessors are done at about the
// same time; and tiles that follow one another share what they read, so that it is still in the second-level cache.
//
//   forward pass          QueryTileSchedule says what a tile's number stands for. CTAs of the portable kernel have a
//                         tile each, by number. Those of the Hopper kernel, which are persistent, get theirs from
//                         TileSupply: in fixed rounds or, where there are many, from a counter, as they are done.
//                         Launches that continue others, with halos, begin with the queries next to these.
//   backward, Hopper      KeyTileSchedule: CTAs take positions from a counter. A position is a tile's number; or, where
//                         tiles are few, that of the next longest tile; or, where tiles take turns in adding to the
//                         query gradient, the tile that comes next in everybody's TurnOrder.
//   backward, elsewhere   A CTA has a tile, or walks over several: `longest_first` in each dimension.
//
// The inner tiles of each, that is those of the other side that it sees, are a box. It is read from its first token on,
// last dimension fastest (tile_walk.cuh). docs/kernels.md says what the orders gained.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/geometry.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// What a tile's number stands for.
struct TilePlace {
  int batch;
  int head;
  int group;       // dilation group
  int residue[3];  // the same, a dimension each
  int index[3];    // in the dilation group
};

/// What tiles' numbers stand for; from the slowest: batch, block of heads, dilation group, tile, head.
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

  /// Late queries of a causal dimension see the most keys: the longest work comes first.
  CUTLASS_HOST_DEVICE static int latest_first(const DeviceAxis& axis, int index) {
    return axis.is_causal() ? axis.q_tiles - 1 - index : index;
  }

  /// Where keys begin at a distance from the queries, in front of them or behind them, those next to them see the most.
  CUTLASS_HOST_DEVICE static int nearest_first(const DeviceAxis& axis, int index, int distance) {
    return distance < 0 ? index : distance > 0 ? axis.q_tiles - 1 - index : latest_first(axis, index);
  }
};

#if defined(__CUDACC__)
/// How many have been counted before; all lanes of a warp take part in counting one more.
__device__ __forceinline__ int count_one_more(std::int32_t* counter) {
  int count = 0;
  if (threadIdx.x % 32 == 0) count = atomicAdd(counter, 1);
  return __shfl_sync(0xffffffffu, count, 0);
}
#endif

/// The tiles of persistent CTAs, round by round; those past the last one do not exist.
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
    // Tiles differ in length, and multiprocessors in speed: whoever is done takes the next.
    return round == 0 ? blockIdx.x : gridDim.x + count_one_more(next_tile);
  }
#endif
};

/// Number of a dimension's `i`th key/value tile by the queries that see them, the most first. Windows at
/// an end of the layout do not shrink, so that keys from half a window to a window away from it are seen by more
/// queries than all others, and those nearer by fewer; the causal ones of the last window are seen by the fewest.
CUTLASS_HOST_DEVICE int longest_first(const DeviceAxis& axis, int i) {
  if (axis.is_causal()) return i;
  const bool at_end = i % 2 != 0;  // from either end
  const int place = i / 2, tiles = (axis.kv_tiles + !at_end) / 2;
  const int nearest = axis.by_kv_tile.divide(axis.kernel_size / 2);
  const int last = smaller(axis.by_kv_tile.divide(axis.kernel_size + axis.kv_tile - 1), tiles);
  const int tile = place < last - nearest    ? last - 1 - place
                   : place < tiles - nearest ? place + nearest
                                             : tiles - 1 - place;
  return at_end ? axis.kv_tiles - 1 - tile : tile;
}

/// One dimension of an order in which key/value tiles add to what they share: from a first one down, then from the last
/// one down. Neighbors then come to their common queries one after the other by themselves.
struct TurnOrder {
  int first;

  /// The `i`th tile.
  CUTLASS_HOST_DEVICE int tile(const DeviceAxis& axis, int i) const {
    return first - i + (i > first ? axis.kv_tiles : 0);
  }

  /// How many of the tiles from `lowest` to `highest` come before one of them.
  CUTLASS_HOST_DEVICE int before(int tile, int lowest, int highest) const {
    const int highest_of_run = smaller(highest, first);
    const int first_run = larger(highest_of_run - lowest + 1, 0);
    return tile <= first ? highest_of_run - tile : first_run + highest - tile;
  }
};

/// Most key/value tiles that are sorted by length.
inline constexpr int kMostSortedTiles = 1024;

/// The order of key/value tiles on Hopper. Tiles of additional tokens come first, which all queries see.
struct KeyTileSchedule {
  std::int32_t* next_tile;  // counts the positions that CTAs have taken, from `first_taken` on
  // [batch, heads, dilation groups, query tiles]: key/value tiles that have added to the query gradient, which they do
  // one after the other in a fixed order; null: in any order
  std::int32_t* turns;
  TurnOrder turn_order[3];
  int first_taken;
  int additional_tiles;  // of the whole problem
  int tiles;             // of the whole problem, those of additional tokens among them
  int groups;            // dilation groups
  int q_tiles;           // query tiles per dilation group
  int first_sorted;      // from this position on, tiles are taken as `by_length` has them
  TileNumbers numbers;   // of tiles of the layout
  cutlass::FastDivmod by_additional_tiles_per_head, by_heads_kv;
  std::uint16_t by_length[kMostSortedTiles];  // counted from `first_sorted`

  /// The number of the tile at a position.
  CUTLASS_HOST_DEVICE int tile_at(int position) const {
    return position < first_sorted ? position : first_sorted + by_length[position - first_sorted];
  }

  /// Place of a tile of additional tokens: batch entry, head and, as all of `index`, its number among the head's.
  CUTLASS_HOST_DEVICE TilePlace additional_place(int tile) const {
    TilePlace result{};
    int outer;
    by_additional_tiles_per_head(outer, result.index[2], tile);
    by_heads_kv(result.batch, result.head, outer);
    return result;
  }

  /// Place of a tile of the layout.
  CUTLASS_HOST_DEVICE TilePlace place(const DeviceAxis (&axis)[3], int tile) const {
    return numbers.place<&DeviceAxis::by_kv_tiles>(axis, tile - additional_tiles);
  }

  /// The tile of a dimension that an index stands for, of keys that begin at a distance from the queries. Those of a
  /// halo, which is in front of all queries where windows are causal, are seen by the more of them the nearer they are.
  CUTLASS_HOST_DEVICE int tile_of(const DeviceAxis& axis, int dimension, int index, int distance) const {
    if (turns != nullptr) return turn_order[dimension].tile(axis, index);
    return axis.is_causal() && distance <= -axis.kv_group_tokens ? axis.kv_tiles - 1 - index : index;
  }

  /// The counters of turns of a dilation group's query tiles, for a row of [batch, heads].
  CUTLASS_HOST_DEVICE std::int32_t* turns_of(int row, int group) const {
    return turns + (static_cast<std::int64_t>(row) * groups + group) * q_tiles;
  }

  /// Whether a CTA's first position is its number. Where tiles take turns, a tile waits for those at positions before
  /// its own, which must have been taken by CTAs that run.
  CUTLASS_HOST_DEVICE bool starts_at_block() const { return turns == nullptr; }

#if defined(__CUDACC__)
  /// The next position, for the CTA that is done first.
  __device__ __forceinline__ int take() const {
    const int count = count_one_more(next_tile);
    return count + (starts_at_block() ? gridDim.x : first_taken);
  }
#endif
};

/// The order of a launch's query tiles.
QueryTileSchedule schedule_query_tiles(const Problem& problem, const Geometry& geometry);

/// The order of a launch's key/value tiles; its counters are left to the caller.
///
/// Args:
///   additional_tiles_per_head: of additional tokens.
///   takes_turns: whether tiles add to the query gradient in a fixed order.
///   multiprocessors: of the device.
///   schedule: the result.
///
/// Fails where there are more tiles than a launch can have.
Status schedule_key_tiles(const Problem& problem, const TileShapes& tiles, const Geometry& geometry,
                          std::int64_t additional_tiles_per_head, bool takes_turns, int multiprocessors,
                          KeyTileSchedule& schedule);

}  // namespace natten_jax
