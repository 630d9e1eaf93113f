// Shared memory layout of a relative bias in kernels with a ring: tables of products whose lines go across strips,
// padded to avoid bank conflicts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/small/bias_lines.h"
#include "cuda/small/ring_shape.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Bytes of an entry.
inline constexpr int kRingEntryBytes = 4;

/// Returns the entries of a line: the shortest line with the fewest bank conflicts.
inline int ring_bias_line(const Problem& problem, const RingShape& shape) {
  constexpr std::int64_t kBanks = 32;
  const OffsetTable offsets = offset_table(problem.axes);
  const auto& order = shape.dimension;
  // Columns of half a block.
  const std::int64_t wide = shape.wide, high = kColumns / wide;
  const int next = shape.thick > 1 ? 2 : 1;
  std::int64_t rows[kRank], columns[kRank], pitch[kRank];
  for (int i = 0; i < kRank; ++i) {
    rows[order[i]] = shape.rows[i];
    columns[order[i]] = i == 0 ? wide : i == next ? high : 1;
  }
  const std::int64_t own = 2 * offsets.reach[order[0]] + 1;
  std::int64_t best = own;
  int least = std::numeric_limits<int>::max();
  for (std::int64_t line = own; line < own + kBanks && least > 1; ++line) {
    pitch[order[0]] = 1;
    pitch[order[1]] = line;
    pitch[order[2]] = line * (2 * offsets.reach[order[1]] + 1);
    const int reads = reads_of_warp(pitch, rows, columns, order);
    if (reads >= least) continue;
    least = reads;
    best = line;
  }
  return static_cast<int>(best);
}

/// Shared memory layout of the tables, for several consecutive units of a CTA: its warps synchronize once for all of
/// them, so that fast warps seldom wait for slow ones.
struct RingBias {
  int entries;             ///< Entries of a table.
  int tables;              ///< Tables that are resident at once.
  int pitch[kRank];        ///< Distance in bytes between consecutive offsets, by dimensions of the shape; along the
                           ///< first one, the size of an entry.
  int given_pitch[kRank];  ///< As `pitch`, by dimensions of the problem.
  int first;               ///< Bytes before the first table, read only by hidden pairs,
  int center;              ///< and bytes to its entry of offset zero.
  int next_row;            ///< Distance in bytes between the entries of a lane's two rows,
  int next_half;           ///< in the opposite direction between the entries of a block's two halves,
  int next_block, next_group, next_slab;  ///< and between blocks, groups, slabs.
  int bytes;                              ///< Total size, including the margins on both sides that hidden pairs read.

  RingBias() = default;
  RingBias(const Axis (&axes)[kRank], const RingShape& shape, Kernel kernel) {
    // Five tables of 13 x 13 windows take 12.5 kB; a slab of queries and dO takes up to 30 kB.
    constexpr std::int64_t kMostTables = 5, kBytesOfTables = 14 * 1024;
    const OffsetTable offsets = offset_table(axes);
    // Extent of the blocks that a warp multiplies, whether or not its rows see them; and of a slab along the strip.
    const RingForm form = kernel == Kernel::kKeyValueGradient ? RingForm{1, 1} : kRingForms[shape.form];
    const int high = kBlockKeys / shape.wide,
              extent[kRank] = {form.groups * shape.wide, shape.thick > 1 ? 1 : form.inner * high, shape.thick};
    std::int64_t all = 1, margin = 0, zero = 0;
    for (int i = 0; i < kRank; ++i) {
      const std::int64_t reach = offsets.reach[shape.dimension[i]];
      margin += (shape.rows[i] + extent[i] - 2) * all;
      zero += reach * all;
      pitch[i] = given_pitch[shape.dimension[i]] = static_cast<int>(kRingEntryBytes * all);
      all *= i == 0 ? shape.bias_line : 2 * reach + 1;
    }
    entries = static_cast<int>(all);
    tables = static_cast<int>(std::clamp<std::int64_t>(kBytesOfTables / (kRingEntryBytes * all), 1, kMostTables));
    first = static_cast<int>(kRingEntryBytes * margin);
    center = static_cast<int>(kRingEntryBytes * (margin + zero));
    bytes = static_cast<int>(kRingEntryBytes * (2 * margin + tables * all));
    // A lane's two rows are half of the tile's rows apart, along the last dimension with several rows.
    const int divided = shape.rows[2] > 1 ? 2 : shape.rows[1] > 1 ? 1 : 0;
    next_row = shape.rows[divided] / 2 * pitch[divided];
    next_half = high / 2 * pitch[shape.thick > 1 ? 2 : 1];
    next_block = high * pitch[1];
    next_group = shape.wide * pitch[0];
    next_slab = shape.thick * pitch[2];
  }
};

}  // namespace natten_jax::small
