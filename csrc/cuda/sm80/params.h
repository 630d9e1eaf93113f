// Parameters of the portable kernels: geometry and pointers, passed by value.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/tile_scheduler.h"

namespace natten_jax::sm80 {

struct ForwardParams {
  DeviceAxis axis[3];
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  // [batch, 3, 3]: query origin, query extents and key/value extents of each batch entry. Null: all entries have the
  // layout of the launch.
  const std::int32_t* layouts;
  void* out;
  float* logsumexp;
  float* remainder;      // remainder of the logsumexp; null: not written
  std::int64_t queries;  // number of queries per batch entry
  std::int64_t keys;     // number of keys per batch entry
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  Scale scale;
  int q_tile_tokens;   // product of the query tile's extents
  int kv_tile_tokens;  // product of the key/value tile's extents
  QueryTileSchedule schedule;
  cutlass::FastDivmod by_heads_per_kv;
  // Members that only kernels with key biases use.
  const float* key_bias;  // [batch, keys, key_bias_heads], where key_bias_heads is heads or 1
  int key_bias_heads;
};

struct BackwardParams {
  DeviceAxis axis[3];
  const void* query;
  const void* key;
  const void* value;
  const std::int32_t* origins;  // as in ForwardParams
  const std::int32_t* layouts;
  const float* logsumexp;
  const float* remainder;  // remainder of the logsumexp; null: zeros
  const void* out_cotangent;
  const float* delta;
  float* query_gradient;  // float32 sums, initially zero, to which all CTAs add
  void* key_gradient;
  void* value_gradient;
  std::int64_t queries;               // number of queries per batch entry
  std::int64_t keys;                  // number of keys per batch entry
  std::int64_t query_gradient_batch;  // distance in elements between batch entries of query_gradient
  std::int64_t query_gradient_token;  // distance in elements between tokens of query_gradient
  std::int64_t query_gradient_head;   // distance in elements between heads of query_gradient
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  bool is_additional;  // true if keys and values are additional tokens, to which every query attends
  Scale scale;
  int q_tile_tokens;
  int kv_tile_tokens;
  // A CTA processes a part of a key/value tile at a time: at most `Traits::kKeys` of its keys.
  int tiles;   // number of parts of all key/value tiles of a dilation group
  int parts;   // number of parts of a key/value tile
  int splits;  // number of CTAs that share the parts of a dilation group
  cutlass::FastDivmod by_splits, by_groups;
  cutlass::FastDivmod by_heads_kv;  // divides by the key/value heads of the launch, which may be a block of all heads
  // Members that only kernels with key biases use.
  const float* key_bias;  // as in ForwardParams
  int key_bias_heads;
  float* key_bias_gradient;  // [batch, keys, heads]
};

/// True if all heads have the same scale, all batch entries have the same layout, and no dimension cuts or wraps
/// windows. Most launches are plain. They have separate kernels, which are faster because they have no code for the
/// other cases.
template <class Params>
bool is_plain(const Params& p) {
  const auto are_plain = [](const DeviceAxis& axis) { return axis.ends == Ends::kShift || axis.ends == Ends::kCausal; };
  return p.scale.heads == nullptr && p.layouts == nullptr && std::all_of(p.axis, p.axis + 3, are_plain);
}

}  // namespace natten_jax::sm80
