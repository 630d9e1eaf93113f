// Blocks and slabs that rows of a ring launch see along a dimension.
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

/// A dimension, and the columns that its rows see.
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

  /// Returns the position of the first column that a tile in the middle of the layout sees, modulo the tokens of a
  /// block or slab.
  int phase(std::int64_t tile, std::int64_t of) const {
    return modulo(seen(length() / 2 / tile * tile, tile).begin, of);
  }
};

/// Blocks that the warps of a strip see along a dimension across it: the maximum per warp, the extent of the strip from
/// its first block, and the sum over warps.
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

/// Blocks over all strips, member by member: the most of any warp; the largest extent of a strip; the largest sum over
/// the warps of one strip; the sum over all warps of all strips; and the sum, over all strips, of the most that a warp
/// of the strip sees.
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

/// Slabs that the steps of a strip see: the maximum per step, the sum over steps, the maximum that a step shares with
/// the next one, and the number of slabs.
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
