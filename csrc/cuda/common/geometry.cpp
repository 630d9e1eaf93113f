#include "cuda/common/geometry.h"

#include <algorithm>

namespace natten_jax {
namespace {

/// Of keys and values that should stay in the second-level cache.
constexpr std::int64_t kCacheBytes = 8 << 20;

}  // namespace

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

int heads_per_block(const Problem& problem) {
  const bool differ_in_length =
      std::any_of(problem.axes, problem.axes + kRank, [](const Axis& axis) { return axis.window.is_causal; });
  if (!differ_in_length) return 1;
  const std::int64_t bytes =
      problem.keys() * (problem.head_dim + problem.head_dim_v) * element_bytes(problem.element_type);
  int best = 1;
  for (std::int64_t heads = 1; heads <= problem.heads; ++heads) {
    const std::int64_t kv_heads = (heads + problem.heads_per_kv() - 1) / problem.heads_per_kv();
    if (problem.heads % heads == 0 && kv_heads * bytes <= kCacheBytes) best = static_cast<int>(heads);
  }
  return best;
}

cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace natten_jax
