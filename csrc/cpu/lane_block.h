// Owner tokens in the lanes of one vector block, and the stream tokens that they see. Plain data for every ISA.
#pragma once

#include <cstdint>

#include "cpu/plan.h"

namespace natten_jax::cpu {

/// A box of tokens, as group indices.
struct Box {
  std::int64_t begin[kRank];
  std::int64_t end[kRank];

  bool empty() const { return end[0] <= begin[0] || end[1] <= begin[1] || end[2] <= begin[2]; }
};

/// Existing tokens along a dimension that wraps: a range of indices, repeated with a period.
struct Repetition {
  Range<std::int64_t> tokens;
  std::int64_t period;  ///< 0 if the dimension does not wrap: then all indices are token indices.

  /// Shift of the last repetition that begins at or before an index.
  std::int64_t shift(std::int64_t index) const {
    if (period == 0) return 0;
    const std::int64_t from_first = index - tokens.begin;
    return (from_first >= 0 ? from_first / period : -((period - 1 - from_first) / period)) * period;
  }

  /// First index at or after this one that is a token.
  std::int64_t next(std::int64_t index) const {
    if (period == 0 || index - shift(index) < tokens.end) return index;
    return tokens.begin + shift(index) + period;
  }

  /// End of the contiguous tokens from the token at an index on, at most `end`.
  std::int64_t row_end(std::int64_t index, std::int64_t end) const {
    return period == 0 ? end : smaller(end, tokens.end + shift(index));
  }
};

/// Memory layout of the tokens of one side's dilation group: token row = offset + sum of index * pitch.
struct TokenMap {
  std::int64_t offset;
  std::int64_t pitch[kRank];
  Repetition repeated[kRank];

  /// Row of the token at some indices.
  std::int64_t row(const std::int64_t (&index)[kRank]) const {
    std::int64_t sum = offset;
    for (int dim = 0; dim < kRank; ++dim) sum += (index[dim] - repeated[dim].shift(index[dim])) * pitch[dim];
    return sum;
  }
};

struct alignas(64) LaneBlock {
  /// Per dimension and lane, the range of stream indices that the lane sees.
  std::int32_t first[kRank][kLanes];
  std::int32_t last[kRank][kLanes];
  /// Each lane's row in the owner's array: (batch * tokens + token) * heads + head. Idle lanes repeat lane 0.
  std::int64_t row[kLanes];
  /// Query head of each lane, relative to the first head that shares its keys; 0 if keys are owned.
  std::int32_t head[kLanes];
  /// With relative biases, each lane's entry for the hull's first token, counted from the first head's table on.
  std::int32_t place[kLanes];
  int active;  ///< Lanes whose results are stored.
  Box hull;    ///< Smallest box that contains everything that a lane sees.
  Box core;    ///< Tokens that every lane sees.
};

/// Fills in the lane blocks of an item.
///
/// Args:
///   plan: plan of the pass.
///   item: the work item.
///   blocks: space for `plan.lane_blocks` blocks.
///
/// Returns:
///   The number of blocks.
std::int64_t make_lane_blocks(const Plan& plan, const Item& item, LaneBlock* blocks);

/// Smallest box around the hulls of the blocks.
Box enclosing_hull(const LaneBlock* blocks, std::int64_t count);

/// Distance in entries of a relative bias between pairs with neighboring stream tokens, along each dimension.
void table_pitch(const Plan& plan, std::int64_t (&pitch)[kRank]);

/// Memory layout of the tokens that an item streams, without batch and head.
TokenMap stream_tokens(const Plan& plan, const Item& item);

}  // namespace natten_jax::cpu
