// Layout of the entries of a relative bias: an entry for each offset of a key from a query within a window.
#pragma once

#include <algorithm>
#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of entries in the tables of the query heads that share keys and values. Kernels compute indices of
/// entries in 32 bits. These may be a few times larger than this number, because pairs of tokens outside every window
/// have indices outside the tables.
inline constexpr std::int64_t kMostTableEntries = std::int64_t{1} << 25;

/// A head's table. Offsets are counted in steps of the dilation.
struct OffsetTable {
  std::int64_t reach[kRank];  ///< The largest offset along each dimension; the smallest is its negative.
  std::int64_t pitch[kRank];  ///< Entries from one offset to the next.
  std::int64_t entries;       ///< At most kMostTableEntries + 1, which stands for all larger numbers.
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
