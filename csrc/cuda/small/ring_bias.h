// Shared memory layout of a relative bias in kernels with a ring (ring_shape.h). A table has an entry per offset of a
// key from a query: the bias, converted to a term of products of queries and keys. The entries of consecutive offsets
// in dimension 0 of the shape form a line. Lines are padded to avoid bank conflicts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/small/bias_lines.h"
#include "cuda/small/ring_shape.h"
#include "natten_jax/offset_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Bytes of a table entry.
inline constexpr int kRingEntryBytes = 4;

/// Returns the number of entries of a line, including padding. It is the smallest number with the fewest bank
/// conflicts.
inline int ring_bias_line(const Problem& problem, const RingShape& shape) {
  constexpr std::int64_t kBanks = 32;
  const OffsetTable offsets = offset_table(problem.axes);
  const auto& order = shape.dimension;
  // Extents of half a block: `wide` columns in dimension 0 of the shape, and `high` columns in dimension `next`.
  const std::int64_t wide = shape.wide, high = kColumns / wide;
  const int next = shape.thick > 1 ? 2 : 1;
  std::int64_t rows[kRank], columns[kRank], pitch[kRank];
  for (int i = 0; i < kRank; ++i) {
    rows[order[i]] = shape.rows[i];
    columns[order[i]] = i == 0 ? wide : i == next ? high : 1;
  }
  const std::int64_t shortest = 2 * offsets.reach[order[0]] + 1;
  std::int64_t best = shortest;
  int least = std::numeric_limits<int>::max();
  for (std::int64_t line = shortest; line < shortest + kBanks && least > 1; ++line) {
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

/// Shared memory layout of the tables. There are several tables, for consecutive units (RingUnit) of a CTA. The CTA's
/// warps synchronize once for all of these units, so that fast warps seldom wait for slow ones.
struct RingBias {
  int entries;             ///< Number of entries of a table.
  int tables;              ///< Number of tables in shared memory.
  int pitch[kRank];        ///< For each dimension of the shape: distance in bytes between the entries of
                           ///< consecutive offsets. In dimension 0, it is the size of an entry.
  int given_pitch[kRank];  ///< For each dimension of the problem: the distance in `pitch`.
  int first;               ///< Byte offset of the first table. Warps read the margin before it only for hidden (masked
                           ///< out) pairs of a query and a key.
  int center;              ///< Byte offset of the first table's entry for offset zero.
  // Distances in bytes between the entries for the lane's two rows (`next_row`), for the two halves of a block, and for
  // consecutive blocks, groups and slabs. If rows are keys, kernels add `next_row` and subtract the other distances. If
  // rows are queries, they subtract `next_row` and add the other distances.
  int next_row;
  int next_half;
  int next_block, next_group, next_slab;
  int bytes;  ///< Bytes of all tables and of the margins before and after them.

  RingBias() = default;
  RingBias(const Axis (&axes)[kRank], const RingShape& shape, Kernel kernel) {
    // For windows of 13 x 13, five tables take 12.5 kB. For comparison, a slab of queries and dO takes up to 30 kB.
    constexpr std::int64_t kMostTables = 5, kBytesOfTables = 14 * 1024;
    const OffsetTable offsets = offset_table(axes);
    // Extents in columns. In dimensions 0 and 1: extents of the part of a slab that a warp multiplies, including
    // columns that none of its rows sees. In dimension 2: extent of a slab.
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
    // In the last dimension in which a tile has several rows, the lane's two rows are half a tile apart.
    const int divided = shape.rows[2] > 1 ? 2 : shape.rows[1] > 1 ? 1 : 0;
    next_row = shape.rows[divided] / 2 * pitch[divided];
    next_half = high / 2 * pitch[shape.thick > 1 ? 2 : 1];
    next_block = high * pitch[1];
    next_group = shape.wide * pitch[0];
    next_slab = shape.thick * pitch[2];
  }
};

}  // namespace natten_jax::small
