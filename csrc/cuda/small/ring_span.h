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

  Range<std::int64_t> seen(std::int64_t begin, std::int64_t count) const {
    const std::int64_t first = std::min(begin, length() - 1), last = std::min(begin + count, length()) - 1;
    return {of_row(first).begin, of_row(std::max(first, last)).end};
  }

  Range<std::int64_t> of_row(std::int64_t row) const {
    return rows_are_keys ? inverse_window_bounds(axis.window, row, length(), length())
                         : window_bounds(axis.window, row, length());
  }

  /// Returns the coordinate of the first column that a tile in the middle of the layout sees, modulo `of`, the extent
  /// of a block or slab.
  int phase(std::int64_t tile, std::int64_t of) const {
    return modulo(seen(length() / 2 / tile * tile, tile).begin, of);
  }
};

/// Numbers of blocks that the warps of a strip see along dimension 0 or 1 of the shape:
/// - of_warp: maximum over the warps.
/// - of_strip: number of blocks from the first to the last block that any warp sees.
/// - of_all: sum over the warps.
struct StripBlocks {
  std::int64_t of_warp = 1, of_strip = 1, of_all = 0;

  StripBlocks(const Span& span, std::int64_t strip, std::int64_t rows, std::int64_t beside, std::int64_t of_block,
              int phase) {
    const std::int64_t lo = span.seen(strip, rows).begin, first = lo - modulo(lo - phase, of_block);
    for (std::int64_t begin = strip; begin < std::min(strip + rows * beside, span.length()); begin += rows) {
      const auto seen = span.seen(begin, rows);
      const std::int64_t end = divide_up(seen.end - first, of_block), blocks = end - (seen.begin - first) / of_block;
      of_warp = std::max(of_warp, blocks);
      of_strip = std::max(of_strip, end);
      of_all += blocks;
    }
  }
};

/// Numbers of blocks that the warps of all strips see along dimension 0 or 1 of the shape:
/// - of_warp: maximum over all warps.
/// - of_strip: maximum of StripBlocks::of_strip over the strips.
/// - of_warps: maximum over the strips of the sum over a strip's warps.
/// - of_all: sum over all warps.
/// - of_slowest: sum over the strips of the maximum over a strip's warps.
struct SeenBlocks {
  std::int64_t of_warp = 1, of_strip = 1, of_warps = 0, of_all = 0, of_slowest = 0;

  SeenBlocks(const Span& span, std::int64_t rows, std::int64_t beside, std::int64_t of_block, int phase) {
    for (std::int64_t strip = 0; strip < span.length(); strip += rows * beside) {
      const StripBlocks seen(span, strip, rows, beside, of_block, phase);
      of_warp = std::max(of_warp, seen.of_warp);
      of_strip = std::max(of_strip, seen.of_strip);
      of_warps = std::max(of_warps, seen.of_all);
      of_all += seen.of_all;
      of_slowest += seen.of_warp;
    }
  }
};

/// Numbers of slabs that the steps of a strip see:
/// - most: maximum over the steps.
/// - all: sum over the steps.
/// - held: maximum number of slabs that a step shares with the next step.
/// - count: number of different slabs.
struct SeenSlabs {
  const Span& span;
  std::int64_t depth, thick;
  int phase;
  std::int64_t most = 1, all = 0, held = 0, count = 0;

  SeenSlabs(const Span& span, std::int64_t depth, std::int64_t thick)
      : span(span), depth(depth), thick(thick), phase(span.phase(depth, thick)) {
    for (std::int64_t row = 0; row < span.length(); row += depth) {
      const auto [first, end] = of_rows(row, depth);
      most = std::max(most, end - first);
      held = std::max(held, end - of_rows(row + depth, depth).begin);
      all += end - first;
    }
    const auto [first, end] = of_rows(0, span.length());
    count = end - first;
  }

  Range<std::int64_t> of_rows(std::int64_t row, std::int64_t rows) const {
    const auto seen = span.seen(row, rows);
    return {divide_down(seen.begin - phase, thick), divide_down(seen.end - phase + thick - 1, thick)};
  }
};

}  // namespace natten_jax::small
