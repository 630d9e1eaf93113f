// A relative bias as kernels with a ring have it in shared memory: tables in products, whose lines go across strips,
// and are long enough for a warp's lanes.
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

/// Entries of a line: the fewest with which lanes wait least.
inline int ring_bias_line(const Problem& problem, const RingShape& shape) {
  constexpr std::int64_t kBanks = 32;
  const OffsetTable offsets = offset_table(problem.axes);
  const auto& order = shape.dimension;
  // Columns of a block's half.
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

/// Where tables lie: those of several units that a CTA goes over, one behind the other. Its warps meet once for all of
/// them, and those that are ahead wait then for those that are behind.
struct RingBias {
  int entries;             ///< Entries of a table.
  int tables;              ///< Tables that are there at once.
  int pitch[kRank];        ///< Bytes from one offset to the next, by dimensions of the shape: the first has entries'.
  int given_pitch[kRank];  ///< The same by dimensions of the problem.
  int first;               ///< Bytes before the first table, which only hidden pairs read,
  int center;              ///< and to its entry of offset zero.
  int next_row;            ///< Bytes from the entries of a lane's first row to those of its second,
  int next_half;           ///< and from those of a block's first half back to those of its second.
  int next_block, next_group, next_slab;  ///< Likewise.
  int bytes;                              ///< All tables, and on both sides what hidden pairs read.

  RingBias() = default;
  RingBias(const Axis (&axes)[kRank], const RingShape& shape, Kernel kernel) {
    // Five tables of 13 x 13 windows take 12.5 kB, a slab of queries and cotangents up to 30.
    constexpr std::int64_t kMostTables = 5, kBytesOfTables = 14 * 1024;
    const OffsetTable offsets = offset_table(axes);
    // What a slab extends to, and a block, or all blocks that a warp multiplies whether its rows see them or not.
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
    // Half of the rows: the last dimension that has several is divided.
    const int divided = shape.rows[2] > 1 ? 2 : shape.rows[1] > 1 ? 1 : 0;
    next_row = shape.rows[divided] / 2 * pitch[divided];
    next_half = high / 2 * pitch[shape.thick > 1 ? 2 : 1];
    next_block = high * pitch[1];
    next_group = shape.wide * pitch[0];
    next_slab = shape.thick * pitch[2];
  }
};

}  // namespace natten_jax::small
