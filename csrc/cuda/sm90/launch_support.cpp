#include "cuda/sm90/launch_support.h"

#include <algorithm>
#include <limits>

namespace natten_jax::sm90 {
namespace {

constexpr std::int64_t kLargestHeadDim = 256;

/// Whether groups of a class hold a remainder token in a dimension.
bool has_remainder(int group_class, int dimension) {
  return (group_class >> (kRank - 1 - dimension) & 1) != 0;
}

}  // namespace

int compiled_head_dim(const Problem& problem) {
  const std::int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
  return wider <= 64 ? 64 : wider <= 128 ? 128 : 256;
}

cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

std::string check_arrays(const Problem& problem, std::int64_t head_dim_step) {
  if (problem.element_type == ElementType::kFloat32)
    return "query has dtype float32, but must have float16 or bfloat16";
  for (const std::int64_t head_dim : {problem.head_dim, problem.head_dim_v}) {
    if (head_dim % head_dim_step != 0 || head_dim > kLargestHeadDim) {
      return "a head dimension is " + std::to_string(head_dim) + ", but must be a multiple of " +
             std::to_string(head_dim_step) + " and at most " + std::to_string(kLargestHeadDim);
    }
  }
  if (problem.queries() > std::numeric_limits<std::int32_t>::max()) return "a batch entry has more than 2^31 tokens";
  return {};
}

int group_classes(const Problem& problem, Side side) {
  int classes = 0;
  for (int c = 0; c < kGroupClasses; ++c) {
    bool exists = true;
    for (int d = 0; d < kRank; ++d) {
      const Axis& axis = problem.axes[d];
      const std::int64_t extent = side == Side::kQuery ? axis.query.local_extent : axis.kv.local_extent;
      const std::int64_t dilation = axis.window.dilation;
      exists = exists && (has_remainder(c, d) ? extent % dilation != 0 : extent >= dilation);
    }
    classes |= exists << c;
  }
  return classes;
}

std::string encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                           CUtensorMap (&maps)[kGroupClasses], Encode encode) {
  const bool is_query = side == Side::kQuery;
  const std::int64_t heads = is_query ? problem.heads : problem.heads_kv;
  TokenGrid grid{array.data, problem.element_type, problem.batch, {}, {}, {}, heads, array.head_dim};
  const int classes = group_classes(problem, side);
  const CUtensorMap* first = nullptr;  // there is one: every dimension has some group
  for (int c = 0; c < kGroupClasses; ++c) {
    if (!(classes >> c & 1)) continue;
    for (int d = 0; d < kRank; ++d) {
      const Axis& axis = problem.axes[d];
      grid.extent[d] = is_query ? axis.query.local_extent : axis.kv.local_extent;
      grid.dilation[d] = axis.window.dilation;
      grid.tokens[d] = grid.extent[d] / grid.dilation[d] + (has_remainder(c, d) ? 1 : 0);
    }
    if (std::string error = encode(grid, tile, maps[c]); !error.empty()) return error;
    if (first == nullptr) first = &maps[c];
  }
  // A group of one side may have no token here on the other: a tile of nothing is loaded all the same, and a map that
  // was never encoded is an illegal instruction.
  for (int c = 0; c < kGroupClasses; ++c) {
    if (!(classes >> c & 1)) maps[c] = *first;
  }
  return {};
}

std::string encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map, Encode encode) {
  const TokenGrid grid{array.data, problem.element_type,          problem.batch,    {1, 1, problem.additional_kv},
                       {1, 1, 1},  {1, 1, problem.additional_kv}, problem.heads_kv, array.head_dim};
  return encode(grid, {1, 1, tokens}, map);
}

}  // namespace natten_jax::sm90
