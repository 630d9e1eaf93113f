// Tensor maps for tiles of heads-last arrays [batch, x, y, z, heads, head_dim].
#pragma once

#include <cuda.h>

#include <cstdint>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Tokens of a dilation group, as an array with strides of `dilation` tokens.
struct TokenGrid {
  const void* data;
  ElementType element_type;
  std::int64_t batch;
  std::int64_t extent[3];    ///< Local tokens.
  std::int64_t dilation[3];  ///< Distance in tokens between neighbors of a group.
  std::int64_t tokens[3];    ///< Tokens of the group.
  std::int64_t heads;
  std::int64_t head_dim;
};

/// Encodes a map of dimensions [head_dim, z, y, x, slot]. A box holds `box` tokens of one slot, and a swizzled row of
/// 128 bytes of each token.
///
/// A slot is the index of one head of one token in the whole array: (entry * tokens + token) * heads + head. Token
/// coordinates of the map are relative to the slot's token, so that the slot selects a dilation group. Rows end at
/// head_dim: loads fill the rest of a box with zeros, and stores do not write to the next head.
///
/// Fails if the hardware does not support the map.
Status encode_head_map(const TokenGrid& grid, const std::int64_t (&box)[3], CUtensorMap& map);

/// Tokens of an array, whose token dimensions may be in any order. A box may hold every nth token of a dimension.
struct TokenBoxes {
  const void* data;
  ElementType element_type;
  std::int64_t batch;
  std::int64_t extent[3];    ///< Local tokens.
  std::int64_t pitch[3];     ///< Distance in tokens between neighbors.
  std::int64_t dilation[3];  ///< A box holds every `dilation`-th token; at most 8.
  std::int64_t heads;
  std::int64_t head_dim;  ///< A row of a box holds a head. It is swizzled if it has 64 or 128 bytes.
};

/// Encodes a map of dimensions [heads * head_dim, three dimensions of tokens, batch]. A box holds one head of `box`
/// tokens.
///
/// Fails if the hardware does not support the map.
Status encode_box_map(const TokenBoxes& tokens, const int (&box)[3], CUtensorMap& map);

}  // namespace natten_jax
