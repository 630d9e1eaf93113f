#include "cuda/sm90/backward_launch.h"

#include <algorithm>
#include <limits>

#include "cuda/common/gradient_passes.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/backward.h"
#include "cuda/sm90/backward_order.h"
#include "cuda/sm90/launch_support.h"

namespace natten_jax::sm90 {
namespace {

/// The problem whose only dilation group is the whole layout: what additional tokens are seen by.
Problem undilated(const Problem& problem) {
  Problem result = problem;
  for (Axis& axis : result.axes) axis.window.dilation = 1;
  return result;
}

/// The problem that the sums of the query gradient belong to: every head is a batch entry of its own.
Problem heads_as_batch(const Problem& problem) {
  Problem result = problem;
  result.element_type = ElementType::kFloat32;
  result.batch *= problem.heads;
  result.heads = 1;
  return result;
}

/// The maps of a query array, by class of dilation groups and for the layout as it is.
std::string encode_query_maps(const Problem& problem, Array array, const std::int64_t (&tile)[kRank],
                              CUtensorMap (&maps)[kQueryMaps]) {
  CUtensorMap classes[kGroupClasses];
  if (problem.additional_kv > 0) {
    if (std::string error = encode_classes(undilated(problem), Side::kQuery, array, tile, classes); !error.empty()) {
      return error;
    }
    maps[kWholeLayout] = classes[0];
  }
  if (std::string error = encode_classes(problem, Side::kQuery, array, tile, classes); !error.empty()) return error;
  std::copy_n(classes, kGroupClasses, maps);
  return {};
}

std::string encode_maps(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays, int keys,
                        BackwardParams& p) {
  for (const std::string& error :
       {encode_query_maps(problem, {arrays.query, problem.head_dim}, tiles.query, p.query),
        encode_query_maps(problem, {arrays.out_cotangent, problem.head_dim_v}, tiles.query, p.out_cotangent),
        encode_query_maps(heads_as_batch(problem), {arrays.scratch, problem.head_dim}, tiles.query, p.query_gradient),
        encode_classes(problem, Side::kKeyValue, {arrays.key, problem.head_dim}, tiles.kv, p.key),
        encode_classes(problem, Side::kKeyValue, {arrays.value, problem.head_dim_v}, tiles.kv, p.value),
        encode_classes(problem, Side::kKeyValue, {arrays.key_gradient, problem.head_dim}, tiles.kv, p.key_gradient),
        encode_classes(problem, Side::kKeyValue, {arrays.value_gradient, problem.head_dim_v}, tiles.kv,
                       p.value_gradient)}) {
    if (!error.empty()) return error;
  }
  if (problem.additional_kv == 0) return {};
  for (const std::string& error :
       {encode_additional(problem, {arrays.additional_keys, problem.head_dim}, keys, p.additional_keys),
        encode_additional(problem, {arrays.additional_values, problem.head_dim_v}, keys, p.additional_values),
        encode_additional(problem, {arrays.additional_keys_gradient, problem.head_dim}, keys,
                          p.additional_keys_gradient),
        encode_additional(problem, {arrays.additional_values_gradient, problem.head_dim_v}, keys,
                          p.additional_values_gradient)}) {
    if (!error.empty()) return error;
  }
  return {};
}

/// Elements of the query gradient's sums.
std::int64_t sums(const Problem& problem) {
  return problem.batch * problem.heads * problem.queries() * problem.head_dim;
}

/// Counters of a launch: of the key/value tiles that CTAs have taken, and of the turns of every query tile.
std::int64_t counters(const Problem& problem, const TileShapes& tiles, bool is_deterministic) {
  if (!is_deterministic) return 1;
  std::int64_t turns = problem.batch * problem.heads;
  for (int d = 0; d < kRank; ++d) {
    const DeviceAxis axis = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    turns = saturating_product(turns, saturating_product(axis.dilation, axis.q_tiles));
  }
  return 1 + turns;
}

/// The key/value tile that comes first where tiles take turns, downwards: neighbors then come to their common queries
/// one after the other by themselves. Keys a window from the start are seen by the most queries: the longest work.
int first_tile(const DeviceAxis& axis) {
  return axis.is_causal ? axis.kv_tiles - 1 : std::min((axis.kernel_size - 1) / axis.kv_tile, axis.kv_tiles - 1);
}

}  // namespace

std::string check_backward(const Problem& problem, const TileShapes& tiles) {
  if (std::string error = check_arrays(problem); !error.empty()) return error;
  const BackwardTile limits = backward_tile(compiled_head_dim(problem));
  const auto exceeds = [](const char* name, std::int64_t tokens, int limit) {
    return std::string("backward ") + name + " has " + std::to_string(tokens) + " tokens, but must have at most " +
           std::to_string(limit) + " at this head dimension";
  };
  if (product(tiles.query) > limits.queries) return exceeds("q_tile_shape", product(tiles.query), limits.queries);
  if (product(tiles.kv) > limits.keys) return exceeds("kv_tile_shape", product(tiles.kv), limits.keys);
  return {};
}

std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic) {
  return sums(problem) + counters(problem, tiles, is_deterministic);
}

