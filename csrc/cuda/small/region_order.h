// Regions that the seam of a dimension cuts, where it ends and goes on at its other end.
#pragma once

#include <cstdint>

#include "natten_jax/problem.h"
#include "natten_jax/windows.h"

namespace natten_jax::small {

/// Those of one dimension.
struct SeamRegions {
  int count;   ///< All of them: the first ones, and the last ones.
  int at_end;  ///< The last ones.
};

/// Finds them; none where the dimension does not wrap.
///
/// Args:
///   axis: the dimension.
///   rows: of a region.
///   regions: of a dilation group.
///   rows_are_keys: whether rows are keys, and columns the queries that see them, or the other way round.
inline SeamRegions seam_regions(const Axis& axis, std::int64_t rows, int regions, bool rows_are_keys) {
  const Window& window = axis.window;
  if (window.ends != Ends::kWrap) return {};
  const std::int64_t length = axis.kv.extent / window.dilation;
  const auto seen = [&](std::int64_t row) {
    return rows_are_keys ? inverse_window_bounds(window, row, length, length) : window_bounds(window, row, length);
  };
  int first = 0, last = 0;
  while (first < regions && seen(first * rows).begin < 0) ++first;
  while (first + last < regions && seen(smaller<std::int64_t>((regions - last) * rows, length) - 1).end > length) {
    ++last;
  }
  return {first + last, last};
}

}  // namespace natten_jax::small
