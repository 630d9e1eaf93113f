// Length of the lines of a relative bias in shared memory. A line contains the offsets along the last dimension. Lines
// are padded so that the lanes of a warp read from different banks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "cuda/small/forms.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// All orders of a problem's dimensions. A region uses an order in which the dimensions along which a group extends
/// come first.
inline constexpr int kOrders[][kRank] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

/// Returns the number of wavefronts that shared memory needs if each lane of a warp reads one entry of a table. This is
/// the maximum number of distinct words in one bank. Rows and columns are assigned to lanes as in make_plan.
///
/// Args:
///   pitch: distance in entries between consecutive offsets along each dimension.
///   tile, group: shapes of a tile of rows and of a group of columns.
///   order: order of the problem's dimensions in the region.
inline int reads_of_warp(const std::int64_t (&pitch)[kRank], const std::int64_t (&tile)[kRank],
                         const std::int64_t (&group)[kRank], const int (&order)[kRank]) {
  constexpr int kLanes = 32, kBanks = 32, kColumnsOfLane = 2;
  std::int64_t words[kLanes];
  int in_bank[kBanks] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    std::int64_t row = lane / 4, column = lane % 4 * kColumnsOfLane, word = 0;
    for (const int d : order) {
      word += (column % group[d] - row % tile[d]) * pitch[d];
      column /= group[d];
      row /= tile[d];
    }
    words[lane] = word;
    // If several lanes read the same word, it counts once.
    if (std::find(words, words + lane, word) == words + lane) ++in_bank[(word % kBanks + kBanks) % kBanks];
  }
  return *std::max_element(in_bank, in_bank + kBanks);
}

/// Returns the number of entries of a line with `offsets` offsets, including padding. This is the shortest line with
/// the fewest bank conflicts. Without padding, reads need twice the number of wavefronts for most problems with windows
/// of 7 x 7, and for all with windows of 13 x 13. The forward pass with 13 x 13 then took 207 instead of 201
/// microseconds. The key and value gradients with 7 x 7 and heads of 64 took 113 instead of 100 microseconds (H200).
///
/// Args:
///   offsets: number of offsets along the last dimension.
///   lines: number of lines per plane (offsets along the second dimension).
///   tile, group: shapes of a tile of rows and of a group of columns.
inline std::int64_t entries_of_line(std::int64_t offsets, std::int64_t lines, const std::int64_t (&tile)[kRank],
                                    const std::int64_t (&group)[kRank]) {
  constexpr std::int64_t kBanks = 32;  // line lengths that differ by kBanks have the same bank conflicts
  std::int64_t best = offsets;
  int least = std::numeric_limits<int>::max(), orders = 0;
  for (std::int64_t line = offsets; line < offsets + kBanks && least > orders; ++line) {
    int reads = 0;
    orders = 0;
    for (const auto& order : kOrders) {
      const auto comes_first = [&](int a, int b) { return group[a] > 1 && group[b] == 1; };
      if (!std::is_sorted(std::begin(order), std::end(order), comes_first)) continue;
      reads += reads_of_warp({line * lines, line, 1}, tile, group, order);
      ++orders;
    }
    if (reads >= least) continue;
    least = reads;
    best = line;
  }
  return best;
}

}  // namespace natten_jax::small
