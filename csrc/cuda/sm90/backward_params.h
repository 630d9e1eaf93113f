// What the Hopper backward kernel is launched with: geometry, tensor maps and pointers, passed by value.
#pragma once

#include "cuda/sm90/params.h"

namespace natten_jax::sm90 {

/// Maps of query arrays: one per class of dilation groups, and one of the layout as it is for additional tokens.
constexpr int kWholeLayout = kGroupClasses;
constexpr int kQueryMaps = kGroupClasses + 1;

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
  int queries;                  // per batch entry
  int keys;                     // per batch entry
  int heads;
  int heads_kv;
  int heads_per_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  Scale scale;
  int q_tile_tokens;   // product of the query tile's extents
  int kv_tile_tokens;  // product of the key/value tile's extents
  bool clears_tiles;   // some rows of a tile are never loaded
  KeyTileSchedule schedule;
};

}  // namespace natten_jax::sm90
