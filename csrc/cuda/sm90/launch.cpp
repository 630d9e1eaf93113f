#include "cuda/sm90/launch.h"

#include <algorithm>
#include <limits>

#include "cuda/sm90/forward.h"
#include "cuda/sm90/launch_support.h"

namespace natten_jax::sm90 {
namespace {

/// Rows of tensor maps lie at multiples of 16 bytes.
constexpr std::int64_t kHeadDimStep = 8;
/// Keys and values of the heads that run side by side should stay in the second-level cache.
constexpr std::int64_t kCacheBytes = 8 << 20;
/// Tiles per CTA from which on it pays to clear a counter first.
constexpr std::int64_t kTilesWorthCounting = 4;

int forward_head_dim(const Problem& problem) {
  const std::int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
  return wider > 128 && wider <= 192 ? 192 : compiled_head_dim(problem);
}

/// Queries per tile that the kernel is compiled for.
int compiled_rows(int head_dim, std::int64_t q_tile_tokens) {
  return head_dim == 64 && q_tile_tokens > 128 ? 192 : 128;
}

/// Keys per tile that the kernel is compiled for.
int compiled_columns(int head_dim, std::int64_t kv_tile_tokens) {
  if (head_dim == 256) return 64;
  return head_dim == 192 || (head_dim == 128 && kv_tile_tokens <= 96) ? 96 : 128;
}

std::string check(const Problem& problem, const TileShapes& tiles) {
  if (std::string error = check_arrays(problem, kHeadDimStep); !error.empty()) return error;
  const int rows = compiled_rows(forward_head_dim(problem), product(tiles.query));
  if (product(tiles.query) > rows) {
    return "q_tile_shape has " + std::to_string(product(tiles.query)) + " tokens, but must have at most " +
           std::to_string(rows) + " at this head dimension";
  }
  const int columns = compiled_columns(forward_head_dim(problem), product(tiles.kv));
  if (product(tiles.kv) > columns) {
    return "kv_tile_shape has " + std::to_string(product(tiles.kv)) + " tokens, but must have at most " +
           std::to_string(columns) + " at this head dimension";
  }
  return {};
}

/// Most heads whose keys and values fit into the cache together, if their tiles differ in length.
int heads_per_block(const Problem& problem) {
  const auto [x, y, z] = problem.axes;
  const bool is_causal = x.window.is_causal || y.window.is_causal || z.window.is_causal;
  if (!is_causal) return 1;
  const std::int64_t bytes = problem.keys() * (problem.head_dim + problem.head_dim_v) * 2;
  int best = 1;
  for (std::int64_t heads = 1; heads <= problem.heads; ++heads) {
    const std::int64_t kv_heads = (heads + problem.heads_per_kv() - 1) / problem.heads_per_kv();
    if (problem.heads % heads == 0 && kv_heads * bytes <= kCacheBytes) best = static_cast<int>(heads);
  }
  return best;
}

/// The smallest boxes of the query tile that hold each warpgroup's rows.
void bound_warpgroups(ForwardParams& p) {
  constexpr int kRowsOfWarpgroup = 64;
  for (int warpgroup = 0; warpgroup < kMostWarpgroups; ++warpgroup) {
    int first = std::min(kRowsOfWarpgroup * warpgroup, p.q_tile_tokens - 1);
    int last = std::min(kRowsOfWarpgroup * (warpgroup + 1), p.q_tile_tokens) - 1;
    int tokens = p.q_tile_tokens;
    bool is_line = true;  // first and last row agree in the dimensions before
    for (int d = 0; d < kRank; ++d) {
      tokens /= p.axis[d].q_tile;
      int* corner = p.corner + 6 * warpgroup + d;
      corner[0] = is_line ? first / tokens : 0;
      corner[3] = is_line ? last / tokens : p.axis[d].q_tile - 1;
      is_line = is_line && corner[0] == corner[3];
      first %= tokens;
      last %= tokens;
    }
  }
}

}  // namespace

std::string run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Schedule schedule,
                        cudaStream_t stream) {
  if (std::string error = check(problem, tiles); !error.empty()) return error;
  ForwardParams p{};
  const int head_dim = forward_head_dim(problem);
  const int columns = compiled_columns(head_dim, product(tiles.kv));
  std::int64_t groups = 1, tiles_per_group = 1;
  for (int d = 0; d < kRank; ++d) {
    p.axis[d] = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    groups = saturating_product(groups, p.axis[d].dilation);
    tiles_per_group = saturating_product(tiles_per_group, p.axis[d].q_tiles);
  }
  const std::int64_t heads = saturating_product(problem.batch, problem.heads);
  const std::int64_t all_tiles = saturating_product(heads, saturating_product(groups, tiles_per_group));
  if (all_tiles > std::numeric_limits<std::int32_t>::max() / 2) return "the problem has more than 2^30 query tiles";
  for (const std::string& error :
       {encode_classes(problem, Side::kQuery, {arrays.query, problem.head_dim}, tiles.query, p.query, encode_head_map),
        encode_classes(problem, Side::kQuery, {arrays.out, problem.head_dim_v}, tiles.query, p.out, encode_head_map),
        encode_classes(problem, Side::kKeyValue, {arrays.key, problem.head_dim}, tiles.kv, p.key, encode_head_map),
        encode_classes(problem, Side::kKeyValue, {arrays.value, problem.head_dim_v}, tiles.kv, p.value,
                       encode_head_map)}) {
    if (!error.empty()) return error;
  }
  if (problem.additional_kv > 0) {
    for (const std::string& error : {encode_additional(problem, {arrays.additional_keys, problem.head_dim}, columns,
                                                       p.additional_keys, encode_head_map),
                                     encode_additional(problem, {arrays.additional_values, problem.head_dim_v}, columns,
                                                       p.additional_values, encode_head_map)}) {
      if (!error.empty()) return error;
    }
  }
  p.origins = arrays.origins;
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
  p.query_classes = group_classes(problem, Side::kQuery);
  p.kv_classes = group_classes(problem, Side::kKeyValue);
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.scale = problem.scale;
  p.tiles = static_cast<int>(all_tiles);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.heads_per_block = heads_per_block(problem);
  bound_warpgroups(p);
  p.clears_tiles = p.q_tile_tokens < compiled_rows(head_dim, p.q_tile_tokens) || p.kv_tile_tokens < columns ||
                   p.head_dim < head_dim || p.head_dim_v < head_dim;
  p.by_tiles_per_group = cutlass::FastDivmod(static_cast<int>(tiles_per_group));
  p.by_groups = cutlass::FastDivmod(static_cast<int>(groups));
  p.by_heads_per_block = cutlass::FastDivmod(p.heads_per_block);
  p.by_head_blocks = cutlass::FastDivmod(p.heads / p.heads_per_block);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
  int multiprocessors = 0;
  cudaError_t error = count_multiprocessors(multiprocessors);
  const int ctas = schedule.is_persistent ? std::min(p.tiles, multiprocessors) : p.tiles;
  if (all_tiles >= kTilesWorthCounting * ctas && error == cudaSuccess) {
    // Tiles differ in length, and multiprocessors in speed: whoever is done takes the next.
    p.next_tile = arrays.next_tile;
    error = cudaMemsetAsync(p.next_tile, 0, sizeof(*p.next_tile), stream);
  }
  const auto launch = problem.element_type == ElementType::kBFloat16 ? launch_forward<true> : launch_forward<false>;
  if (error == cudaSuccess) error = launch(p, head_dim, columns, schedule.is_ping_pong, ctas, stream);
  return error == cudaSuccess ? std::string() : std::string("CUDA: ") + cudaGetErrorString(error);
}

}  // namespace natten_jax::sm90
