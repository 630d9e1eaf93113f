// The order in which CTAs process tiles, for all kernels and their launches.
//
// The order has two goals. The longest tiles come first, so that all SMs finish at about the same time. Consecutive
// tiles read the same data, so that L2 still holds it for the later tile.
//
//   forward pass          QueryTileSchedule maps a tile's number to its batch entry, head and coordinates. In the
//                         portable kernel, the number is the CTA's block index. In the Hopper kernel, persistent CTAs
//                         get numbers from TileSupply. If there are few tiles, every CTA gets one tile per round. If
//                         there are many, a CTA that is done takes the next tile from a counter. A launch that
//                         continues an earlier launch with the keys of a halo begins with the queries next to the halo.
//   backward, Hopper      KeyTileSchedule: CTAs take positions from a counter and process the tiles at these positions.
//                         Tiles are ordered by number, except the last ones, which are ordered by length, longest
//                         first. If tiles add to the query gradient in a fixed order (take turns), they are ordered by
//                         AdditionOrder in each dimension.
//   backward, elsewhere   A CTA processes one tile, or several in sequence. Tiles are ordered by `longest_first` in
//                         each dimension.
//
// While a CTA processes a tile, it iterates over inner tiles. In the forward pass, these are the key/value tiles that
// the query tile attends to (sees). In the backward pass, they are the query tiles that attend to the key/value tile.
// The inner tiles cover a box of tokens. The first one begins at the first token of the box, and the last dimension
// varies fastest (tile_walk.cuh). docs/kernels.md lists the gains of these orders.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/geometry.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Batch entry, head, dilation group and coordinates of a tile.
struct TilePosition {
  int batch;
  int head;
  int group;       // dilation group
  int residue[3];  // per dimension: coordinates of the dilation group's tokens modulo the dilation
  int index[3];    // per dimension: index of the tile among the tiles of the dilation group
};

/// Numbering of tiles. A number enumerates [batch, block of heads, dilation group, tile of the group, head of the
/// block], last dimension fastest.
struct TileNumbers {
  int heads_per_block;  // number of heads whose tiles are interleaved
  cutlass::FastDivmod by_tiles_per_group, by_groups, by_heads_per_block, by_head_blocks;

