// Values that all launches derive from a problem: axes with 32-bit numbers, and counts of tiles.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of tiles, or CTAs, of a launch.
inline constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / 2;

/// Saturating product of counts: a product of more than 2^31 returns some number of more than 2^31. Checked problems
/// can have more tiles than any integer type can count.
std::int64_t saturating_product(std::int64_t a, std::int64_t b);

/// Number of tokens of a tile, or of a layout that is known to be small.
std::int64_t product(const std::int64_t (&extents)[kRank]);

/// Axes, and saturating counts over all of them.
struct Geometry {
  DeviceAxis axis[kRank];
  std::int64_t groups;    ///< Dilation groups.
  std::int64_t q_tiles;   ///< Query tiles of a dilation group.
  std::int64_t kv_tiles;  ///< Key/value tiles of a dilation group.
};

Geometry geometry_of(const Problem& problem, const TileShapes& tiles);

/// Limits the number of query tiles to the maximum that a box of queries at any position needs.
void keep_queries(Geometry& geometry, const std::int64_t (&queries)[kRank]);

/// Sets the parameters of a problem's heads, which all kernels have.
template <class Params>
void fill_heads(const Problem& problem, Params& p) {
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.scale = problem.scale;
}

}  // namespace natten_jax
