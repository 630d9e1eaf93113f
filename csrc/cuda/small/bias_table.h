// A head's relative bias as the kernels for small windows have it, and where the sums for its gradient lie.
//
// A tile of queries sums up the gradients of its logits, offset by offset, in a record: the entries of the table that
// lie in a row, from the least offset along the table's slowest dimension on that any of its queries has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/small/forms.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// The widest heads that kernels with a relative bias are compiled for.
inline constexpr int kLargestBiasedHeadDim = 64;

/// The most entries, of which kernels count some times as many in the bits that are left of a word.
inline constexpr std::int64_t kMostBiasEntries = 1 << 13;

/// Tables in memory are filled up to chunks of 16 bytes.
inline constexpr int kEntriesOfChunk = 4;

/// Numbers of a record are counted in columns of two matrices; behind them is a chunk that begins with the number of
/// the first entry.
inline constexpr int kRecordStep = 16;
inline constexpr int kRecordHeader = kEntriesOfChunk;

/// Tiles whose records a CTA adds up.
inline constexpr int kTilesOfSum = 32;

/// Bits of a word that say where a pair of groups lies in a stage; those above count entries of the table.
inline constexpr int kOffsetBits = 18, kEntryBits = 32 - kOffsetBits;

/// Bytes between rows of gradients of logits: eight of them lie in different banks.
NATTEN_JAX_HOST_DEVICE constexpr int bytes_of_sums_row(int record) {
  return 2 * record + 16;
}
constexpr int bytes_of_sums(int record) {
  return kRows * bytes_of_sums_row(record);
}

/// What a problem's table is like; all numbers are counted in entries.
struct BiasTable {
  OffsetTable offsets;
  std::int64_t padded;  ///< Entries in memory.
  int slowest;          ///< The dimension.

  explicit BiasTable(const Axis (&axes)[kRank])
      : offsets(offset_table(axes)), padded(divide_up(offsets.entries, kEntriesOfChunk) * kEntriesOfChunk) {
    slowest = 0;
    while (slowest < kRank - 1 && offsets.reach[slowest] == 0) ++slowest;
  }

  /// Numbers of the record of a tile with so many queries along the slowest dimension.
  std::int64_t record(const Window& window, std::int64_t queries) const {
    const std::int64_t all = 2 * offsets.reach[slowest] + 1;
    // Windows shift against their queries by one token for each at the ends of a layout.
    const std::int64_t seen = window.stride == 1 ? std::min(window.kernel_size + queries - 1, all) : all;
    return divide_up(seen * offsets.pitch[slowest], kRecordStep) * kRecordStep;
  }
};

/// What the sums take, of each batch entry and head.
struct BiasSums {
  std::int64_t tiles;    ///< All of the layout's, those among them that have no queries.
  std::int64_t numbers;  ///< Of a tile: the record and its header.
  std::int64_t parts;    ///< Of the tiles, whose records one CTA adds up.
};

/// Tiles of queries along a dimension, in all dilation groups.
inline std::int64_t query_tiles(const Axis& axis, std::int64_t tile) {
  const std::int64_t dilation = axis.window.dilation;
  return dilation * divide_up(divide_up(axis.query.local_extent, dilation), tile);
}

inline BiasSums bias_sums(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank]) {
  const BiasTable table(axes);
  BiasSums result{1, 0, 0};
  for (int d = 0; d < kRank; ++d) result.tiles *= query_tiles(axes[d], tile[d]);
  result.numbers = table.record(axes[table.slowest].window, tile[table.slowest]) + kRecordHeader;
  result.parts = divide_up(result.tiles, kTilesOfSum);
  return result;
}

}  // namespace natten_jax::small
