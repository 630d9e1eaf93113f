// Parameters of the Hopper kernels, passed by value: geometry, tensor maps and pointers.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/common/tile_boxes.h"
#include "cuda/common/tile_scheduler.h"

namespace natten_jax::sm90 {

/// Number of classes of dilation groups, each with a tensor map. Per dimension, a group either has a remainder token or
/// does not.
constexpr int kGroupClasses = 8;

/// Maximum number of consumer warpgroups. Each computes 64 rows of a query tile; kernel forms have two or three.
constexpr int kMostWarpgroups = 3;
/// Number of coordinates that bound the rows of all warpgroups in three dimensions.
constexpr int kCorners = kMostWarpgroups * 2 * 3;

/// Arrays with a tensor map per batch entry, in the order of these maps (cuda/tma/entry_maps.h).
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

/// Larger than the former 4096-byte limit of kernel parameters; see kMostParameterBytes of cuda/common/launch.cuh.
struct ForwardParams {
  CUtensorMap query[kGroupClasses];
  CUtensorMap key[kGroupClasses];
  CUtensorMap value[kGroupClasses];
  CUtensorMap out[kGroupClasses];
  CUtensorMap additional_keys;
  CUtensorMap additional_values;
  int query_classes, kv_classes;  // bit sets of the classes with maps
  DeviceAxis axis[3];
  int corner[kCorners];         // coordinates in the query tile: [warpgroup][first row, last row][dimension]
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  const std::int32_t* layouts;  // [batch, 3, 3]: query origin, query and key/value extents; null: equal layouts
  CUtensorMap* entry_maps;      // [batch, kForwardArrays, kGroupClasses]: replace the maps above; null: equal layouts
  // If `continues`, out, logsumexp and remainder hold the results of earlier launches on other keys, to be merged.
  // `first_query` is then [3], the first local query; tiles begin at most one token of their group before it.
  bool continues;
  const std::int32_t* first_query;
  bool is_plain;  // no origins, layouts or earlier launch; no dimension cuts or wraps windows
  float* logsumexp;
  float* remainder;  // of the logsumexp, or null
  int queries;       // per batch entry
  int keys;          // per batch entry
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  int additional_tiles;  // tiles of additional keys and values
  Scale scale;
  int q_tile_tokens;   // product of the query tile's extents
  int kv_tile_tokens;  // product of the key/value tile's extents
  TileBoxes kv_boxes;  // boxes in which key/value tiles are loaded
  bool clears_tiles;   // some rows of a tile are never loaded
  TileSupply supply;   // of query tiles
  QueryTileSchedule schedule;
  cutlass::FastDivmod by_heads_per_kv;
  // Only for 8-bit elements.
  const float* out_scales;  // [batch, heads]: factors of the output; null: ones
  bool is_out_float16;      // otherwise bfloat16
  // Only for kernels with key biases.
  const float* key_bias;  // [batch, keys, key_bias_heads], where key_bias_heads is heads or 1
  int key_bias_heads;
  int last_key;  // index of the last key over all batch entries
};

/// Maps per query array: one per class of dilation groups, and one of the undilated layout for additional tokens.
constexpr int kWholeLayout = kGroupClasses;
constexpr int kQueryMaps = kGroupClasses + 1;

/// About the size of ForwardParams.
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
  bool is_plain;                // as in ForwardParams
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
  TileBoxes q_boxes;   // boxes in which query tiles are loaded and stored
  bool clears_tiles;   // some rows of a tile are never loaded
  KeyTileSchedule schedule;
  // Only for kernels with key biases.
  const float* key_bias;  // as in ForwardParams
  int key_bias_heads;
  float* key_bias_gradient;  // [batch, keys, heads]
};

}  // namespace natten_jax::sm90
