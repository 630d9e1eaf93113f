// Parameters of the portable kernels, passed by value: geometry and pointers.
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
  const std::int32_t* layouts;  // [batch, 3, 3]: query origin, query and key/value extents; null: equal layouts
  void* out;
  float* logsumexp;
  float* remainder;      // of the logsumexp, or null
  std::int64_t queries;  // per batch entry
  std::int64_t keys;
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
  // Only for kernels with key biases.
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
  const float* remainder;  // null: zeros
  const void* out_cotangent;
  const float* delta;
  float* query_gradient;  // sums over keys, to which every CTA adds
  void* key_gradient;
  void* value_gradient;
  std::int64_t queries;  // per batch entry
  std::int64_t keys;
  std::int64_t query_gradient_batch;  // distance in elements between batch entries of the sums
  std::int64_t query_gradient_token;  // distance in elements between tokens of the sums
  std::int64_t query_gradient_head;   // distance in elements between heads of the sums
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  bool is_additional;  // keys and values are additional tokens, which every query sees
  Scale scale;
  int q_tile_tokens;
  int kv_tile_tokens;
  int tiles;   // parts of the key/value tiles of a dilation group; a CTA takes one at a time
  int parts;   // per tile
  int splits;  // CTAs that share the tiles of a dilation group
  cutlass::FastDivmod by_splits, by_groups;
  cutlass::FastDivmod by_heads_kv;  // heads of the launch, which may be fewer than all heads
  // Only for kernels with key biases.
  const float* key_bias;  // as in ForwardParams
  int key_bias_heads;
  float* key_bias_gradient;  // [batch, keys, heads]
};

/// True if all heads share a scale, all batch entries share a layout, and no dimension cuts or wraps windows, as in
/// most calls. Kernels for such calls contain no other cases.
template <class Params>
bool is_plain(const Params& p) {
  const auto are_plain = [](const DeviceAxis& axis) { return axis.ends == Ends::kShift || axis.ends == Ends::kCausal; };
  return p.scale.heads == nullptr && p.layouts == nullptr && std::all_of(p.axis, p.axis + 3, are_plain);
}

}  // namespace natten_jax::sm80
