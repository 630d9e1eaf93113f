#include "cuda/small/region_maps.h"

#include <algorithm>

#include "cuda/common/cuda_status.h"
#include "cuda/tma/entry_maps.h"
#include "cuda/tma/tensor_map.h"

namespace natten_jax::small {
namespace {

/// Encodes the tensor map of an array of columns. Does nothing if TMA does not load the columns.
Status encode_columns(const Problem& problem, const void* array, ElementType element_type, std::int64_t head_dim,
                      bool are_queries, CommonParams& p, CUtensorMap& map) {
  if (!p.region.has_boxes) return {};
  TokenBoxes tokens{};
  tokens.data = array;
  tokens.element_type = element_type;
  tokens.batch = problem.batch;
  tokens.heads = are_queries ? problem.heads : problem.heads_kv;
  tokens.head_dim = head_dim;
  for (int i = 0; i < kRank; ++i) {
    const Axis& axis = problem.axes[p.region.dimension[i]];
    tokens.extent[i] = (are_queries ? axis.query : axis.kv).local_extent;
    tokens.pitch[i] = (are_queries ? p.query_pitch : p.kv_pitch)[i];
    tokens.dilation[i] = axis.window.dilation;
  }
  return encode_box_map(tokens, p.region.extent, map);
}

}  // namespace

Status encode_keys(const Problem& problem, const void* key, const void* value, CommonParams& p) {
  const auto encode = [&](const void* array, CUtensorMap& map) {
    return encode_columns(problem, array, problem.element_type, problem.head_dim, false, p, map);
  };
  NATTEN_JAX_RETURN_IF_FAILED(encode(key, p.columns[0]));
  return encode(value, p.columns[1]);
}

Status encode_queries(const Problem& problem, const BackwardParams& arrays, CommonParams& p) {
  const auto encode = [&](const void* array, CUtensorMap& map, ElementType type, std::int64_t head_dim) {
    return encode_columns(problem, array, type, head_dim, true, p, map);
  };
  NATTEN_JAX_RETURN_IF_FAILED(encode(arrays.query, p.columns[0], problem.element_type, problem.head_dim));
  NATTEN_JAX_RETURN_IF_FAILED(encode(arrays.out_cotangent, p.columns[1], problem.element_type, problem.head_dim));
  constexpr std::int64_t kFloats = kStatisticsBytes / sizeof(float);
  return encode(arrays.statistics, p.columns[2], ElementType::kFloat32, kFloats);
}

Status encode_whole(const Problem& problem, BackwardParams& p) {
  int number = 0;
  for (const void* array : {p.key, p.value, p.query, p.out_cotangent, p.out}) {
    // In this kernel, queries and keys have the same head width and number of heads.
    NATTEN_JAX_RETURN_IF_FAILED(
        encode_columns(problem, array, problem.element_type, problem.head_dim, true, p, p.columns[number++]));
  }
  return {};
}

Status make_entry_maps(const Problem& problem, bool are_queries, CUtensorMap* result, cudaStream_t stream,
                       CommonParams& p, bool overlaps) {
  if (p.layouts == nullptr || !p.region.has_boxes) return {};
#if defined(NATTEN_JAX_SM90)
  EntryMaps maps{};
  maps.layouts = p.layouts;
  maps.batch = static_cast<int>(problem.batch);
  maps.arrays = kEntryMaps;
  maps.classes = 1;
  std::copy_n(p.axis, kRank, maps.axis);
  std::copy_n(p.region.dimension, kRank, maps.dimension);
  maps.are_queries = are_queries ? ~0u : 0u;
  std::copy_n(p.columns, kEntryMaps, maps.base_maps);
  p.entry_maps = maps.result = result;
  return status_of(launch_entry_maps(maps, stream, overlaps));
#else
  static_cast<void>(are_queries);
  static_cast<void>(overlaps);
  static_cast<void>(result);
  static_cast<void>(problem);
  static_cast<void>(stream);
  return Status::internal("regions have boxes, but this build has no code for maps of batch entries");
#endif
}

}  // namespace natten_jax::small
