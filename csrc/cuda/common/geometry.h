// Values that all launches derive from a problem: axes with 32-bit numbers, and numbers of tiles.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of tiles of a launch, and maximum number of its CTAs.
inline constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / 2;

/// Product of two counts. If it exceeds 2^31, the result is an arbitrary number above 2^31. The exact product might not
/// fit into 64 bits, even for problems that have been checked.
std::int64_t saturating_product(std::int64_t a, std::int64_t b);

/// Product of extents: the number of tokens of a tile, or of a layout that is so small that the product cannot
/// overflow.
std::int64_t product(const std::int64_t (&extents)[kRank]);

/// Axes of a launch, and saturating products over all axes.
struct Geometry {
  DeviceAxis axis[kRank];
  std::int64_t groups;    ///< Number of dilation groups.
  std::int64_t q_tiles;   ///< Number of query tiles per dilation group.
  std::int64_t kv_tiles;  ///< Number of key/value tiles per dilation group.
};

Geometry geometry_of(const Problem& problem, const TileShapes& tiles);

/// Reduces the number of query tiles to the number that a box of queries needs. `queries` is the shape of the box. The
/// position of the box is not known, so the number is the maximum over all positions.
void keep_queries(Geometry& geometry, const std::int64_t (&queries)[kRank]);

/// Sets the parameters of a kernel that describe heads. All kernels have these parameters.
template <class Params>
void fill_heads(const Problem& problem, Params& p) {
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.scale = problem.scale;
}

}  // namespace natten_jax
