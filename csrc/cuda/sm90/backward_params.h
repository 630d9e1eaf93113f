// What the Hopper backward kernel is launched with: geometry, tensor maps and pointers, passed by value.
#pragma once

#include "cuda/sm90/params.h"

namespace natten_jax::sm90 {

/// Maps of query arrays: one per class of dilation groups, and one of the layout as it is for additional tokens.
constexpr int kWholeLayout = kGroupClasses;
constexpr int kQueryMaps = kGroupClasses + 1;

/// Most key/value tiles that are sorted by length: among many, the last ones to finish matter little.
constexpr int kMostSortedTiles = 4096;

/// Larger than the 4096 bytes that kernels could once have; see kMostParameterBytes of cuda/common/launch.cuh.
struct BackwardParams {
  CUtensorMap query[kQueryMaps];
  CUtensorMap out_cotangent[kQueryMaps];
  CUtensorMap query_gradient[kQueryMaps];  // float32 [batch * heads, x, y, z, head_dim], to which tiles are added
  CUtensorMap key[kGroupClasses];
  CUtensorMap value[kGroupClasses];
  CUtensorMap key_gradient[kGroupClasses];
  CUtensorMap value_gradient[kGroupClasses];
  CUtensorMap additional_keys;
  CUtensorMap additional_values;
  CUtensorMap additional_keys_gradient;
  CUtensorMap additional_values_gradient;
  DeviceAxis axis[3];
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  const float2* statistics;     // [batch, heads, x, y, z]: logsumexp in base 2, delta
  const float* remainder;       // of the logsumexp, [batch, x, y, z, heads]; null: zeros
  std::int32_t* next_tile;      // counts the tiles that CTAs have taken, from `first_taken` on
  // [batch, heads, dilation groups, query tiles]: key/value tiles that have added to the query gradient, which they do
  // one after the other in a fixed order; null: in any order
  std::int32_t* turns;
  int first_tile[3];  // where they take turns, per dimension: from this one down, then from the last one down
  int first_taken;
  int queries;  // per batch entry
  int heads;
  int heads_kv;
  int heads_per_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  float scale;
  int additional_tiles;  // tiles of additional tokens of the whole problem, which come first
  int tiles;             // key/value tiles of the whole problem
  int groups;            // dilation groups
  int q_tiles;           // query tiles per dilation group
  int q_tile_tokens;     // product of the query tile's extents
  int kv_tile_tokens;    // product of the key/value tile's extents
  bool clears_tiles;     // some rows or columns of a tile are never loaded
  bool is_sorted;        // key/value tiles are taken as `order` has them
  cutlass::FastDivmod by_additional_tiles_per_head, by_tiles_per_group, by_groups, by_heads_kv;
  std::uint16_t order[kMostSortedTiles];  // numbers of tiles, if they are sorted
};

}  // namespace natten_jax::sm90