  template <cutlass::FastDivmod DeviceAxis::* kByTiles>
  CUTLASS_HOST_DEVICE TilePosition locate(const DeviceAxis (&axis)[3], int tile) const {
    TilePosition result;
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

/// Order of the query tiles of a launch.
struct QueryTileSchedule {
  TileNumbers numbers;

  CUTLASS_HOST_DEVICE TilePosition locate(const DeviceAxis (&axis)[3], int tile) const {
    return numbers.locate<&DeviceAxis::by_q_tiles>(axis, tile);
  }

  /// Index of the `index`th tile of a dimension. Causal dimensions are reversed, because the last queries attend to the
  /// most keys, and the longest tiles come first.
  CUTLASS_HOST_DEVICE static int latest_first(const DeviceAxis& axis, int index) {
    return axis.is_causal() ? axis.q_tiles - 1 - index : index;
  }

  /// Index of the `index`th tile of a dimension, if the keys begin `distance` tokens after the queries (negative:
  /// before them). The queries nearest to the keys attend to the most keys, so they come first.
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

/// Supplies persistent CTAs with tile numbers, one per round. A number of at least `tiles` means that no tile is left.
struct TileSupply {
  // Number of tiles that CTAs have taken so far, without the first tile of each CTA. Null: tiles are assigned in a
  // fixed order.
  std::int32_t* next_tile;
  int tiles;

#if defined(__CUDACC__)
  __device__ __forceinline__ int take(int round) const {
    if (next_tile == nullptr) {
      // Every other round assigns tiles in reverse order of CTAs, so that no CTA always gets the shorter tiles.
      const int first = round * static_cast<int>(gridDim.x);
      return first + static_cast<int>(round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    // A CTA that is done takes the next tile, because tiles differ in length, and SMs differ in speed.
    return round == 0 ? blockIdx.x : gridDim.x + count_one_more(next_tile);
  }
#endif
};

/// Index of the `i`th key/value tile of a dimension. Tiles are ordered by the number of queries that attend to them,
/// largest number first.
///
/// At an end of the layout, windows are shifted inwards and keep their size. So keys whose distance from the end is
/// between half a window and a window are attended to by the most queries, and keys nearer to the end by the fewest. In
/// a causal dimension, the keys of the last window are attended to by the fewest queries.
CUTLASS_HOST_DEVICE int longest_first(const DeviceAxis& axis, int i) {
  if (axis.is_causal()) return i;
  const bool at_end = i % 2 != 0;  // for odd `i`, tiles are counted from the last one
  const int index = i / 2, tiles = (axis.kv_tiles + !at_end) / 2;
  const int nearest = axis.by_kv_tile.divide(axis.kernel_size / 2);
  const int last = smaller(axis.by_kv_tile.divide(axis.kernel_size + axis.kv_tile - 1), tiles);
  const int tile = index < last - nearest    ? last - 1 - index
                   : index < tiles - nearest ? index + nearest
                                             : tiles - 1 - index;
  return at_end ? axis.kv_tiles - 1 - tile : tile;
}

/// Order in which key/value tiles add to the query gradient, in one dimension: tiles `first`, `first` - 1, ..., 0, then
/// the last tile down to tile `first` + 1.
///
/// Every key/value tile iterates over its query tiles in ascending order. A tile usually has a lower index than its
/// predecessor in this order. So it starts at earlier queries, and reaches the queries that both tiles share later than
/// its predecessor does.
struct AdditionOrder {
  int first;

  /// Index of the `i`th tile of the order.
  CUTLASS_HOST_DEVICE int tile(const DeviceAxis& axis, int i) const {
    return first - i + (i > first ? axis.kv_tiles : 0);
  }

  /// Number of tiles with indices from `lowest` to `highest` that come before `tile` in the order.
  CUTLASS_HOST_DEVICE int before(int tile, int lowest, int highest) const {
    const int highest_of_run = smaller(highest, first);
    const int first_run = larger(highest_of_run - lowest + 1, 0);
    return tile <= first ? highest_of_run - tile : first_run + highest - tile;
  }
};

/// Maximum number of key/value tiles that are sorted by length.
inline constexpr int kMostSortedTiles = 1024;

/// Order of the key/value tiles of a launch of the Hopper backward kernel. Tiles of additional tokens come first,
/// because all queries attend to them.
struct KeyTileSchedule {
  std::int32_t* next_tile;  // counter of the positions that `take` has returned
  // [batch, heads, dilation groups, query tiles]: number of key/value tiles that have added to the query tile's dQ.
  // Null if key/value tiles add in any order.
  std::int32_t* additions;
  AdditionOrder addition_order[3];
  int first_taken;       // first position that `take` returns, if `additions` is not null
  int additional_tiles;  // tiles of additional tokens in the problem
  int tiles;             // all tiles of the problem, including tiles of additional tokens
  int groups;            // dilation groups
  int q_tiles;           // query tiles per dilation group
  int first_sorted;      // tiles at this position and later positions are ordered by length
  TileNumbers numbers;   // numbers of the tiles of the layout, without tiles of additional tokens
  cutlass::FastDivmod by_additional_tiles_per_head, by_heads_kv;
  std::uint16_t by_length[kMostSortedTiles];  // at position - `first_sorted`: tile number - `first_sorted`

  /// Number of the tile at a position of the order.
  CUTLASS_HOST_DEVICE int tile_at(int position) const {
    return position < first_sorted ? position : first_sorted + by_length[position - first_sorted];
  }

  /// Batch entry and head of a tile of additional tokens. index[2] of the result is the tile's index among the head's
  /// tiles of additional tokens.
  CUTLASS_HOST_DEVICE TilePosition locate_additional(int tile) const {
    TilePosition result{};
    int outer;
    by_additional_tiles_per_head(outer, result.index[2], tile);
    by_heads_kv(result.batch, result.head, outer);
    return result;
  }

  /// Batch entry, head, dilation group and coordinates of a tile of the layout.
  CUTLASS_HOST_DEVICE TilePosition locate(const DeviceAxis (&axis)[3], int tile) const {
    return numbers.locate<&DeviceAxis::by_kv_tiles>(axis, tile - additional_tiles);
  }

  /// Index of the `index`th tile of a dimension. `distance` is the index of the first key minus the index of the first
  /// query. If the keys are a halo of a causal dimension, they lie before all queries. The last keys are then attended
  /// to by the most queries, so the order is reversed.
  CUTLASS_HOST_DEVICE int tile_of(const DeviceAxis& axis, int dimension, int index, int distance) const {
    if (additions != nullptr) return addition_order[dimension].tile(axis, index);
    return axis.is_causal() && distance <= -axis.kv_group_tokens ? axis.kv_tiles - 1 - index : index;
  }

  /// Part of `additions` for the query tiles of a dilation group. `row` is an index into the flattened [batch, heads].
  CUTLASS_HOST_DEVICE std::int32_t* group_additions(int row, int group) const {
    return additions + (static_cast<std::int64_t>(row) * groups + group) * q_tiles;
  }

  /// True if a CTA's first position is its block index. False if tiles take turns: a tile then waits for the tiles at
  /// earlier positions. CTAs that have not started must not own these positions, because the wait might never end.
  CUTLASS_HOST_DEVICE bool starts_at_block() const { return additions == nullptr; }

#if defined(__CUDACC__)
  /// Takes the next position of the order for a CTA that is done with its tile.
  __device__ __forceinline__ int take() const {
    const int count = count_one_more(next_tile);
    return count + (starts_at_block() ? gridDim.x : first_taken);
  }
#endif
};

/// Order of a launch's query tiles.
QueryTileSchedule schedule_query_tiles(const Problem& problem, const Geometry& geometry);

/// Computes the order of a launch's key/value tiles. The caller sets `next_tile` and `additions`.
///
/// Args:
///   additional_tiles_per_head: number of tiles of additional tokens per head.
///   is_ordered: true if tiles add to the query gradient in a fixed order.
///   multiprocessors: number of SMs of the device.
///   schedule: the result.
///
/// Fails if there are more tiles than a launch supports.
Status schedule_key_tiles(const Problem& problem, const TileShapes& tiles, const Geometry& geometry,
                          std::int64_t additional_tiles_per_head, bool is_ordered, int multiprocessors,
                          KeyTileSchedule& schedule);

}  // namespace natten_jax
