#include "cuda/common/tile_scheduler.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "natten_jax/windows.h"

namespace natten_jax {
namespace {

/// Maximum size, in bytes, of the keys and values of interleaved heads, which should stay in L2. This is about the L2
/// capacity of a Hopper GPU.
constexpr std::int64_t kCacheBytes = 64 << 20;

bool is_causal(const Problem& problem) {
  return std::any_of(problem.axes, problem.axes + kRank, [](const Axis& axis) { return axis.window.is_causal(); });
}

/// Number of heads whose query tiles are interleaved. Causal tiles differ in length. The more heads are interleaved,
/// the more short tiles come last, and the less the end times of SMs differ. So this is the maximum number of heads
/// whose keys and values fit into L2 together. With this limit, forward passes take less time than with a limit of 8
/// MiB: 17% less for 16 heads of 8192 tokens, and 50% less for 4 heads of 16384 (docs/kernels-hopper.md). Problems that
/// are not causal would take up to 16% more time with interleaving.
int heads_per_query_block(const Problem& problem) {
  if (!is_causal(problem)) return 1;
  const std::int64_t bytes =
      problem.keys() * (problem.head_dim + problem.head_dim_v) * element_bytes(problem.element_type);
  int best = 1;
  for (std::int64_t heads = 1; heads <= problem.heads; ++heads) {
    const std::int64_t kv_heads = (heads + problem.heads_per_kv() - 1) / problem.heads_per_kv();
    if (problem.heads % heads == 0 && kv_heads * bytes <= kCacheBytes) best = static_cast<int>(heads);
  }
  return best;
}

/// Number of heads whose key/value tiles are interleaved. It is two if tiles add to the query gradient in a fixed
/// order. Tiles wait only for tiles of the same head. With two heads, a tile thus waits for only half of the tiles that
/// run at the same time. This saves up to 11% of the time (docs/kernels-hopper.md). Causal problems would gain nothing
/// from interleaving, and have more L2 misses.
int heads_per_key_block(const Problem& problem, bool is_ordered) {
  return is_ordered && !is_causal(problem) && problem.heads_kv % 2 == 0 ? 2 : 1;
}

/// Number of length classes. The length of a key/value tile is its number of query tiles. There are eight classes
/// between a power of two and the next.
constexpr int kClasses = 256;

int length_class(std::int64_t q_tiles) {
  int octave = 0;
  while (q_tiles >> octave >= 16) ++octave;
  return 8 * octave + static_cast<int>(q_tiles >> octave);
}

/// Number of query tiles that attend to each key/value tile, along one dimension. Counted in the longest dilation
/// group.
std::vector<std::int64_t> count_q_tiles(const Axis& axis, std::int64_t q_tile, std::int64_t kv_tile) {
  const Window& w = axis.window;
  const auto group_tokens = [&](std::int64_t extent) { return group_length<Window, std::int64_t>(w, extent, 0); };
  const std::int64_t keys = group_tokens(axis.kv.local_extent), queries = group_tokens(axis.query.local_extent);
  const auto attending_queries = [&](std::int64_t key) {
    return inverse_window_bounds(w, key, group_tokens(axis.query.extent), group_tokens(axis.kv.extent));
  };
  std::vector<std::int64_t> q_tiles;
  for (std::int64_t first = 0; first < keys; first += kv_tile) {
    const std::int64_t last = std::min(first + kv_tile, keys) - 1;
    const std::int64_t end = attending_queries(last).end;
    const std::int64_t hull = (w.ends == Ends::kWrap ? end : std::min(end, queries)) - attending_queries(first).begin;
    q_tiles.push_back((std::max<std::int64_t>(hull, 0) + q_tile - 1) / q_tile);
  }
  return q_tiles;
}

/// Number of rounds, at the end of the order, whose tiles are sorted by length. A round is one tile per SM. Sorting
/// more rounds gains little and causes L2 misses: tiles of equal length are spread over the layout and all heads, and
/// share few queries. If all tiles are sorted, the pass takes more time (docs/kernels-hopper.md): 23% more for 4 heads
/// of 256 x 256 tokens with windows of 80 x 80, 34% more for 8 such heads, and 61% more for 128 causal heads of 4096
/// tokens.
constexpr int kSortedRounds = 4;

/// Sorts the last tiles by length: tiles to which the most query tiles attend come first. If the arrays contain a part
/// of the layout, the position of this part is not known here. It is then assumed to be at the start.
void sort_tiles(const Problem& problem, const TileShapes& tiles, KeyTileSchedule& schedule) {
  std::vector<std::int64_t> q_tiles[kRank];
  for (int d = 0; d < kRank; ++d) q_tiles[d] = count_q_tiles(problem.axes[d], tiles.query[d], tiles.kv[d]);
  std::vector<int> classes;  // class of each tile of a dilation group
  for (const std::int64_t x : q_tiles[0]) {
    for (const std::int64_t y : q_tiles[1]) {
      for (const std::int64_t z : q_tiles[2]) classes.push_back(length_class(x * y * z));
    }
  }
  // Tiles are sorted by class. Tiles of a class are sorted by number, because tiles with neighboring numbers share
  // queries. Tiles of additional tokens stay first.
  const int tiles_per_group = static_cast<int>(classes.size()), additional = schedule.additional_tiles;
  const int first = std::max(schedule.first_sorted, additional);
  const auto class_of = [&](int tile) { return classes[(tile - additional) % tiles_per_group]; };
  int position[kClasses] = {};  // per class: number of tiles, later the position of its next tile
  for (int tile = first; tile < schedule.tiles; ++tile) ++position[class_of(tile)];
  for (int class_index = kClasses - 1, next = first - schedule.first_sorted; class_index >= 0; --class_index) {
    const int tiles_of_class = position[class_index];
    position[class_index] = next;
    next += tiles_of_class;
  }
  std::iota(schedule.by_length, schedule.by_length + (first - schedule.first_sorted), 0);
  for (int tile = first; tile < schedule.tiles; ++tile) {
    schedule.by_length[position[class_of(tile)]++] = static_cast<std::uint16_t>(tile - schedule.first_sorted);
  }
}

/// Order in which the tiles of a dimension add to the query gradient. It begins with the tile that contains the last
/// key of the first window. The most queries attend to this key, so the longest tile comes first. In a causal
/// dimension, the order begins with the last tile.
AdditionOrder addition_order(const DeviceAxis& axis) {
  const int last = axis.kv_tiles - 1;
  return {axis.is_causal() ? last : std::min((axis.kernel_size - 1) / axis.kv_tile, last)};
}

cutlass::FastDivmod divider(std::int64_t divisor) {
  return cutlass::FastDivmod(static_cast<int>(divisor));
}

TileNumbers number_tiles(std::int64_t heads, int heads_per_block, const Geometry& geometry,
                         std::int64_t tiles_per_group) {
  return {heads_per_block, divider(tiles_per_group), divider(geometry.groups), divider(heads_per_block),
          divider(heads / heads_per_block)};
}

}  // namespace

QueryTileSchedule schedule_query_tiles(const Problem& problem, const Geometry& geometry) {
  return {number_tiles(problem.heads, heads_per_query_block(problem), geometry, geometry.q_tiles)};
}

Status schedule_key_tiles(const Problem& problem, const TileShapes& tiles, const Geometry& geometry,
                          std::int64_t additional_tiles_per_head, bool is_ordered, int multiprocessors,
                          KeyTileSchedule& schedule) {
  const std::int64_t kv_heads = saturating_product(problem.batch, problem.heads_kv);
  const std::int64_t tiles_per_head =
      additional_tiles_per_head + saturating_product(geometry.groups, geometry.kv_tiles);
  const std::int64_t all_tiles = saturating_product(kv_heads, tiles_per_head);
  if (all_tiles > kMostTiles) return Status::invalid_argument("the problem has more than 2^30 key/value tiles");
  std::transform(geometry.axis, geometry.axis + kRank, schedule.addition_order, addition_order);
  schedule.additional_tiles = static_cast<int>(kv_heads * additional_tiles_per_head);
  schedule.tiles = static_cast<int>(all_tiles);
  schedule.groups = static_cast<int>(geometry.groups);
  schedule.q_tiles = static_cast<int>(geometry.q_tiles);
  schedule.by_additional_tiles_per_head = divider(std::max<std::int64_t>(additional_tiles_per_head, 1));
  schedule.by_heads_kv = divider(problem.heads_kv);
  schedule.numbers =
      number_tiles(problem.heads_kv, heads_per_key_block(problem, is_ordered), geometry, geometry.kv_tiles);
  const int sorted = is_ordered ? 0 : std::min({schedule.tiles, kSortedRounds * multiprocessors, kMostSortedTiles});
  schedule.first_sorted = schedule.tiles - sorted;
  if (sorted > 0) sort_tiles(problem, tiles, schedule);
  return {};
}

}  // namespace natten_jax
