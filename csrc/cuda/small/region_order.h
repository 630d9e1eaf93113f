// Regions that are cut by a seam, the edge at which a wrapped dimension continues at its other end. The columns of a
// cut region lie on both sides of the seam.
#pragma once

#include <cstdint>

#include "natten_jax/problem.h"
#include "natten_jax/windows.h"

namespace natten_jax::small {

/// Number of cut regions along a dimension, per dilation group.
struct SeamRegions {
  int count;   ///< Cut regions at both ends of the dimension.
  int at_end;  ///< Cut regions at its end.
};

/// Counts the cut regions. The result is zero if the dimension does not wrap.
///
/// Args:
///   axis: the dimension.
///   rows: rows per region.
///   regions: regions per dilation group.
///   rows_are_keys: true if rows are keys, and columns are the queries that see them; false if rows are queries, and
///     columns are the keys that they see.
inline SeamRegions seam_regions(const Axis& axis, std::int64_t rows, int regions, bool rows_are_keys) {
  const Window& window = axis.window;
  if (window.ends != Ends::kWrap) return {};
  const std::int64_t length = axis.kv.extent / window.dilation;
  const auto visible_range = [&](std::int64_t row) {
    return rows_are_keys ? inverse_window_bounds(window, row, length, length) : window_bounds(window, row, length);
  };
  int first = 0, last = 0;
  while (first < regions && visible_range(first * rows).begin < 0) ++first;
  while (first + last < regions &&
         visible_range(smaller<std::int64_t>((regions - last) * rows, length) - 1).end > length) {
    ++last;
  }
  return {first + last, last};
}

}  // namespace natten_jax::small