std::string run_backward(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays,
                         bool is_deterministic, cudaStream_t stream) {
  BackwardParams p{};
  const int head_dim = compiled_head_dim(problem);
  const BackwardTile limits = backward_tile(head_dim);
  std::int64_t groups = 1, tiles_per_group = 1, q_tiles = 1;
  for (int d = 0; d < kRank; ++d) {
    p.axis[d] = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    groups = saturating_product(groups, p.axis[d].dilation);
    tiles_per_group = saturating_product(tiles_per_group, p.axis[d].kv_tiles);
    q_tiles = saturating_product(q_tiles, p.axis[d].q_tiles);
    p.first_tile[d] = first_tile(p.axis[d]);
  }
  const std::int64_t kv_heads = saturating_product(problem.batch, problem.heads_kv);
  const std::int64_t additional_tiles_per_head = (problem.additional_kv + limits.keys - 1) / limits.keys;
  const std::int64_t tiles_per_head = additional_tiles_per_head + saturating_product(groups, tiles_per_group);
  const std::int64_t all_tiles = saturating_product(kv_heads, tiles_per_head);
  if (all_tiles > std::numeric_limits<std::int32_t>::max() / 2) return "the problem has more than 2^30 key/value tiles";
  if (std::string error = encode_maps(problem, tiles, arrays, limits.keys, p); !error.empty()) return error;
  p.origins = arrays.origins;
  p.statistics = reinterpret_cast<const float2*>(arrays.statistics);
  p.remainder = arrays.remainder;
  p.queries = static_cast<int>(problem.queries());
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.heads_per_kv = static_cast<int>(problem.heads_per_kv());
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.scale = problem.scale;
  p.additional_tiles = static_cast<int>(kv_heads * additional_tiles_per_head);
  p.tiles = static_cast<int>(all_tiles);
  p.groups = static_cast<int>(groups);
  p.q_tiles = static_cast<int>(q_tiles);
  if (all_tiles <= kMostSortedTiles && !is_deterministic) sort_tiles(problem, tiles, p);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.clears_tiles = p.q_tile_tokens < limits.queries || p.kv_tile_tokens < limits.keys || p.head_dim < head_dim ||
                   p.head_dim_v < head_dim;
  p.by_additional_tiles_per_head =
      cutlass::FastDivmod(static_cast<int>(std::max<std::int64_t>(additional_tiles_per_head, 1)));
  p.by_tiles_per_group = cutlass::FastDivmod(static_cast<int>(tiles_per_group));
  p.by_groups = cutlass::FastDivmod(static_cast<int>(groups));
  p.by_heads_kv = cutlass::FastDivmod(p.heads_kv);

  const bool is_bfloat16 = problem.element_type == ElementType::kBFloat16;
  const std::int64_t first_counter = sums(problem), number = counters(problem, tiles, is_deterministic);
  p.next_tile = reinterpret_cast<std::int32_t*>(arrays.scratch + first_counter);
  if (is_deterministic) p.turns = p.next_tile + 1;
  cudaError_t error = launch_clear(arrays.scratch, first_counter + number, stream);
  const auto launch = [&] {
    return (is_bfloat16 ? launch_backward<true> : launch_backward<false>)(p, head_dim, stream);
  };
  if (is_deterministic && p.additional_tiles > 0) {
    // Their query tiles are of the whole layout and those of dilation groups are not: they come before all others.
    p.tiles = p.additional_tiles;
    if (error == cudaSuccess) error = launch();
    if (error == cudaSuccess) error = launch_clear(arrays.scratch + first_counter, number, stream);
    p.first_taken = p.additional_tiles;
    p.tiles = static_cast<int>(all_tiles);
  }
  if (error == cudaSuccess) error = launch();
  if (error == cudaSuccess) {
    error = launch_convert_gradient(is_bfloat16, arrays.scratch, problem.scale, arrays.query_gradient, problem.batch,
                                    problem.queries(), problem.heads, problem.heads, problem.head_dim, true, stream);
  }
  return error == cudaSuccess ? std::string() : std::string("CUDA: ") + cudaGetErrorString(error);
}

}  // namespace natten_jax::sm90
