// The owner tokens in the lanes of one vector block, and what each of them sees. Plain data for every ISA.
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

/// The tokens that there are along a dimension which wraps: a range of indices, that comes again after each period.
struct Repetition {
  Range<std::int64_t> tokens;
  std::int64_t period;  ///< 0 where the dimension does not wrap: then indices are those of tokens.

  /// How far the repetition that an index lies in, or behind, is from the tokens.
  std::int64_t shift(std::int64_t index) const {
    if (period == 0) return 0;
    const std::int64_t from_first = index - tokens.begin;
    return (from_first >= 0 ? from_first / period : -((period - 1 - from_first) / period)) * period;
  }

  /// The first index from this one on that is a token's.
  std::int64_t next(std::int64_t index) const {
    if (period == 0 || index - shift(index) < tokens.end) return index;
    return tokens.begin + shift(index) + period;
  }

  /// The end of the tokens that are in a row from that of an index on, at most `end`.
  std::int64_t row_end(std::int64_t index, std::int64_t end) const {
    return period == 0 ? end : smaller(end, tokens.end + shift(index));
  }
};

/// Where the tokens of one side's dilation group lie: token row = offset + sum of index * pitch.
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
  /// Each lane's query head, counted from the first of those that share its keys; 0 where keys are owned.
  std::int32_t head[kLanes];
  /// Where there are relative biases, each lane's entry for the first token of the hull, behind those of earlier heads.
  std::int32_t place[kLanes];
  int active;  ///< Lanes whose results are stored.
  Box hull;    ///< Smallest box around everything that a lane sees.
  Box core;    ///< What every lane sees.
};

/// Fills in the lane blocks of an item.
///
/// Args:
///   plan: the pass.
///   item: the work item.
///   blocks: room for as many as the plan's scratch memory has.
///
/// Returns:
///   How many there are.
std::int64_t make_lane_blocks(const Plan& plan, const Item& item, LaneBlock* blocks);

/// Smallest box around the hulls of the blocks.
Box enclosing_hull(const LaneBlock* blocks, std::int64_t count);

/// How many entries of a relative bias further the pairs of the next stream token along each dimension are.
void table_pitch(const Plan& plan, std::int64_t (&pitch)[kRank]);

/// Where the tokens that an item streams lie, without batch and head.
TokenMap stream_tokens(const Plan& plan, const Item& item);

}  // namespace natten_jax::cpu
