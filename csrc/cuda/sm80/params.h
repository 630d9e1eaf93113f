// What the portable kernels are launched with: geometry and pointers, passed by value.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/axis.h"

namespace natten_jax::sm80 {

struct ForwardParams {
  Axis axis[3];
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  void* out;
  float* logsumexp;
  std::int64_t queries;  // per batch entry
  std::int64_t keys;
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  float scale;
  int q_tile_tokens;    // product of the query tile's extents
  int kv_tile_tokens;   // product of the key/value tile's extents
  int heads_per_block;  // heads whose tiles are interleaved
  cutlass::FastDivmod by_tiles_per_group, by_groups, by_heads_per_block, by_head_blocks, by_heads_per_kv;
};

}  // namespace natten_jax::sm80
