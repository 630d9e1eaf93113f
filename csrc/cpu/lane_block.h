// Owner tokens in the vector lanes of a block, and the stream tokens that they see: a query sees the keys of its
// window, and a key sees the queries whose windows contain it. The types do not depend on the instruction set.
#pragma once

#include <cstdint>

#include "cpu/plan.h"

namespace natten_jax::cpu {

/// Box of tokens of a dilation group: a half-open range of group indices per dimension.
struct Box {
  std::int64_t begin[kRank];
  std::int64_t end[kRank];

  bool empty() const { return end[0] <= begin[0] || end[1] <= begin[1] || end[2] <= begin[2]; }
};

/// Indices of existing tokens along a dimension. If the dimension wraps, the layout repeats, and the range `tokens`
/// repeats with its period.
struct Repetition {
  Range<std::int64_t> tokens;
  std::int64_t period;  ///< 0 if the dimension does not wrap. Every index is then the index of an existing token.

  /// Distance from `tokens` to the last repetition that begins at or before `index`.
  std::int64_t shift(std::int64_t index) const {
    if (period == 0) return 0;
    const std::int64_t from_first = index - tokens.begin;
    return (from_first >= 0 ? from_first / period : -((period - 1 - from_first) / period)) * period;
  }

  /// Smallest index of a token that is at least `index`.
  std::int64_t next(std::int64_t index) const {
    if (period == 0 || index - shift(index) < tokens.end) return index;
    return tokens.begin + shift(index) + period;
  }

  /// End of the contiguous tokens that begin with the token at `index`, or `end` if `end` is smaller.
  std::int64_t row_end(std::int64_t index, std::int64_t end) const {
    return period == 0 ? end : smaller(end, tokens.end + shift(index));
  }
};

/// Memory layout of the queries or keys of a dilation group. The row of a token is `offset` plus the sum of index times
/// `pitch` over the dimensions.
struct TokenMap {
  std::int64_t offset;
  std::int64_t pitch[kRank];
  Repetition repeated[kRank];

  /// Row of the token with the given group indices.
  std::int64_t row(const std::int64_t (&index)[kRank]) const {
    std::int64_t sum = offset;
    for (int dim = 0; dim < kRank; ++dim) sum += (index[dim] - repeated[dim].shift(index[dim])) * pitch[dim];
    return sum;
  }
};

struct alignas(64) LaneBlock {
  /// [dimension][lane]: half-open range of stream indices that the lane sees.
  std::int32_t first[kRank][kLanes];
  std::int32_t last[kRank][kLanes];
  /// Row of each lane in the array of the owner side: (batch * tokens + token) * heads + head. Unused lanes have the
  /// row of lane 0.
  std::int64_t row[kLanes];
  /// Query head of each lane, counted from the first query head that shares the keys; 0 if the lanes hold keys.
  std::int32_t head[kLanes];
  /// Index of each lane's relative-bias entry for the first token of `hull`. Index 0 is the first entry in the table of
  /// the first query head that shares the keys. Not set without relative biases.
  std::int32_t bias_index[kLanes];
  int active;  ///< Number of lanes whose results are stored.
  Box hull;    ///< Bounding box of all tokens that at least one lane sees.
  Box core;    ///< Tokens that all lanes see.
};

/// Creates the lane blocks of an item.
///
/// Args:
///   plan: plan of the pass.
///   item: the work item.
///   blocks: the result; has space for `plan.lane_blocks` blocks.
///
/// Returns:
///   The number of blocks.
std::int64_t make_lane_blocks(const Plan& plan, const Item& item, LaneBlock* blocks);

/// Bounding box of the hulls of the blocks.
Box enclosing_hull(const LaneBlock* blocks, std::int64_t count);

/// Distance, in entries, between the relative biases of an owner token for two neighboring stream tokens, per
/// dimension. Negative if queries are streamed.
void table_pitch(const Plan& plan, std::int64_t (&pitch)[kRank]);

/// Memory layout of the tokens that an item streams. It does not include the offsets of the batch entry and the head.
TokenMap stream_tokens(const Plan& plan, const Item& item);

}  // namespace natten_jax::cpu
