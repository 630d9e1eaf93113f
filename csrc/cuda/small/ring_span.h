// Numbers of blocks and slabs that the rows of a launch with a ring see along a dimension (ring_shape.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax::small {

inline int narrow(std::int64_t value) {
  return static_cast<int>(value);
}

inline int modulo(std::int64_t a, std::int64_t b) {
  return narrow((a % b + b) % b);
}

inline std::int64_t divide_down(std::int64_t a, std::int64_t b) {
  return (a - modulo(a, b)) / b;
}

/// A dimension of a layout, as a kernel divides it into rows and columns: queries and keys, or the reverse.
struct Span {
  const Axis& axis;
  bool rows_are_keys;

  std::int64_t length() const { return axis.kv.extent; }

  Range<std::int64_t> visible_range(std::int64_t begin, std::int64_t count) const {
    const std::int64_t first = std::min(begin, length() - 1), last = std::min(begin + count, length()) - 1;
    return {row_range(first).begin, row_range(std::max(first, last)).end};
  }

  Range<std::int64_t> row_range(std::int64_t row) const {
    return rows_are_keys ? inverse_window_bounds(axis.window, row, length(), length())
                         : window_bounds(axis.window, row, length());
  }

  /// Returns the coordinate of the first column that a tile in the middle of the layout sees, modulo `extent`, the
  /// extent of a block or slab.
  int phase(std::int64_t tile, std::int64_t extent) const {
    return modulo(visible_range(length() / 2 / tile * tile, tile).begin, extent);
  }
};

/// Numbers of blocks that the warps of a strip see along dimension 0 or 1 of the shape:
/// - max_per_warp: maximum over the warps.
/// - strip_extent: number of blocks from the first to the last block that any warp sees.
/// - total: sum over the warps.
struct StripBlocks {
  std::int64_t max_per_warp = 1, strip_extent = 1, total = 0;

  StripBlocks(const Span& span, std::int64_t strip, std::int64_t rows, std::int64_t adjacent, std::int64_t block_extent,
              int phase) {
    const std::int64_t lo = span.visible_range(strip, rows).begin, first = lo - modulo(lo - phase, block_extent);
    for (std::int64_t begin = strip; begin < std::min(strip + rows * adjacent, span.length()); begin += rows) {
      const auto columns = span.visible_range(begin, rows);
      const std::int64_t end = divide_up(columns.end - first, block_extent),
                         blocks = end - (columns.begin - first) / block_extent;
      max_per_warp = std::max(max_per_warp, blocks);
      strip_extent = std::max(strip_extent, end);
      total += blocks;
    }
  }
};

/// Numbers of blocks that the warps of all strips see along dimension 0 or 1 of the shape:
/// - max_per_warp: maximum over all warps.
/// - strip_extent: maximum of StripBlocks::strip_extent over the strips.
/// - max_per_strip: maximum over the strips of the sum over a strip's warps.
/// - total: sum over all warps.
/// - slowest_total: sum over the strips of the maximum over a strip's warps.
struct VisibleBlocks {
  std::int64_t max_per_warp = 1, strip_extent = 1, max_per_strip = 0, total = 0, slowest_total = 0;

  VisibleBlocks(const Span& span, std::int64_t rows, std::int64_t adjacent, std::int64_t block_extent, int phase) {
    for (std::int64_t strip = 0; strip < span.length(); strip += rows * adjacent) {
      const StripBlocks blocks(span, strip, rows, adjacent, block_extent, phase);
      max_per_warp = std::max(max_per_warp, blocks.max_per_warp);
      strip_extent = std::max(strip_extent, blocks.strip_extent);
      max_per_strip = std::max(max_per_strip, blocks.total);
      total += blocks.total;
      slowest_total += blocks.max_per_warp;
    }
  }
};

/// Numbers of slabs that the steps of a strip see:
/// - most: maximum over the steps.
/// - all: sum over the steps.
/// - held: maximum number of slabs that a step shares with the next step.
/// - count: number of different slabs.
struct VisibleSlabs {
  const Span& span;
  std::int64_t depth, thick;
  int phase;
  std::int64_t most = 1, all = 0, held = 0, count = 0;

  VisibleSlabs(const Span& span, std::int64_t depth, std::int64_t thick)
      : span(span), depth(depth), thick(thick), phase(span.phase(depth, thick)) {
    for (std::int64_t row = 0; row < span.length(); row += depth) {
      const auto [first, end] = slab_range(row, depth);
      most = std::max(most, end - first);
      held = std::max(held, end - slab_range(row + depth, depth).begin);
      all += end - first;
    }
    const auto [first, end] = slab_range(0, span.length());
    count = end - first;
  }

  Range<std::int64_t> slab_range(std::int64_t row, std::int64_t rows) const {
    const auto columns = span.visible_range(row, rows);
    return {divide_down(columns.begin - phase, thick), divide_down(columns.end - phase + thick - 1, thick)};
  }
};

}  // namespace natten_jax::small
