#include "cuda/sm90/backward_order.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "natten_jax/windows.h"

namespace natten_jax::sm90 {
namespace {

constexpr int kClasses = 256;

/// Tiles of about the same length: eight classes between a power of two and the next.
int length_class(std::int64_t q_tiles) {
  int octave = 0;
  while (q_tiles >> octave >= 16) ++octave;
  return 8 * octave + static_cast<int>(q_tiles >> octave);
}

/// Query tiles that see a key/value tile, per tile of the longest dilation group.
std::vector<std::int64_t> count_q_tiles(const Axis& axis, std::int64_t q_tile, std::int64_t kv_tile) {
  const Window& w = axis.window;
  const auto of_group = [&](std::int64_t extent) { return group_length<Window, std::int64_t>(w, extent, 0); };
  const std::int64_t keys = of_group(axis.kv.local_extent), queries = of_group(axis.query.local_extent);
  const auto seen_by = [&](std::int64_t key) {
    return inverse_window_bounds(w, key, of_group(axis.query.extent), of_group(axis.kv.extent));
  };
  std::vector<std::int64_t> q_tiles;
  for (std::int64_t first = 0; first < keys; first += kv_tile) {
    const std::int64_t last = std::min(first + kv_tile, keys) - 1;
    const std::int64_t hull = std::min(seen_by(last).end, queries) - seen_by(first).begin;
    q_tiles.push_back((std::max<std::int64_t>(hull, 0) + q_tile - 1) / q_tile);
  }
  return q_tiles;
}

}  // namespace

void sort_tiles(const Problem& problem, const TileShapes& tiles, BackwardParams& p) {
  std::vector<std::int64_t> q_tiles[kRank];
  for (int d = 0; d < kRank; ++d) q_tiles[d] = count_q_tiles(problem.axes[d], tiles.query[d], tiles.kv[d]);
  std::vector<int> classes;  // of the tiles of a dilation group
  for (const std::int64_t x : q_tiles[0]) {
    for (const std::int64_t y : q_tiles[1]) {
      for (const std::int64_t z : q_tiles[2]) classes.push_back(length_class(x * y * z));
    }
  }
  // Those of all dilation groups and heads by class and, in a class, by number: neighbors share their queries.
  const int tiles_per_group = static_cast<int>(classes.size());
  const int groups = (p.tiles - p.additional_tiles) / tiles_per_group;
  int position[kClasses] = {};  // numbers of tiles, then where the next one goes
  for (const int of_tile : classes) position[of_tile] += groups;
  for (int of_tile = kClasses - 1, next = p.additional_tiles; of_tile >= 0; --of_tile) {
    const int tiles_of_class = position[of_tile];
    position[of_tile] = next;
    next += tiles_of_class;
  }
  std::iota(p.order, p.order + p.additional_tiles, 0);
  for (int tile = p.additional_tiles; tile < p.tiles; ++tile) {
    p.order[position[classes[(tile - p.additional_tiles) % tiles_per_group]]++] = static_cast<std::uint16_t>(tile);
  }
  p.is_sorted = true;
}

}  // namespace natten_jax::sm90
