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
  std::int64_t dilation[3];  ///< Tokens from one token of a group to the next.
  std::int64_t tokens[3];    ///< Tokens of the group.
  std::int64_t heads;
  std::int64_t head_dim;
};

/// Encodes a map of dimensions [head_dim, z, y, x, slot] whose boxes hold one swizzled row of 128 bytes of dimension 0
/// and `box` tokens of one slot. A slot is the index of a token's head in the whole array: (entry * tokens + token) *
/// heads + head. The slot's token has the coordinates (0, 0, 0), and thereby selects a dilation group. Rows end at
/// head_dim: loads fill with zeros, and stores do not touch the next head.
///
/// Fails if the hardware does not support the map.
Status encode_head_map(const TokenGrid& grid, const std::int64_t (&box)[3], CUtensorMap& map);

/// Tokens of an array with dimensions in any order. Boxes may take every nth token.
struct TokenBoxes {
  const void* data;
  ElementType element_type;
  std::int64_t batch;
  std::int64_t extent[3];    ///< Local tokens.
  std::int64_t pitch[3];     ///< Distance in tokens between neighbors.
  std::int64_t dilation[3];  ///< Dilation of a box's tokens; at most 8.
  std::int64_t heads;
  std::int64_t head_dim;  ///< A head is a row of a box, swizzled if it has 64 or 128 bytes.
};

/// Encodes a map of dimensions [heads and their elements, the three of tokens, batch] whose boxes hold one head of
/// `box` tokens.
///
/// Fails if the hardware does not support the map.
Status encode_box_map(const TokenBoxes& tokens, const int (&box)[3], CUtensorMap& map);

}  // namespace natten_jax
