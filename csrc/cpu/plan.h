// Division of an attention pass into independent work items.
//
// A pass has an owner side and a stream side. In the forward and query-gradient passes, an item owns a tile of queries
// and streams the keys that these queries attend to (see). In the key/value-gradient pass, an item owns a tile of keys
// and streams the queries that attend to these keys. Every result element has one owner. So no pass needs atomics, and
// results do not depend on the number of threads.
//
// An item divides its tokens of the owner side into lane blocks: small boxes of up to kLanes tokens, one per vector
// lane. The shape of these boxes is chosen such that the union of a block's windows is little larger than one window.
// Stream tokens are visited row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "natten_jax/arrays.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::cpu {

inline constexpr int kLanes = 16;

/// Number of scalars per lane, stored in addition to the lane's vectors. Lanes of the forward pass have the maximum and
/// the sum of a query's softmax, and its exponent scale. Lanes of the query-gradient pass have QueryValues and the
/// exponent scale. Lanes of the key/value-gradient pass have a key's bias and the gradient of this bias.
inline constexpr int kStatistics = 5;

/// Number of rows of padding after the rows of a stream tile. Micro-kernels process rows in groups, and the last group
/// may extend into the padding.
inline constexpr std::int64_t kRowPadding = 16;

/// Minimum number of rows that scratch memory has space for. Additional keys are streamed in tiles of at least this
/// size, even if the tiles of layout tokens are smaller.
inline constexpr std::int64_t kMinStreamRows = 64;

enum class Pass { kForward, kQueryGradient, kKeyValueGradient };

/// Contiguous owner tokens of a dilation group along one dimension: a half-open range of group indices.
struct Segment {
  std::int64_t group;
  std::int64_t begin;
  std::int64_t end;
};

/// A work item: a tile of the owner side, for a KV head and the query heads that share it.
struct Item {
  std::int64_t batch;
  std::int64_t kv_head;
  Segment segments[kRank];
  bool owns_additional;  ///< True if the item owns additional keys: segments[2] is then a range of them.
  float* table_sums;     ///< [query heads of kv_head][entries]: the item adds its relative-bias gradients here.
};

struct LaneBlock;

/// An item's buffers in a thread's scratch memory.
struct Workspace {
  float* lanes_a;        ///< [blocks][head_dim][kLanes]: queries or keys.
  float* lanes_b;        ///< [blocks][head_dim_v][kLanes]: output cotangents or values.
  float* sums_a;         ///< [blocks][head_dim][kLanes]: gradient of lanes_a.
  float* sums_b;         ///< [blocks][head_dim_v][kLanes]: output, or gradient of lanes_b.
  float* statistics;     ///< [blocks][kStatistics][kLanes]: see kStatistics.
  LaneBlock* blocks;     ///< [blocks].
  float* logits;         ///< [rows][kLanes]: logits, later replaced by weights or gradients.
  float* products;       ///< [rows][kLanes]: output cotangents times values, later replaced by gradients of the logits.
  const float** rows_a;  ///< [rows]: addresses of rows of head_dim elements.
  const float** rows_b;  ///< [rows]: addresses of rows of head_dim_v elements.
  float* row_values;     ///< [kStatistics][rows]: QueryValues of streamed queries.
  float* table;          ///< [query heads of an item][entries]: relative-bias gradients of this item.
  float* packed_a;       ///< [rows][head_dim]: stream rows that were converted to float.
  float* packed_b;       ///< [rows][head_dim_v]: stream rows that were converted to float.
  float* lines;          ///< [kLanes][larger head_dim]: rows of the lanes before or after a transpose.
  std::size_t bytes;     ///< Total size of the buffers, in bytes.
};

/// One pass of one call, divided into items.
struct Plan {
  Problem problem;
  Arrays arrays;
  Pass pass;
  /// Table of relative biases, for the windows of the call. Batch entries may have smaller windows.
  OffsetTable offsets;
  std::int64_t lane_box[kRank];     ///< Tokens per dimension of a lane block.
  std::int64_t lane_heads;          ///< Number of query heads that share a lane block; 1 if the pass owns keys.
  std::int64_t stream_tile[kRank];  ///< Tokens per dimension of a stream tile.
  std::int64_t stream_tokens;       ///< Number of stream rows that scratch memory has space for.
  std::vector<Segment> segments[kRank];
  std::vector<Segment> additional_segments;  ///< Segments of additional keys; empty unless the pass owns keys.
  std::size_t lane_blocks;                   ///< Maximum number of lane blocks of an item.

  std::int64_t items() const;
  Item item(std::int64_t index) const;

  /// Buffers of an item in scratch memory. If `scratch` is null, sets only `bytes`.
  Workspace workspace(std::byte* scratch) const;
};

/// Divides a pass into items, each of which owns a tile of the owner side.
Plan make_plan(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass);

}  // namespace natten_jax::cpu
