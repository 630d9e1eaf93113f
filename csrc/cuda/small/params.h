// What the kernels for small windows are launched with, passed by value.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/device_axis.h"
#include "cuda/small/region.h"
#include "cuda/small/region_order.h"

namespace natten_jax::small {

/// Tensor maps of a batch entry: those of an array and another, and of what is known of queries.
constexpr int kEntryMaps = 3;

/// Biases of keys.
struct KeyBiasParams {
  const float* of_keys;             // [batch, keys, heads], or null
  bool is_of_all_heads;             // there is one of each key: [batch, keys]
  cutlass::FastDivmod by_heads_kv;  // rows of keys
  float* gradient;                  // [batch, keys, heads]
};

/// A region's numbers and the problem's, for all kernels; in the order of Region.
struct CommonParams {
  Region region;
  int query_pitch[kRank];  // tokens between neighbors of a dimension
  int kv_pitch[kRank];
  int queries;  // per batch entry
  int heads;
  int items;  // batch entries times query heads
  int additional_kv;
  float exponent_scale;   // of weights as powers of two, where heads have no scales of their own
  bool is_plain;          // arrays are the complete layout, and queries and keys lie in the same one
  bool is_single[kRank];  // dimensions of one token of a plain problem, whatever layouts batch entries have
  cutlass::FastDivmod by_heads, by_heads_per_kv;
  cutlass::FastDivmod by_regions[kRank];  // of a dilation group
  cutlass::FastDivmod by_tiles[kRank];    // of a region
  DeviceAxis axis[kRank];                 // in the order of the region's dimensions; of each, 64 bytes are needed
  int keys;                               // per batch entry
  int heads_kv;
  int head_dim;
  int head_dim_v;
  Scale scale;
  const std::int32_t* origins;  // [2, 3]: query origin, key/value origin; null: zeros
  const std::int32_t* layouts;  // [batch, 3, 3]: query origin, query and key/value extents; null: all alike
  CUtensorMap* entry_maps;      // [batch, kEntryMaps]: in place of `columns`; null likewise
  // For the copy engine, of the two arrays of columns and, where these are queries, of their statistics; or of the
  // boxes that WholeBox names: dimensions [head and its elements, those of the region, batch].
  CUtensorMap columns[boxes_of(Kernel::kWholeGradient)];
  // Where batch entries have layouts of their own: how many of them a CTA looks at, and how many CTAs share what these
  // have to do.
  int batch;
  int entries_of_cta;
  cutlass::FastDivmod by_pieces, by_items;
  // [1 or batch, heads, table_entries]: a relative bias, in products of queries and keys; or null.
  const float* relative_bias;
  bool is_table_of_all;  // that all batch entries share
  KeyBiasParams key_bias;
  int tile_pitch[kRank];  // how many tiles further neighbors of a dimension are, where all of a layout are counted
  SeamRegions seam_regions[kRank];

  /// Pairs of groups of additional columns.
  CUTLASS_HOST_DEVICE int additional_pairs() const { return (additional_kv + 2 * kColumns - 1) / (2 * kColumns); }
};

/// What plain passes need of the axes, from `query_extent` to `by_dilation`, is 64 bytes that they get together.
static_assert((offsetof(CommonParams, axis) + offsetof(DeviceAxis, query_extent)) % 64 == 0);

struct ForwardParams : CommonParams {
  alignas(64) const void* query;  // these and what follows them, as far as all passes need it
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  void* out;
  float* logsumexp;
  float* remainder;       // of the logsumexp, or null
  const float* sinks;     // [1 or batch, heads]: a logit of each head that no key stands behind; or null
  bool are_sinks_of_all;  // that all batch entries share

  /// Whether heads have scales of their own, or sinks.
  CUTLASS_HOST_DEVICE bool has_terms_of_heads() const { return scale.heads != nullptr || sinks != nullptr; }
};

/// The offsets of a tile as its record has them (RecordLayout), in the order of the problem's dimensions.
struct TableBox {
  cutlass::FastDivmod by_offsets[kRank];  // of a dimension of the table
  int extent[kRank], pitch[kRank];

  /// The offsets of an entry; false where it is one of those that fill up the table.
  CUTLASS_HOST_DEVICE bool split(int entry, int (&offset)[kRank]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int d = kRank - 1; d >= 0; --d) by_offsets[d](entry, offset[d], entry);
    return entry == 0;
  }

  /// Whether offsets are among those of a tile with these least ones, and where in its record.
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

/// For the gradient of sinks: what each tile of queries adds to it, and their sums.
struct SinksParams {
  const float* sinks;  // [1 or batch, heads]
  float* parts;        // of each sink, [batch entries that have it, tiles]; null where kernels of queries write none
  std::int64_t next_sink;  // from the parts of one to those of the next, whole chunks of 16 bytes
  float* gradient;         // [1 or batch, heads]; null where it is not this kernel that adds parts up
  bool are_of_all;         // that all batch entries share the sinks
  int tiles;               // of an item, as warps of all regions are counted
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
  // For each query and head: the logsumexp in base 2, or NaN where its remainder counts; delta; the logsumexp in any
  // case; and its remainder.
  float4* statistics;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  SinksParams sinks;

  /// Whether heads have scales of their own, or the kernels of queries begin the gradient of sinks.
  CUTLASS_HOST_DEVICE bool has_terms_of_heads() const { return scale.heads != nullptr || sinks.parts != nullptr; }

  // For a relative bias: [batch, heads, tiles, record and header] (bias_table.h); of whole layouts
  // [batch, heads, regions, gradients of entries].
  float* table_records;
  int table_tiles;
  TableBox table_box;
};

/// For the gradient of a relative bias.
struct TableParams {
  const float* records;  // as BackwardParams has them
  float* sums;           // [parts, batch, heads, entries]
  DeviceAxis axis[kRank];
  cutlass::FastDivmod by_tiles[kRank];  // of all dilation groups of a dimension
  TableBox box;
  int tiles;  // or regions, where these have tables
  int record;
  int entries;
};

/// For gradients of additional keys and values.
struct AdditionalParams {
  const void* query;
  const void* keys;
  const void* values;
  const void* out_cotangent;
  const float4* statistics;
  // [parts, batch, keys, heads_kv, head_dim + head_dim_v]: gradients of keys, but for the scale, and those of values,
  // as the queries of a part have them.
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
  int columns_of_part;  // queries and heads that share a key/value head
  // CTAs for the parts of a tile of keys, tiles of a head, and so on.
  cutlass::FastDivmod by_splits, by_tiles, by_heads_kv, by_heads_per_kv;
};

}  // namespace natten_jax::small
