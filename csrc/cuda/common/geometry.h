// What the launches of all kernels work out from a problem: its axes in the kernels' numbers, and counts of tiles.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Most tiles, or CTAs, of a launch.
inline constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / 2;

/// A product of counts that does not wrap around: one of more than 2^31 is some number of more than 2^31. Checked
/// problems can have more tiles than any integer counts.
std::int64_t saturating_product(std::int64_t a, std::int64_t b);

/// Tokens of a tile, or of a layout that is known to be small.
std::int64_t product(const std::int64_t (&extents)[kRank]);

/// The axes, and counts over all of them, which saturate.
struct Geometry {
  DeviceAxis axis[kRank];
  std::int64_t groups;    ///< Dilation groups.
  std::int64_t q_tiles;   ///< Query tiles of a dilation group.
  std::int64_t kv_tiles;  ///< Key/value tiles of a dilation group.
};

Geometry geometry_of(const Problem& problem, const TileShapes& tiles);

/// Keeps only as many query tiles as hold a box of queries, wherever it lies.
void keep_queries(Geometry& geometry, const std::int64_t (&queries)[kRank]);

/// Fills in what parameters of all kernels have of a problem's heads.
template <class Params>
void fill_heads(const Problem& problem, Params& p) {
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.scale = problem.scale;
}

}  // namespace natten_jax
