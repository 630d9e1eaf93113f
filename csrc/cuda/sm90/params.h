// What the Hopper kernels are launched with: geometry, tensor maps and pointers, passed by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/tile_boxes.h"
#include "cuda/common/tile_scheduler.h"

namespace natten_jax::sm90 {

/// Dilation groups differ in whether they hold a remainder token: two classes per dimension, one tensor map each.
constexpr int kGroupClasses = 8;

/// A warpgroup computes 64 rows of a query tile; the forms of the kernel have two or three.
constexpr int kMostWarpgroups = 3;
/// Coordinates that bound the rows of each warpgroup in three dimensions.
constexpr int kCorners = kMostWarpgroups * 2 * 3;

/// Arrays of which batch entries have maps of their own, in the order of these (cuda/tma/entry_maps.h).
enum ForwardArray { kQueryOfEntry, kKeyOfEntry, kValueOfEntry, kOutOfEntry, kForwardArrays };
enum BackwardArray {
  kQueriesOfEntry,
  kOutCotangentsOfEntry,
  kQueryGradientsOfEntry,
  kKeysOfEntry,
  kValuesOfEntry,
  kKeyGradientsOfEntry,
  kValueGradientsOfEntry,
  kBackwardArrays
};

/// Larger than the 4096 bytes that kernels could once have; see kMostParameterBytes of cuda/common/launch.cuh.
struct ForwardParams {
  CUtensorMap query[kGroupClasses];
  CUtensorMap key[kGroupClasses];
  CUtensorMap value[kGroupClasses];
  CUtensorMap out[kGroupClasses];
  CUtensorMap additional_keys;
  CUtensorMap additional_values;
  int query_classes, kv_classes;  // bit sets of the classes that have maps
  DeviceAxis axis[3];
  int corner[kCorners];         // coordinates in the query tile: [warpgroup][first row, last row][dimension]
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  const std::int32_t* layouts;  // [batch, 3, 3]: query origin, query and key/value extents; null: all alike
  CUtensorMap* entry_maps;      // [batch, kForwardArrays, kGroupClasses]: in place of those above; null likewise
  // Whether out, logsumexp and remainder hold what earlier launches found on other keys, with which results are merged;
  // and then [3], the first local query: tiles before it do not exist.
  bool continues;
  const std::int32_t* first_query;
  bool is_plain;  // no origins, layouts or earlier launch; windows are shifted inside or end at the query
  float* logsumexp;
  float* remainder;  // of the logsumexp, or null
  int queries;       // per batch entry
  int keys;          // per batch entry
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  int additional_tiles;  // of additional keys and values
  Scale scale;
  int q_tile_tokens;   // product of the query tile's extents
  int kv_tile_tokens;  // product of the key/value tile's extents
  TileBoxes kv_boxes;  // that key/value tiles are loaded in
  bool clears_tiles;   // some rows of a tile are never loaded
  TileSupply supply;   // of query tiles
  QueryTileSchedule schedule;
  cutlass::FastDivmod by_heads_per_kv;
  // For 8-bit elements alone.
  const float* out_scales;  // [batch, heads]: what the output is multiplied with; null: ones
  bool is_out_float16;      // or bfloat16
  // For kernels with biases of keys alone.
  const float* key_bias;  // [batch, keys, heads]; or likewise with one number for all of them:
  int key_bias_heads;
  int last_key;  // counted over all batch entries
};

/// Maps of query arrays: one per class of dilation groups, and one of the layout as it is for additional tokens.
constexpr int kWholeLayout = kGroupClasses;
constexpr int kQueryMaps = kGroupClasses + 1;

/// As large as ForwardParams.
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
  const std::int32_t* layouts;  // as in ForwardParams
  bool is_plain;                // likewise
  CUtensorMap* entry_maps;      // [batch, kBackwardArrays, kGroupClasses]
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
  TileBoxes q_boxes;   // that query tiles are loaded in, and stored
  bool clears_tiles;   // some rows of a tile are never loaded
  KeyTileSchedule schedule;
  // For kernels with biases of keys alone.
  const float* key_bias;  // as in ForwardParams
  int key_bias_heads;
  float* key_bias_gradient;  // [batch, keys, heads]
};

}  // namespace natten_jax::sm90
