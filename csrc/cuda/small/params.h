// Parameters of the kernels for small windows, passed by value.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/small/region.h"
#include "cuda/small/region_order.h"

namespace natten_jax::small {

/// Tensor maps per batch entry: two arrays of columns, and the statistics of queries.
constexpr int kEntryMaps = 3;

/// Key biases.
struct KeyBiasParams {
  const float* of_keys;             // [batch, keys, heads], or null
  bool is_of_all_heads;             // one bias per key, shared by all heads: [batch, keys]
  cutlass::FastDivmod by_heads_kv;  // divides row indices of keys
  float* gradient;                  // [batch, keys, heads]
};

/// Parameters of the region and the problem that all kernels use. As in Region, the fields of plain passes come first.
struct CommonParams {
  Region region;
  int query_pitch[kRank];  // distance in tokens between neighbors along a dimension
  int kv_pitch[kRank];
  int queries;  // per batch entry
  int heads;
  int items;  // batch entries times query heads
  int additional_kv;
  float exponent_scale;   // from products to logits in base 2, without per-head scales
  bool is_plain;          // the arrays are the complete layout, shared by queries and keys
  bool is_single[kRank];  // the dimension has one token, in a plain problem and in all layouts of batch entries
  cutlass::FastDivmod by_heads, by_heads_per_kv;
  cutlass::FastDivmod by_regions[kRank];  // divides by the regions of a dilation group
  cutlass::FastDivmod by_tiles[kRank];    // divides by the tiles of a region
  DeviceAxis axis[kRank];                 // in the order of the region's dimensions; plain passes read 64 bytes of each
  int keys;                               // per batch entry
  int heads_kv;
  int head_dim;
  int head_dim_v;
  Scale scale;
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  const std::int32_t* layouts;  // [batch, 3, 3]: query origin, query and key/value extents; null: one layout for all
                                // entries
  CUtensorMap* entry_maps;      // [batch, kEntryMaps]: replace `columns`; null: one layout for all entries
  // TMA maps: of the two arrays of columns and, if columns are queries, of their statistics; in the kernel of whole
  // layouts, of the boxes that WholeBox names. Dimensions: [head and its elements, the region's dimensions, batch].
  CUtensorMap columns[boxes_of(Kernel::kWholeGradient)];
  // For per-entry layouts: batch entries that a CTA examines, and the number of CTAs that share their work.
  int batch;
  int entries_of_cta;
  cutlass::FastDivmod by_pieces, by_items;
  // [1 or batch, heads, table_entries]: relative bias, added to products of queries and keys; or null.
  const float* relative_bias;
  bool is_table_of_all;  // one table for all batch entries
  KeyBiasParams key_bias;
  int tile_pitch[kRank];  // distance between neighboring tiles of a dimension, counted in tiles of the complete layout
  SeamRegions seam_regions[kRank];

  /// Pairs of groups of additional columns.
  CUTLASS_HOST_DEVICE int additional_pairs() const { return (additional_kv + 2 * kColumns - 1) / (2 * kColumns); }
};

/// Plain passes read the fields of an axis from `query_extent` to `by_dilation`, which fill one aligned 64-byte block.
static_assert((offsetof(CommonParams, axis) + offsetof(DeviceAxis, query_extent)) % 64 == 0);

struct ForwardParams : CommonParams {
  alignas(64) const void* query;  // the fields that all passes read start here
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  void* out;
  float* logsumexp;
  float* remainder;       // remainder of the logsumexp, or null
  const float* sinks;     // [1 or batch, heads]: an extra logit per head in the softmax denominator; or null
  bool are_sinks_of_all;  // one set of sinks for all batch entries

  /// True with per-head scales or sinks.
  CUTLASS_HOST_DEVICE bool has_terms_of_heads() const { return scale.heads != nullptr || sinks != nullptr; }
};

/// Offsets covered by a tile's record (RecordLayout), in the order of the problem's dimensions.
struct TableBox {
  cutlass::FastDivmod by_offsets[kRank];  // divides by the offsets of a dimension of the table
  int extent[kRank], pitch[kRank];

  /// Splits an entry into its offsets; false for a padding entry.
  CUTLASS_HOST_DEVICE bool split(int entry, int (&offset)[kRank]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int d = kRank - 1; d >= 0; --d) by_offsets[d](entry, offset[d], entry);
    return entry == 0;
  }

  /// True if a tile's record, which begins at `least_offset`, contains `offset`; `place` is its index there.
  CUTLASS_HOST_DEVICE bool find(const int (&offset)[kRank], const int* least_offset, int& place) const {
    bool is_there = true;
    place = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int d = 0; d < kRank; ++d) {
      const int behind = offset[d] - least_offset[d];
      is_there &= behind >= 0 && behind < extent[d];
      place += behind * pitch[d];
    }
    return is_there;
  }
};

/// Parameters of the sinks' gradient: the contribution of each query tile, and the final sums.
struct SinksParams {
  const float* sinks;  // [1 or batch, heads]
  float* parts;        // per sink, [batch entries that use it, tiles]; null if the kernels that own queries write none
  std::int64_t next_sink;  // distance between the parts of two sinks, a multiple of 16 bytes
  float* gradient;         // [1 or batch, heads]; null if another kernel adds the parts up
  bool are_of_all;         // one set of sinks for all batch entries
  int tiles;               // tiles per item, over all warps of all regions
  int count;               // sinks
  int parts_of_sink;
};

struct BackwardParams : CommonParams {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const void* out;
  const void* out_cotangent;
  const float* logsumexp;
  const float* remainder;            // null: zeros
  const float* logsumexp_cotangent;  // null: zeros
  // For each query and head: the logsumexp in base 2 (NaN if its remainder matters), delta, the logsumexp
  // in base 2 in any case, and its remainder.
  float4* statistics;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  SinksParams sinks;

  /// True with per-head scales, or if the kernels that own queries start the gradient of sinks.
  CUTLASS_HOST_DEVICE bool has_terms_of_heads() const { return scale.heads != nullptr || sinks.parts != nullptr; }

  // For a relative bias: [batch, heads, tiles, record and header] (bias_table.h); the kernel of whole layouts writes
  // [batch, heads, regions, gradients of entries].
  float* table_records;
  int table_tiles;
  TableBox table_box;
};

/// Parameters of the sums of a relative bias's gradient.
struct TableParams {
  const float* records;  // as in BackwardParams
  float* sums;           // [parts, batch, heads, entries]
  DeviceAxis axis[kRank];
  cutlass::FastDivmod by_tiles[kRank];  // divides by the tiles of a dimension, of all dilation groups
  TableBox box;
  int tiles;  // tiles per item; or regions, if each region has a table
  int record;
  int entries;
};

/// Parameters of the gradients of additional keys and values.
struct AdditionalParams {
  const void* query;
  const void* keys;
  const void* values;
  const void* out_cotangent;
  const float4* statistics;
  // [parts, batch, keys, heads_kv, head_dim + head_dim_v]: partial key gradients without the scale, and partial value
  // gradients, one per part of the queries.
  float* sums;
  void* keys_gradient;
  void* values_gradient;
  int batch;
  int queries;  // per batch entry
  int heads;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  int additional_kv;
  Scale scale;
  int parts;
  int columns_of_part;  // a column is a pair of a query and one of the query heads that share a key/value head
  // Divide by: the CTAs for the parts of a tile of keys, the tiles of a head, the key/value heads, and the query heads
  // per key/value head.
  cutlass::FastDivmod by_splits, by_tiles, by_heads_kv, by_heads_per_kv;
};

}  // namespace natten_jax::small
