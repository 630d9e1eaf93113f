#include "cuda/sm90/launch_support.h"

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/geometry.h"
#include "cuda/common/problem_checks.h"
#include "cuda/sm90/launch.h"

namespace natten_jax::sm90 {
namespace {

/// True if the dilation groups of class `group_class` have a remainder token in a dimension (see kGroupClasses).
bool has_remainder(int group_class, int dimension) {
  return (group_class >> (kRank - 1 - dimension) & 1) != 0;
}

}  // namespace

Status check_arrays(const Problem& problem) {
  const bool is_float8 = problem.element_type == ElementType::kFloat8E4M3;
  if (!is_float8) NATTEN_JAX_RETURN_IF_FAILED(check_half_elements(problem));
  NATTEN_JAX_RETURN_IF_FAILED(check_head_dims(problem, is_float8 ? kFloat8HeadDimStep : kHeadDimStep, kLargestHeadDim));
  if (problem.queries() > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid_argument("a batch entry has 2^31 tokens or more");
  }
  return {};
}

Status check_seams(const Problem& problem, const Arrays& arrays) {
  if (!wraps(problem) || arrays.layouts == nullptr) return {};
  return Status::invalid_argument("a dimension wraps, but batch entries have separate layouts");
}

Status choose_form(const Form* forms, int count, const Problem& problem, const TileShapes& tiles, const char* pass,
                   int& chosen) {
  const std::int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const std::int64_t queries = product(tiles.query), keys = product(tiles.kv);
  Form largest{};
  for (chosen = 0; chosen < count; ++chosen) {
    const Form& form = forms[chosen];
    const bool is_narrowest = largest.head_dim == 0 || form.head_dim == largest.head_dim;
    if (head_dim > form.head_dim || !is_narrowest) continue;
    if (queries <= form.queries && keys <= form.keys) return {};
    largest = {form.head_dim, std::max(largest.queries, form.queries), std::max(largest.keys, form.keys)};
  }
  const auto exceeds = [&](const char* name, std::int64_t tokens, int limit) {
    return Status::invalid_argument(std::string(pass) + name + " has " + std::to_string(tokens) +
                                    " tokens, but must have at most " + std::to_string(limit) +
                                    " at this head dimension");
  };
  return queries > largest.queries ? exceeds("q_tile_shape", queries, largest.queries)
                                   : exceeds("kv_tile_shape", keys, largest.keys);
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

Status encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                      CUtensorMap (&maps)[kGroupClasses]) {
  const bool is_query = side == Side::kQuery;
  const std::int64_t heads = is_query ? problem.heads : problem.heads_kv;
  TokenGrid grid{array.data, problem.element_type, problem.batch, {}, {}, {}, heads, array.head_dim};
  const int classes = group_classes(problem, side);
  const CUtensorMap* first = nullptr;  // first encoded map; not null after the loop, because some class has groups
  for (int c = 0; c < kGroupClasses; ++c) {
    if (!(classes >> c & 1)) continue;
    for (int d = 0; d < kRank; ++d) {
      const Axis& axis = problem.axes[d];
      grid.extent[d] = is_query ? axis.query.local_extent : axis.kv.local_extent;
      grid.dilation[d] = axis.window.dilation;
      grid.tokens[d] = grid.extent[d] / grid.dilation[d] + (has_remainder(c, d) ? 1 : 0);
    }
    NATTEN_JAX_RETURN_IF_FAILED(encode_head_map(grid, tile, maps[c]));
    if (first == nullptr) first = &maps[c];
  }
  // On this device, a dilation group may have queries but no keys, or keys but no queries. The kernel then still loads
  // a tile of zeros for the missing tokens. It needs a valid map for this load: a map that was never encoded causes an
  // illegal instruction error.
  for (int c = 0; c < kGroupClasses; ++c) {
    if (!(classes >> c & 1)) maps[c] = *first;
  }
  return {};
}

EntryMaps maps_of_entries(const Problem& problem, const Arrays& arrays, int number_of_arrays, CUtensorMap* result) {
  EntryMaps maps{};
  maps.layouts = arrays.layouts;
  maps.batch = static_cast<int>(problem.batch);
  maps.arrays = number_of_arrays;
  maps.classes = kGroupClasses;
  for (int i = 0; i < kRank; ++i) {
    const int d = maps.dimension[i] = kRank - 1 - i;
    maps.axis[i] = device_axis(problem.axes[d], 1, 1);
  }
  maps.result = result;
  return maps;
}

std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays) {
  return arrays.layouts == nullptr ? 0 : problem.batch * kForwardArrays * kGroupClasses;
}

std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays) {
  return arrays.layouts == nullptr ? 0 : problem.batch * kBackwardArrays * kGroupClasses;
}

Status encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map) {
  const TokenGrid grid{array.data, problem.element_type,          problem.batch,    {1, 1, problem.additional_kv},
                       {1, 1, 1},  {1, 1, problem.additional_kv}, problem.heads_kv, array.head_dim};
  return encode_head_map(grid, {1, 1, tokens}, map);
}

}  // namespace natten_jax::sm90
