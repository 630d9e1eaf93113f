// A head's relative bias as the kernels for small windows have it, and where the sums for its gradient lie.
//
// A tile of queries sums up the gradients of its logits, offset by offset, in a record: a box of the table, which
// begins at the least offset along each dimension that any of its queries has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/small/bias_lines.h"
#include "cuda/small/forms.h"
#include "natten_jax/arrays.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// The widest heads that kernels with a relative bias, or biases of keys, are compiled for.
inline constexpr int kLargestBiasedHeadDim = 64;

/// Bytes of an entry, and of a gradient of a logit that is added up for one.
inline constexpr int kBytesOfEntry = 4, kBytesOfSum = 2;

/// The most entries: kernels count their bytes in 16 bits.
inline constexpr std::int64_t kMostBiasEntries = 1 << 13;
inline constexpr int kEntryBits = 16;

/// Tables in memory are filled up to chunks of 16 bytes.
inline constexpr int kEntriesOfChunk = 4;

/// Numbers of a record are counted in columns of two matrices; behind them is a chunk that says where it begins.
inline constexpr int kRecordStep = 16;
inline constexpr int kRecordHeader = 4;

/// Tiles whose records a CTA adds up.
inline constexpr int kTilesOfSum = 32;

/// Bytes between rows of gradients of logits: eight of them lie in different banks.
NATTEN_JAX_HOST_DEVICE constexpr int bytes_of_sums_row(int record) {
  return kBytesOfSum * record + 16;
}
constexpr int bytes_of_sums(int record) {
  return kRows * bytes_of_sums_row(record);
}

/// A problem's table, as kernels with tiles of these shapes read it: what fills lines up is no offset's.
struct BiasTable {
  std::int64_t pitch[kRank];  ///< Entries from one offset to the next.
  std::int64_t entries;       ///< All of them, filled up to chunks.
  std::int64_t gradients;     ///< Those of its gradient, whose lines have one for each offset; likewise.

  BiasTable(const Axis (&axes)[kRank], const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank]) {
    const OffsetTable offsets = offset_table(axes);
    const auto filled_up = [](std::int64_t count) { return divide_up(count, kEntriesOfChunk) * kEntriesOfChunk; };
    const std::int64_t lines = offsets.pitch[0] / offsets.pitch[1], planes = 2 * offsets.reach[0] + 1;
    const std::int64_t line = entries_of_line(offsets.pitch[1], lines, rows, columns);
    pitch[0] = lines * line;
    pitch[1] = line;
    pitch[2] = 1;
    entries = filled_up(planes * pitch[0]);
    gradients = filled_up(offsets.entries);
  }
};

/// Tables of a relative bias in products of queries and keys: one for each batch entry, or one for all of them where
/// they have neither tables nor scales of their own.
inline std::int64_t tables_of_products(const Problem& problem, const Arrays& arrays) {
  return arrays.relative_bias_tables == 1 && problem.scale.heads == nullptr ? 1 : problem.batch;
}

/// Offsets along a dimension that a tile with so many queries has.
inline std::int64_t offsets_of_tile(const Window& window, std::int64_t queries) {
  const std::int64_t all = 2 * window.kernel_size - 1;
  // Windows shift against their queries by one token for each at the ends of a layout.
  return window.stride == 1 ? std::min(window.kernel_size + queries - 1, all) : all;
}

/// How the offsets of a tile lie in its record: those along one dimension follow each other, of which every line begins
/// in a word of two 16-bit numbers.
struct RecordLayout {
  std::int64_t extent[kRank];  ///< Offsets.
  std::int64_t pitch[kRank];   ///< Numbers from one to the next.
  std::int64_t numbers;

  RecordLayout(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank], int fastest) {
    std::int64_t others = 1;
    for (int d = kRank - 1; d >= 0; --d) extent[d] = offsets_of_tile(axes[d].window, tile[d]);
    // What is hidden beside a line's ends may be written with them, as zeros: nobody sees both ends of a line.
    const std::int64_t line = divide_up(std::max(extent[fastest], axes[fastest].window.kernel_size + 1), 2) * 2;
    for (int d = kRank - 1; d >= 0; --d) {
      pitch[d] = d == fastest ? 1 : line * others;
      if (d != fastest) others *= extent[d];
    }
    // Rows that begin in the middle of a word are one number further.
    numbers = divide_up((others - 1) * line + extent[fastest] + 1, kRecordStep) * kRecordStep;
  }
};

/// What the sums take, of each batch entry and head.
struct BiasSums {
  std::int64_t tiles;   ///< All of the layout's, those among them that have no queries.
  std::int64_t record;  ///< Numbers of a tile's, and of its header.
  std::int64_t parts;   ///< Parts of the tiles: one CTA adds up the records of each.
};

/// Tiles of queries along a dimension, in all dilation groups.
inline std::int64_t query_tiles(const Axis& axis, std::int64_t tile) {
  const std::int64_t dilation = axis.window.dilation;
  return dilation * divide_up(divide_up(axis.query.local_extent, dilation), tile);
}

/// Numbers of a record, whichever of the dimensions of a group of columns is the fastest.
inline std::int64_t most_numbers(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank],
                                 const std::int64_t (&group)[kRank]) {
  std::int64_t result = 0;
  for (int d = 0; d < kRank; ++d) {
    if (group[d] > 1) result = std::max(result, RecordLayout(axes, tile, d).numbers);
  }
  return result;
}

/// Args:
///   axes: the layout.
///   tile, group: shapes of a tile of queries, and of a group of keys.
inline BiasSums bias_sums(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank],
                          const std::int64_t (&group)[kRank]) {
  BiasSums result{1, most_numbers(axes, tile, group) + kRecordHeader, 0};
  for (int d = 0; d < kRank; ++d) result.tiles *= query_tiles(axes[d], tile[d]);
  result.parts = divide_up(result.tiles, kTilesOfSum);
  return result;
}

}  // namespace natten_jax::small
