// Numbers of columns that the rows of a kernel see along a dimension. Rows are queries or keys (region.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/small/region.h"

namespace natten_jax::small {

/// Limit of exact results in Side. Keys near the ends of a layout are enumerated only if the kernel size plus the
/// stride is at most this number. With per-entry layouts, all lengths of a layout are enumerated only if there are at
/// most kMostEnumerated lengths.
constexpr std::int64_t kMostEnumerated = 1024;

/// A dimension of a problem, as a kernel divides it into rows and columns: queries and keys, or the reverse.
struct Side {
  const Axis& axis;
  bool rows_are_keys;
  Coverage coverage;

  /// True unless the arrays cover the complete layout.
  bool has_origins() const { return coverage != Coverage::kComplete; }

  /// Numbers of the arrays' rows and columns that belong to the longest dilation group.
  std::int64_t rows() const { return longest_group((rows_are_keys ? axis.kv : axis.query).local_extent); }
  std::int64_t columns() const { return longest_group((rows_are_keys ? axis.query : axis.kv).local_extent); }

  /// Returns the maximum number of columns that the rows of `tiles` consecutive tiles see. The tiles form a region, so
  /// that their first row is a multiple of `tile * tiles`. With per-entry layouts of any length, the last two regions
  /// of keys are an exception (RegionAxis::fill_last_region): the last one has the last `tiles` tiles of the layout,
  /// and the one before it has the remaining tiles.
  std::int64_t visible_columns(std::int64_t tile, std::int64_t tiles = 1) const {
    if (are_whole()) return columns();
    const std::int64_t inside = visible_inside(tile * tiles);
    return limited(rows_are_keys ? std::max(inside, visible_at_ends(tile, tiles)) : inside);
  }

  /// Returns the average number of groups of columns that `count` consecutive rows see. `group` is the number of
  /// columns of a group.
  double mean_groups(std::int64_t count, std::int64_t group) const {
    if (are_whole()) return static_cast<double>(divide_up(columns(), group));
    const double inside = static_cast<double>(divide_up(limited(visible_inside(count)), group));
    if (!rows_are_keys || !enumerates_ends()) return inside;
    const std::int64_t longest = longest_group(axis.kv.extent), blocks = divide_up(longest, count);
    double sum = 0;
    std::int64_t enumerated = 0;
    for_ends(count, longest, [&](std::int64_t visible) {
      sum += static_cast<double>(divide_up(std::max<std::int64_t>(visible, 0), group));
      ++enumerated;
    });
    return (sum + inside * static_cast<double>(blocks - enumerated)) / static_cast<double>(blocks);
  }

 private:
  /// Limits a number of columns to the columns of the dilation group. If the dimension wraps, a column may occur twice,
  /// so that there is no limit.
  std::int64_t limited(std::int64_t visible) const {
    return axis.window.ends == Ends::kWrap ? visible : std::min(visible, columns());
  }

  /// True if every query sees all keys.
  bool are_whole() const { return axis.query.extent != axis.kv.extent; }

  bool enumerates_ends() const { return !has_origins() && ends() <= kMostEnumerated; }
  std::int64_t ends() const { return axis.window.kernel_size + axis.window.stride; }

  /// Like `visible_columns`, for keys near the ends of a layout. The ends shift the windows of queries, so that more
  /// queries see these keys.
  std::int64_t visible_at_ends(std::int64_t tile, std::int64_t tiles) const {
    const Window& window = axis.window;
    const std::int64_t count = tile * tiles, longest = longest_group(axis.kv.extent);
    // Layouts longer than `all_kinds` are not enumerated, because the number of queries that see a key near their ends
    // equals the number in some shorter layout.
    const std::int64_t all_kinds = 2 * ends() + count * (window.stride + 3);
    const bool enumerates_all =
        coverage == Coverage::kPerEntry && axis.kv.local_extent == axis.kv.extent && all_kinds <= kMostEnumerated;
    if (!enumerates_ends() && !enumerates_all) {
      // In a short layout, a key may be near both ends. All queries may then see it.
      const bool may_be_short = coverage == Coverage::kPerEntry || longest <= 2 * window.kernel_size + count;
      const std::int64_t shifted = window.kernel_size / 2 + window.stride;
      return visible_inside(count) + (may_be_short ? std::max(shifted, window.kernel_size) : shifted);
    }
    std::int64_t most = 0;
    const auto update = [&](std::int64_t visible) { most = std::max(most, visible); };
    for (std::int64_t length = std::max<std::int64_t>(longest - 1, 1); length <= longest; ++length) {
      for_ends(count, length, update);
    }
    for (std::int64_t length = 1; enumerates_all && length <= std::min(longest, all_kinds); ++length) {
      const std::int64_t first_of_last = std::max<std::int64_t>(divide_up(length, tile) * tile - count, 0);
      for (std::int64_t begin = 0; begin < length;) {
        const std::int64_t end = begin < first_of_last ? std::min(begin + count, first_of_last) : length;
        update(visible_between(begin, end, length));
        begin = end;
      }
    }
    return most;
  }

  std::int64_t longest_group(std::int64_t extent) const { return divide_up(extent, axis.window.dilation); }

  /// Returns the number of queries that see any of the keys `begin` to `end - 1` of a layout of `length` tokens.
  std::int64_t visible_between(std::int64_t begin, std::int64_t end, std::int64_t length) const {
    if (length < axis.window.kernel_size) return length;
    const auto first_visible = inverse_window_bounds(axis.window, begin, length, length);
    const auto last_visible = inverse_window_bounds(axis.window, end - 1, length, length);
    return last_visible.end - first_visible.begin;
  }

  /// Like `visible_columns`, for `count` consecutive rows away from the ends of the layout.
  std::int64_t visible_inside(std::int64_t count) const {
    const Window& window = axis.window;
    count = std::min(count, rows());
    const std::int64_t steps = divide_up(count - 1, window.stride) * window.stride;
    return window.kernel_size + (rows_are_keys ? count - 1 + window.stride - 1 : steps);
  }

  /// Divides a layout of `length` keys into blocks of `count` keys. For each block near an end of the layout, calls
  /// `call` with the number of queries that see any key of the block.
  template <class Call>
  void for_ends(std::int64_t count, std::int64_t length, const Call& call) const {
    const Window& window = axis.window;
    if (length < window.kernel_size) {
      for (std::int64_t block = 0; block * count < length; ++block) call(length);
      return;
    }
    const std::int64_t blocks = divide_up(length, count);
    const std::int64_t near = std::min(divide_up(window.kernel_size + window.stride, count) + 1, blocks);
    const auto call_block = [&](std::int64_t block) {
      call(visible_between(block * count, std::min((block + 1) * count, length), length));
    };
    for (std::int64_t block = 0; block < near; ++block) call_block(block);
    for (std::int64_t block = std::max(near, blocks - near); block < blocks; ++block) call_block(block);
  }
};

/// The dimensions of a problem, as a kernel divides them into rows and columns.
struct Sides {
  Side dimensions[kRank];

  Sides(const Problem& problem, Kernel kernel, Coverage coverage)
      : dimensions{{problem.axes[0], kernel == Kernel::kKeyValueGradient, coverage},
                   {problem.axes[1], kernel == Kernel::kKeyValueGradient, coverage},
                   {problem.axes[2], kernel == Kernel::kKeyValueGradient, coverage}} {}
};

}  // namespace natten_jax::small
