// Layouts of a head's relative bias, and of the sums for its gradient, in the kernels for small windows.
//
// The logit gradients of a tile of queries are added up by offset in a record. A record covers a box of the offsets in
// the table. Along each dimension, the box begins at the smallest offset from a query of the tile to a key that it
// attends to (sees).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/small/bias_lines.h"
#include "cuda/small/forms.h"
#include "natten_jax/arrays.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Maximum head dimension for which kernels with a relative bias or key biases are compiled.
inline constexpr int kLargestBiasedHeadDim = 64;

/// Size in bytes of a table entry (kBytesOfEntry), and of a logit gradient that is added up for the gradient of an
/// entry (kBytesOfSum).
inline constexpr int kBytesOfEntry = 4, kBytesOfSum = 2;

/// Maximum number of table entries. It is limited because kernels store the byte offset of an entry in 16 bits.
inline constexpr std::int64_t kMostBiasEntries = 1 << 13;
inline constexpr int kEntryBits = 16;

/// Number of entries in a chunk of 16 bytes. Tables in memory are padded to whole chunks.
inline constexpr int kEntriesOfChunk = 4;

/// Records are padded to a multiple of kRecordStep numbers. This is the number of columns in two 8x8 matrices of an MMA
/// operand. A record is followed by a header of kRecordHeader numbers, which contain the tile's smallest offset along
/// each dimension.
inline constexpr int kRecordStep = 16;
inline constexpr int kRecordHeader = 4;

/// Number of tiles whose records one CTA adds up.
inline constexpr int kTilesOfSum = 32;

/// Distance in bytes between consecutive rows of logit gradients. It is padded by 16 bytes, so that eight consecutive
/// rows lie in different banks.
NATTEN_JAX_HOST_DEVICE constexpr int bytes_of_sums_row(int record) {
  return kBytesOfSum * record + 16;
}
constexpr int bytes_of_sums(int record) {
  return kRows * bytes_of_sums_row(record);
}

/// Layout of a problem's table in kernels with tiles of shape `rows` and groups of shape `columns`. Lines are padded
/// (`entries_of_line`).
struct BiasTable {
  std::int64_t pitch[kRank];  ///< Distance in entries between consecutive offsets along each dimension.
  std::int64_t entries;       ///< Number of entries, including padding of lines and of the last chunk.
  std::int64_t gradients;     ///< Number of entries of the gradient, padded to chunks. Its lines are not padded.

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

/// Returns the number of tables per head that are added to products of queries and keys. It is 1 if batch entries share
/// the relative bias and the scale is not per head. Otherwise it is the number of batch entries.
inline std::int64_t tables_of_products(const Problem& problem, const Arrays& arrays) {
  return arrays.relative_bias_tables == 1 && problem.scale.heads == nullptr ? 1 : problem.batch;
}

/// Returns the number of offsets along a dimension from `queries` consecutive queries to the keys that they attend to.
inline std::int64_t offsets_of_tile(const Window& window, std::int64_t queries) {
  const std::int64_t all = 2 * window.kernel_size - 1;
  // At the ends of a layout, consecutive queries have the same window, so the smallest offset changes by 1 per query.
  return window.stride == 1 ? std::min(window.kernel_size + queries - 1, all) : all;
}

/// Layout of a tile's record, which contains a number per offset. Offsets along dimension `fastest` are consecutive and
/// form a line. Every line begins at an even index, because kernels store the 16-bit logit gradients for two
/// consecutive numbers as one word.
struct RecordLayout {
  std::int64_t extent[kRank];  ///< Number of offsets along each dimension.
  std::int64_t pitch[kRank];   ///< Distance in numbers between consecutive offsets along each dimension.
  std::int64_t numbers;

  RecordLayout(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank], int fastest) {
    std::int64_t others = 1;
    for (int d = kRank - 1; d >= 0; --d) extent[d] = offsets_of_tile(axes[d].window, tile[d]);
    // For columns that are masked out, kernels may write a zero past an end of a line, which overwrites a number of the
    // next or previous line. This is harmless, because a line is longer than a window: a row that uses one end of the
    // lines does not use their other end.
    const std::int64_t line = divide_up(std::max(extent[fastest], axes[fastest].window.kernel_size + 1), 2) * 2;
    for (int d = kRank - 1; d >= 0; --d) {
      pitch[d] = d == fastest ? 1 : line * others;
      if (d != fastest) others *= extent[d];
    }
    // The size includes one more number, because late rows (TilePlan::late_rows) are stored one number later.
    numbers = divide_up((others - 1) * line + extent[fastest] + 1, kRecordStep) * kRecordStep;
  }
};

/// Sizes of the sums for the gradient, per batch entry and head.
struct BiasSums {
  std::int64_t tiles;   ///< Number of query tiles of the layout, including tiles without queries.
  std::int64_t record;  ///< Size of a tile's record and its header, in numbers.
  std::int64_t parts;   ///< Number of parts into which the tiles are divided. A CTA adds up the records of a part.
};

/// Returns the number of query tiles along a dimension, over all dilation groups.
inline std::int64_t query_tiles(const Axis& axis, std::int64_t tile) {
  const std::int64_t dilation = axis.window.dilation;
  return dilation * divide_up(divide_up(axis.query.local_extent, dilation), tile);
}

/// Returns the maximum size of a record, in numbers. The fastest dimension may be any dimension along which a group of
/// columns extends.
inline std::int64_t most_numbers(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank],
                                 const std::int64_t (&group)[kRank]) {
  std::int64_t result = 0;
  for (int d = 0; d < kRank; ++d) {
    if (group[d] > 1) result = std::max(result, RecordLayout(axes, tile, d).numbers);
  }
  return result;
}

/// Returns the sizes of the sums for the gradient.
///
/// Args:
///   axes: the layout.
///   tile, group: shapes of a tile of queries and of a group of keys.
inline BiasSums bias_sums(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank],
                          const std::int64_t (&group)[kRank]) {
  BiasSums result{1, most_numbers(axes, tile, group) + kRecordHeader, 0};
  for (int d = 0; d < kRank; ++d) result.tiles *= query_tiles(axes[d], tile[d]);
  result.parts = divide_up(result.tiles, kTilesOfSum);
  return result;
}

}  // namespace natten_jax::small
