#include "cuda/common/geometry.h"

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

cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace natten_jax
