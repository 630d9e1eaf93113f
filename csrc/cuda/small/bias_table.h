// Layout of a head's relative bias in the kernels for small windows, and of the sums for its gradient.
//
// A tile of queries adds up its logit gradients by offset in a record: a box of the table that begins, along each
// dimension, at the smallest offset of any of its queries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/small/bias_lines.h"
#include "cuda/small/forms.h"
#include "natten_jax/arrays.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// The widest heads for which kernels with a relative bias or key biases are compiled.
inline constexpr int kLargestBiasedHeadDim = 64;

/// Bytes of a table entry, and of a logit gradient that is added up for it.
inline constexpr int kBytesOfEntry = 4, kBytesOfSum = 2;

/// Maximum table entries: kernels store their byte offsets in 16 bits.
inline constexpr std::int64_t kMostBiasEntries = 1 << 13;
inline constexpr int kEntryBits = 16;

/// Tables in memory are padded to chunks of 16 bytes.
inline constexpr int kEntriesOfChunk = 4;

/// Records are padded to multiples of this, the columns of two matrices of an MMA operand. After each record comes its
/// header: a chunk with the tile's smallest offsets.
inline constexpr int kRecordStep = 16;
inline constexpr int kRecordHeader = 4;

/// Tiles whose records one CTA adds up.
inline constexpr int kTilesOfSum = 32;

/// Distance in bytes between rows of logit gradients: eight consecutive rows lie in different banks.
NATTEN_JAX_HOST_DEVICE constexpr int bytes_of_sums_row(int record) {
  return kBytesOfSum * record + 16;
}
constexpr int bytes_of_sums(int record) {
  return kRows * bytes_of_sums_row(record);
}

/// Layout of a problem's table in kernels with the given tile shapes. Lines are padded.
struct BiasTable {
  std::int64_t pitch[kRank];  ///< Distance in entries between consecutive offsets.
  std::int64_t entries;       ///< All entries, padded to chunks.
  std::int64_t gradients;     ///< Entries of the gradient, without padding of lines, but padded to chunks.

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

/// Returns the number of relative bias tables to add to products of queries and keys: one per batch entry, or a single
/// one if entries share the table and the scale is not per head.
inline std::int64_t tables_of_products(const Problem& problem, const Arrays& arrays) {
  return arrays.relative_bias_tables == 1 && problem.scale.heads == nullptr ? 1 : problem.batch;
}

/// Returns the number of offsets along a dimension from `queries` consecutive queries to the keys that they see.
inline std::int64_t offsets_of_tile(const Window& window, std::int64_t queries) {
  const std::int64_t all = 2 * window.kernel_size - 1;
  // At the ends of a layout, windows shift by one token per query relative to their queries.
  return window.stride == 1 ? std::min(window.kernel_size + queries - 1, all) : all;
}

/// Layout of a tile's offsets in its record: offsets along the fastest dimension are consecutive. Every line begins at
/// an even number, because kernels store the 16-bit logit gradients of two numbers as one word.
struct RecordLayout {
  std::int64_t extent[kRank];  ///< Offsets.
  std::int64_t pitch[kRank];   ///< Distance in numbers between consecutive offsets.
  std::int64_t numbers;

  RecordLayout(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank], int fastest) {
    std::int64_t others = 1;
    for (int d = kRank - 1; d >= 0; --d) extent[d] = offsets_of_tile(axes[d].window, tile[d]);
    // Kernels may write zeros for hidden columns past a line's ends; no row sees both ends of a line.
    const std::int64_t line = divide_up(std::max(extent[fastest], axes[fastest].window.kernel_size + 1), 2) * 2;
    for (int d = kRank - 1; d >= 0; --d) {
      pitch[d] = d == fastest ? 1 : line * others;
      if (d != fastest) others *= extent[d];
    }
    // Plus 1, because late rows (TilePlan::late_rows) are stored one number later.
    numbers = divide_up((others - 1) * line + extent[fastest] + 1, kRecordStep) * kRecordStep;
  }
};

/// Sizes of the sums for the gradient, per batch entry and head.
struct BiasSums {
  std::int64_t tiles;   ///< All tiles of the layout, including tiles without queries.
  std::int64_t record;  ///< Numbers of a tile's record and its header.
  std::int64_t parts;   ///< Parts of the tiles: one CTA adds up the records of a part.
};

/// Returns the number of query tiles along a dimension, over all dilation groups.
inline std::int64_t query_tiles(const Axis& axis, std::int64_t tile) {
  const std::int64_t dilation = axis.window.dilation;
  return dilation * divide_up(divide_up(axis.query.local_extent, dilation), tile);
}

/// Returns the numbers of a record: the maximum over all possible fastest dimensions of a group of columns.
inline std::int64_t most_numbers(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank],
                                 const std::int64_t (&group)[kRank]) {
  std::int64_t result = 0;
  for (int d = 0; d < kRank; ++d) {
    if (group[d] > 1) result = std::max(result, RecordLayout(axes, tile, d).numbers);
  }
  return result;
}

/// Returns the sizes of the sums.
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
