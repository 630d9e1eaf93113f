// Layout of the entries of a relative bias. There is one entry per offset from a query to a key within a window.
#pragma once

#include <algorithm>
#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of entries in the tables of all query heads that share keys and values. Kernels compute indices of
/// entries in 32 bits. An index may be a few times larger than this maximum, because kernels also compute indices for
/// pairs of tokens outside of every window. Such indices are outside of the tables.
inline constexpr std::int64_t kMostTableEntries = std::int64_t{1} << 25;

/// A head's table. Offsets are counted in steps of the dilation.
struct OffsetTable {
  std::int64_t reach[kRank];  ///< The largest offset along each dimension; the smallest is its negative.
  std::int64_t pitch[kRank];  ///< Distance in entries between consecutive offsets.
  std::int64_t entries;       ///< Number of entries; kMostTableEntries + 1 stands for all larger numbers.
};

inline OffsetTable offset_table(const Axis (&axes)[kRank]) {
  OffsetTable table{};
  table.entries = 1;
  for (int dim = kRank - 1; dim >= 0; --dim) {
    table.reach[dim] = axes[dim].window.kernel_size - 1;
    table.pitch[dim] = table.entries;
    // Both factors fit into 32 bits.
    table.entries = std::min(table.entries * (2 * table.reach[dim] + 1), kMostTableEntries + 1);
  }
  return table;
}

}  // namespace natten_jax
