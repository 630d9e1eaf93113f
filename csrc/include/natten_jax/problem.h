// The description of one attention problem, as plain data for host and device code.
//
// Every problem has three token dimensions; problems of lower rank have leading dimensions of extent 1.
#pragma once

#include <cstdint>

#include "natten_jax/windows.h"

namespace natten_jax {

inline constexpr int kRank = 3;

enum class ElementType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

/// The tokens of one side (query or key/value) along one dimension.
struct TokenAxis {
  std::int64_t layout;  ///< Extent of the global token layout.
  std::int64_t extent;  ///< Extent of the local array.
  std::int64_t origin;  ///< Global coordinate of the first local token.

  /// Group indices of the local tokens of a dilation group that lie inside the global layout.
  NATTEN_JAX_HOST_DEVICE constexpr Range<std::int64_t> local_indices(std::int64_t dilation, std::int64_t group) const {
    const std::int64_t first = larger<std::int64_t>(origin, 0);
    const std::int64_t last = smaller(origin + extent, layout);
    // Indices count the tokens of the group that lie before a coordinate.
    return {before(first, dilation, group), before(last, dilation, group)};
  }

  /// Local coordinate of the token at `index` of a dilation group.
  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t coordinate(std::int64_t index, std::int64_t dilation,
                                                           std::int64_t group) const {
    return index * dilation + group - origin;
  }

 private:
  NATTEN_JAX_HOST_DEVICE static constexpr std::int64_t before(std::int64_t coordinate, std::int64_t dilation,
                                                              std::int64_t group) {
    return coordinate <= group ? 0 : group_length(coordinate, dilation, group);
  }
};

/// One token dimension: both sides and the window that relates them.
struct Dimension {
  TokenAxis query;
  TokenAxis kv;
  std::int64_t kernel_size;
  std::int64_t stride;
  std::int64_t dilation;
  bool is_causal;

  /// Indices of the local keys that the query at `index` of a dilation group sees.
  NATTEN_JAX_HOST_DEVICE constexpr Range<std::int64_t> visible_keys(std::int64_t index, std::int64_t group) const {
    const std::int64_t length = group_length(kv.layout, dilation, group);
    return intersection(window_bounds(index, length, kernel_size, stride, is_causal),
                        kv.local_indices(dilation, group));
  }

  /// Indices of the local queries that see the key at `index` of a dilation group.
  NATTEN_JAX_HOST_DEVICE constexpr Range<std::int64_t> visible_queries(std::int64_t index, std::int64_t group) const {
    const std::int64_t query_length = group_length(query.layout, dilation, group);
    const std::int64_t key_length = group_length(kv.layout, dilation, group);
    return intersection(inverse_window_bounds(index, query_length, key_length, kernel_size, stride, is_causal),
                        query.local_indices(dilation, group));
  }
};

/// What is computed, without how.
struct Problem {
  ElementType element_type;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t heads_kv;
  std::int64_t head_dim;
  std::int64_t head_dim_v;
  std::int64_t additional_kv;
  float scale;
  Dimension dims[kRank];

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t heads_per_kv() const { return heads / heads_kv; }

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t queries() const {
    return dims[0].query.extent * dims[1].query.extent * dims[2].query.extent;
  }

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t keys() const {
    return dims[0].kv.extent * dims[1].kv.extent * dims[2].kv.extent;
  }
};

/// Tokens per dimension that a tile holds.
struct TileShapes {
  std::int64_t query[kRank];
  std::int64_t kv[kRank];
};

}  // namespace natten_jax
