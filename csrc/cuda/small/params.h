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

/// Tensor maps per batch entry: for two arrays of columns, and for the statistics of queries.
constexpr int kEntryMaps = 3;

/// Key biases.
struct KeyBiasParams {
  const float* biases;              // [batch, keys, heads], or null
  bool is_shared_by_heads;          // one bias per key, shared by all heads: [batch, keys]
  cutlass::FastDivmod by_heads_kv;  // divides row indices of keys by heads_kv
  float* gradient;                  // [batch, keys, heads]
};

/// Parameters of the region and the problem that all kernels use. As in Region, the fields that passes of plain
/// problems read come first.
struct CommonParams {
  Region region;
  int query_pitch[kRank];  // distance in tokens between neighbors along a dimension
  int kv_pitch[kRank];
  int queries;  // per batch entry
  int heads;
  int items;  // batch entries times query heads
  int additional_kv;
  float exponent_scale;   // converts products to logits in base 2, if all heads have the same scale
  bool is_plain;          // the arrays are the complete layout, shared by queries and keys
  bool is_single[kRank];  // the problem is plain, and the dimension has one token in the layouts of all batch entries
  cutlass::FastDivmod by_heads, by_heads_per_kv;
  cutlass::FastDivmod by_regions[kRank];  // divides by the number of regions per dilation group
  cutlass::FastDivmod by_tiles[kRank];    // divides by the number of tiles per region
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
  // TMA maps of the two arrays of columns, and of statistics if columns are queries. In the kernel of whole layouts,
  // these are instead the maps of the boxes in WholeBox. Dimensions of a map: [head and its elements, the region's
  // dimensions, batch].
  CUtensorMap columns[boxes_of(Kernel::kWholeGradient)];
  // For per-entry layouts. A CTA examines `entries_of_cta` of the `batch` entries. For each region, several CTAs
  // examine the same batch entries and divide the items of these entries among themselves. `by_pieces` divides by the
  // number of these CTAs, and `by_items` by the items of a CTA.
  int batch;
  int entries_of_cta;
  cutlass::FastDivmod by_pieces, by_items;
  // Relative bias, in terms that are added to products of queries and keys: [1 or batch, heads, table_entries]; or
  // null.
  const float* relative_bias;
  bool is_table_shared;  // one table for all batch entries
  KeyBiasParams key_bias;
  int tile_pitch[kRank];  // difference between the numbers (TilePlan::number) of neighboring tiles along a dimension
  SeamRegions seam_regions[kRank];

  /// Returns the number of pairs of groups that the additional columns form.
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
  bool are_sinks_shared;  // one set of sinks for all batch entries

  /// True with per-head scales or sinks.
  CUTLASS_HOST_DEVICE bool has_head_terms() const { return scale.heads != nullptr || sinks != nullptr; }
};

/// The box of offsets that a tile's record covers (RecordLayout). Dimensions are in the problem's order.
struct TableBox {
  cutlass::FastDivmod by_offsets[kRank];  // divides by the number of the table's offsets along a dimension
  int extent[kRank], pitch[kRank];

  /// Splits the index of a table entry into its offset in each dimension. Returns false for a padding entry.
  CUTLASS_HOST_DEVICE bool split(int entry, int (&offset)[kRank]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int d = kRank - 1; d >= 0; --d) by_offsets[d](entry, offset[d], entry);
    return entry == 0;
  }

  /// True if a tile's record contains `offset`. The record begins at `least_offset`. Sets `index` to the index of
  /// `offset` in the record.
  CUTLASS_HOST_DEVICE bool find(const int (&offset)[kRank], const int* least_offset, int& index) const {
    bool is_there = true;
    index = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int d = 0; d < kRank; ++d) {
      const int behind = offset[d] - least_offset[d];
      is_there &= behind >= 0 && behind < extent[d];
      index += behind * pitch[d];
    }
    return is_there;
  }
};

/// Parameters of the gradient of sinks: its parts, one per query tile, and the sums of these parts.
struct SinksParams {
  const float* sinks;  // [1 or batch, heads]
  float* parts;  // for each sink: [batch entries that use it, tiles]; null if the kernels that own queries do not write
                 // parts
  std::int64_t next_sink;  // distance in floats between the parts of two sinks; a multiple of 16 bytes
  float* gradient;         // [1 or batch, heads]; null if another kernel adds the parts up
  bool are_shared;         // one set of sinks for all batch entries
  int tiles;               // query tiles per item: one for each warp of each region
  int count;               // number of sinks
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
  // Four numbers per query and head:
  // - `x`: the logsumexp in base 2, or NaN if the remainder of the logsumexp matters.
  // - `y`: delta.
  // - `z`: always the logsumexp in base 2.
  // - `w`: the remainder of the logsumexp.
  float4* statistics;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  SinksParams sinks;

  /// True if the kernels need values per head: scales, or partial sums of the sinks' gradient.
  CUTLASS_HOST_DEVICE bool has_head_terms() const { return scale.heads != nullptr || sinks.parts != nullptr; }

  // For a relative bias: the records of tiles, each followed by its header (bias_table.h), [batch, heads, tiles, record
  // and header]. The kernel of whole layouts instead writes a table of sums per CTA (HeadItems::sum_index).
  float* table_records;
  int table_tiles;
  TableBox table_box;
};

/// Parameters of the kernel that adds up the records of tiles for the gradient of a relative bias.
struct TableParams {
  const float* records;  // BackwardParams::table_records
  float* sums;           // [parts, batch, heads, entries]
  DeviceAxis axis[kRank];
  cutlass::FastDivmod by_tiles[kRank];  // divides by the number of tiles along a dimension, over all dilation groups
  TableBox box;
  int tiles;  // tiles per item
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
  // Partial gradients [parts, batch, keys, heads_kv, head_dim + head_dim_v]: of keys, without the scale, and of values.
  // Each part has the contributions of one part of the queries.
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
  int columns_of_part;  // a column is one query of one of the query heads that share a key/value head
  // Divisors: the number of CTAs per tile of keys, of tiles per key/value head, of key/value heads, and of query heads
  // per key/value head.
  cutlass::FastDivmod by_splits, by_tiles, by_heads_kv, by_heads_per_kv;
};

}  // namespace natten_jax::small
