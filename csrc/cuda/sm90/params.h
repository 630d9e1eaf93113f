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

/// Number of classes of dilation groups. In each of three dimensions, a group may or may not have a remainder token, so
/// there are 2^3 classes. Every class has a separate tensor map.
constexpr int kGroupClasses = 8;

/// Maximum number of consumer warpgroups of the forward kernel. Forms have two or three of them, and each consumer
/// warpgroup computes 64 rows of a query tile.
constexpr int kMostWarpgroups = 3;
/// Number of coordinates of the bounding boxes of all warpgroups' rows: two corners per box, in three dimensions.
constexpr int kCorners = kMostWarpgroups * 2 * 3;

/// Arrays that have a separate tensor map for each batch entry (cuda/tma/entry_maps.h). The enumerators are indices of
/// the maps of a batch entry.
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

/// Parameters of the forward kernel. They exceed 4096 bytes, which older CUDA versions do not support (see
/// kMostParameterBytes in cuda/common/launch.cuh).
struct ForwardParams {
  CUtensorMap query[kGroupClasses];
  CUtensorMap key[kGroupClasses];
  CUtensorMap value[kGroupClasses];
  CUtensorMap out[kGroupClasses];
  CUtensorMap additional_keys;
  CUtensorMap additional_values;
  int query_classes, kv_classes;  // Bit sets of the classes that have dilation groups.
  DeviceAxis axis[3];
  // Bounding boxes of the warpgroups' rows in the query tile: [warpgroup][first corner, last corner][dimension].
  int corner[kCorners];
  const std::int32_t* origins;  // Shape [2, 3]: query origin, key/value origin. Null: zeros.
  // Layouts of batch entries, [batch, 3, 3]: query origin, query extents, key/value extents. Null: no separate layouts.
  const std::int32_t* layouts;
  // Tensor maps of batch entries, [batch, kForwardArrays, kGroupClasses]. They replace the maps above. Null: no
  // separate layouts.
  CUtensorMap* entry_maps;
  // If `continues`, `out`, `logsumexp` and `remainder` contain the results of earlier launches on other keys, with
  // which this launch merges its results. `first_query` [3] is then Continuation::first_query. The query tiles of a
  // dilation group then begin at the group's first query in the box, or one query earlier.
  bool continues;
  const std::int32_t* first_query;
  // True if there are no origins, layouts or earlier launches, and no dimension cuts or wraps windows.
  bool is_plain;
  float* logsumexp;
  float* remainder;  // Remainders of the logsumexps, or null.
  int queries;       // Queries per batch entry.
  int keys;          // Keys per batch entry.
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  int additional_tiles;  // Number of tiles of additional keys and values.
  Scale scale;
  int q_tile_tokens;   // Number of queries of a query tile.
  int kv_tile_tokens;  // Number of keys of a key/value tile.
  TileBoxes kv_boxes;  // Boxes in which key/value tiles are loaded.
  bool clears_tiles;   // True if some rows of tiles in shared memory are never loaded.
  TileSupply supply;   // Supplies CTAs with query tiles.
  QueryTileSchedule schedule;
  cutlass::FastDivmod by_heads_per_kv;
  // Only for 8-bit elements.
  const float* out_scales;  // Factors by which the output is multiplied, [batch, heads]. Null: ones.
  bool is_out_float16;      // False: the output is bfloat16.
  // Only for kernels with key biases.
  const float* key_bias;  // Shape [batch, keys, key_bias_heads], where key_bias_heads is heads or 1.
  int key_bias_heads;
  int last_key;  // Index of the last key, counted over all batch entries.
};

/// A query array of the backward kernel has kQueryMaps tensor maps: one per class of dilation groups and, for
/// additional tokens, one of the undilated layout (index kWholeLayout).
constexpr int kWholeLayout = kGroupClasses;
constexpr int kQueryMaps = kGroupClasses + 1;

/// Parameters of the backward kernel. Their size is about that of ForwardParams.
struct BackwardParams {
  CUtensorMap query[kQueryMaps];
  CUtensorMap out_cotangent[kQueryMaps];
  // Float32 sums [batch * heads, x, y, z, head_dim], to which dQ tiles are added.
  CUtensorMap query_gradient[kQueryMaps];
  CUtensorMap key[kGroupClasses];
  CUtensorMap value[kGroupClasses];
  CUtensorMap key_gradient[kGroupClasses];
  CUtensorMap value_gradient[kGroupClasses];
  CUtensorMap additional_keys;
  CUtensorMap additional_values;
  CUtensorMap additional_keys_gradient;
  CUtensorMap additional_values_gradient;
  DeviceAxis axis[3];
  const std::int32_t* origins;  // See ForwardParams.
  const std::int32_t* layouts;  // See ForwardParams.
  bool is_plain;                // See ForwardParams.
  CUtensorMap* entry_maps;      // Shape [batch, kBackwardArrays, kGroupClasses]. See ForwardParams.
  const float2* statistics;     // Logsumexp in base 2 and delta of each query, [batch, heads, x, y, z].
  const float* remainder;       // Remainders of the logsumexps, [batch, x, y, z, heads]. Null: zeros.
  int queries;                  // Queries per batch entry.
  int keys;                     // Keys per batch entry.
  int heads;
  int heads_kv;
  int heads_per_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  Scale scale;
  int q_tile_tokens;   // Number of queries of a query tile.
  int kv_tile_tokens;  // Number of keys of a key/value tile.
  TileBoxes q_boxes;   // Boxes in which query tiles are loaded and stored.
  bool clears_tiles;   // True if some rows of tiles in shared memory are never loaded.
  KeyTileSchedule schedule;
  // Only for kernels with key biases.
  const float* key_bias;  // See ForwardParams.
  int key_bias_heads;
  float* key_bias_gradient;  // Shape [batch, keys, heads].
};

}  // namespace natten_jax::sm90
