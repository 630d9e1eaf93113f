// Division of an attention pass into independent work items.
//
// A pass has an owner side and a stream side. In the forward and query-gradient passes an item owns a tile of queries
// and streams the keys that they see; in the key/value-gradient pass it owns a tile of keys and streams the queries
// that see them. Every result element has one owner, so no pass needs atomics and results do not depend on the number
// of threads.
//
// Inside an item, tokens of the owner side lie in vector lanes: kLanes of them form a lane block, a small box chosen so
// that the union of its windows is little larger than a window. Stream tokens are visited row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "natten_jax/arrays.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::cpu {

inline constexpr int kLanes = 16;

/// Values per owner in addition to its vectors: maximum and sum of a query's softmax and the factor of its logits;
/// QueryValues of the backward passes; or a key's bias and its gradient.
inline constexpr int kStatistics = 5;

/// Padding after the rows of a stream tile, so that micro-kernels may process whole groups of rows.
inline constexpr std::int64_t kRowPadding = 16;

/// Minimum number of rows in scratch, for additional keys with small tiles.
inline constexpr std::int64_t kMinStreamRows = 64;

enum class Pass { kForward, kQueryGradient, kKeyValueGradient };

/// A run of owned tokens of one dilation group along one dimension.
struct Segment {
  std::int64_t group;
  std::int64_t begin;
  std::int64_t end;
};

/// One work item: the owned tile, of one KV head and its query heads.
struct Item {
  std::int64_t batch;
  std::int64_t kv_head;
  Segment segments[kRank];
  bool owns_additional;  ///< True if the last segment counts additional keys instead of layout tokens.
  float* table_sums;     ///< [query heads of kv_head][entries]: sums of the gradients of relative biases.
};

struct LaneBlock;

/// An item's buffers in a thread's scratch memory.
struct Workspace {
  float* lanes_a;        ///< [blocks][head_dim][kLanes]: queries or keys.
  float* lanes_b;        ///< [blocks][head_dim_v][kLanes]: output cotangents or values.
  float* sums_a;         ///< [blocks][head_dim][kLanes]: gradient of lanes_a.
  float* sums_b;         ///< [blocks][head_dim_v][kLanes]: output, or gradient of lanes_b.
  float* statistics;     ///< [blocks][kStatistics][kLanes].
  LaneBlock* blocks;     ///< [blocks].
  float* logits;         ///< [rows][kLanes].
  float* products;       ///< [rows][kLanes].
  const float** rows_a;  ///< [rows]: rows of head_dim elements.
  const float** rows_b;  ///< [rows]: rows of head_dim_v elements.
  float* row_values;     ///< [kStatistics][rows]: QueryValues of streamed queries.
  float* table;          ///< [query heads of an item][entries]: the item's gradients of relative biases.
  float* packed_a;       ///< [rows][head_dim].
  float* packed_b;       ///< [rows][head_dim_v].
  float* lines;          ///< [kLanes][larger head_dim].
  std::size_t bytes;     ///< Size of all buffers.
};

/// One pass of one call, divided into items.
struct Plan {
  Problem problem;
  Arrays arrays;
  Pass pass;
  OffsetTable offsets;              ///< Relative biases: for whole windows, even if an entry's windows are smaller.
  std::int64_t lane_box[kRank];     ///< Tokens per dimension of a lane block.
  std::int64_t lane_heads;          ///< Query heads of a group that share a lane block; 1 if keys are owned.
  std::int64_t stream_tile[kRank];  ///< Stream tokens that are visited at a time.
  std::int64_t stream_tokens;       ///< Number of rows in scratch.
  std::vector<Segment> segments[kRank];
  std::vector<Segment> additional_segments;  ///< Segments of additional keys; empty unless this pass owns them.
  std::size_t lane_blocks;                   ///< Maximum per item.

  std::int64_t items() const;
  Item item(std::int64_t index) const;

  /// Buffers of an item in scratch memory. With a null `scratch`, only their size.
  Workspace workspace(std::byte* scratch) const;
};

/// Divides a pass into items; an item processes a tile of the owner side.
Plan make_plan(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass);

}  // namespace natten_jax::cpu
