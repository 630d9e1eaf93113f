#include "cuda/common/geometry.h"

#include <algorithm>

namespace natten_jax {
std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kEnough = std::int64_t{1} << 31;
  return a == 0 || b == 0 ? 0 : a > kEnough || b > kEnough ? kEnough + 1 : a * b;
}

std::int64_t product(const std::int64_t (&extents)[kRank]) {
  return extents[0] * extents[1] * extents[2];
}

Geometry geometry_of(const Problem& problem, const TileShapes& tiles) {
  Geometry result{{}, 1, 1, 1};
  for (int d = 0; d < kRank; ++d) {
    const DeviceAxis& axis = result.axis[d] = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    result.groups = saturating_product(result.groups, axis.dilation);
    result.q_tiles = saturating_product(result.q_tiles, axis.q_tiles);
    result.kv_tiles = saturating_product(result.kv_tiles, axis.kv_tiles);
  }
  return result;
}

void keep_queries(Geometry& geometry, const std::int64_t (&queries)[kRank]) {
  geometry.q_tiles = 1;
  for (int d = 0; d < kRank; ++d) {
    DeviceAxis& axis = geometry.axis[d];
    // Maximum number of indices from the first to the last coordinate of the box, over all positions of the box. The
    // index of a coordinate is the coordinate divided by the dilation, rounded down.
    const std::int64_t tokens = (queries[d] + axis.dilation - 2) / axis.dilation + 1;
    axis.q_tiles = static_cast<int>(std::min<std::int64_t>((tokens + axis.q_tile - 1) / axis.q_tile, axis.q_tiles));
    axis.by_q_tiles = cutlass::FastDivmod(axis.q_tiles);
    geometry.q_tiles = saturating_product(geometry.q_tiles, axis.q_tiles);
  }
}

}  // namespace natten_jax
