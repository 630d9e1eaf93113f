// Length of the lines of a relative bias in memory: padded so that the lanes of a warp read from different banks of
// shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "cuda/small/forms.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Possible orders of a problem's dimensions in a region: the dimensions of a group come first.
inline constexpr int kOrders[][kRank] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

/// Returns the number of shared memory wavefronts in which a warp reads one entry per lane, with make_plan's assignment
/// of rows and columns: the maximum number of distinct words in one bank.
///
/// Args:
///   pitch: distance in entries between consecutive offsets of a dimension.
///   tile, group: shapes of rows and columns.
///   order: order of the dimensions.
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
    // Lanes that read the same word share it.
    if (std::find(words, words + lane, word) == words + lane) ++in_bank[(word % kBanks + kBanks) % kBanks];
  }
  return *std::max_element(in_bank, in_bank + kBanks);
}

/// Returns the entries of a line with `own` offsets, including padding: the shortest line with the fewest bank
/// conflicts. Without padding, most windows of 7 x 7 and all of 13 x 13 take twice the number of reads: the forward
/// pass of 13 x 13 took 207 instead of 201 microseconds, key and value gradients of 64-wide heads with 7 x 7 took 113
/// instead of 100 (H200).
///
/// Args:
///   own: offsets along the last dimension.
///   lines: lines per plane.
///   tile, group: shapes of rows and columns.
inline std::int64_t entries_of_line(std::int64_t own, std::int64_t lines, const std::int64_t (&tile)[kRank],
                                    const std::int64_t (&group)[kRank]) {
  constexpr std::int64_t kBanks = 32;  // lengths that differ by this have the same bank conflicts
  std::int64_t best = own;
  int least = std::numeric_limits<int>::max(), orders = 0;
  for (std::int64_t line = own; line < own + kBanks && least > orders; ++line) {
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
