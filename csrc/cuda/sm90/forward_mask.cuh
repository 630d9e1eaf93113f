// Masks of the forward kernel. A thread holds logits of two rows of the query tile. This file computes the positions of
// these rows, and masks of the keys to which they attend.
#pragma once

#include <climits>

#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/online_softmax.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

/// Position of a row in the query tile.
struct RowPosition {
  // Bytes 0 to 2: index of the row's window in TilePlan::windows, for each dimension. Byte 3: 1 if the query tile has
  // this row, otherwise 0.
  std::uint32_t window_indices;

  /// Rows past the end of the query tile get the position of row 0.
  CUTE_DEVICE RowPosition(const ForwardParams& p, int row) {
    const bool exists = row < p.q_tile_tokens;
    const int3 at = position_in_tile<&DeviceAxis::by_q_tile>(p.axis, exists ? row : 0);
    const int y_first = p.axis[0].q_tile, z_first = y_first + p.axis[1].q_tile;
    window_indices = at.x | (y_first + at.y) << 8 | (z_first + at.z) << 16 | exists << 24;
  }

  CUTE_DEVICE bool exists() const { return byte(3) != 0; }

  CUTE_DEVICE int2 window(const TilePlan& plan, int d) const { return plan.windows[byte(d)]; }

  /// Index of the row's token among the queries of its batch entry, or -1 if the row has no token.
  CUTE_DEVICE int token(const ForwardParams& p, const TilePlan& plan) const {
    const int coordinate[3] = {byte(0), byte(1) - p.axis[0].q_tile, byte(2) - p.axis[0].q_tile - p.axis[1].q_tile};
    int token = 0;
    bool is_inside = exists();
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      // For rows past the end of the dilation group, this coordinate may exceed 32 bits.
      const auto at =
          static_cast<std::int64_t>(plan.q_begin[d] + coordinate[d]) * p.axis[d].dilation + plan.query_residue[d];
      is_inside = is_inside && at < p.axis[d].query_local_extent;
      token = token * p.axis[d].query_local_extent + static_cast<int>(at);
    }
    return is_inside ? token : -1;
  }

 private:
  CUTE_DEVICE int byte(int i) const {
    std::uint32_t packed = window_indices;
    // The asm statement hides the value from the compiler, which would otherwise keep each byte in a register across
    // tiles.
    asm volatile("" : "+r"(packed));
    return packed >> 8 * i & 0xff;
  }
};

/// Index of a token in the arrays of logsumexps and remainders, for the plan's batch entry and head.
CUTE_DEVICE std::int64_t statistic_of(const ForwardParams& p, const TilePlan& plan, int token) {
  return (static_cast<std::int64_t>(plan.batch) * p.queries + token) * p.heads + plan.head;
}

/// Masks of a thread's two rows for the current key/value tile.
struct WindowMask {
  RowPosition row[2];
  LaneMask<KeyColumnMask> lane_mask;
  std::uint32_t visible[2];  // Per row: mask of the current tile, with a bit per element.
  // Key/value tiles with equal first coordinates in x and y form a line. `line_x` and `line_y` are these coordinates
  // for the current line. `line_masks` contains a mask per row, which is the same for all tiles of the line. A bit is
  // set if the key is in the row's window in dimensions x and y.
  std::uint32_t line_masks[2];
  int line_x, line_y;

  /// Resets `line_x` for a new query tile, so that its first key/value tile starts a new line.
  CUTE_DEVICE void start() { line_x = INT_MIN; }

  /// True if the key/value tile at `tile` lies on a different line than the previous tile.
  CUTE_DEVICE bool is_new_line(int4 tile) const { return tile.x != line_x || tile.y != line_y; }

  CUTE_DEVICE void start_line(const ForwardParams& p, const TilePlan& plan, int4 tile) {
    line_x = tile.x;
    line_y = tile.y;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      line_masks[i] = lane_mask.between(0, p.axis[0].kv_tile, row[i].window(plan, 0), tile.x) &
                      lane_mask.between(1, p.axis[1].kv_tile, row[i].window(plan, 1), tile.y);
    }
  }

  /// Computes `visible` for the tile at `tile`, which lies on the current line.
  CUTE_DEVICE void set_visible(const ForwardParams& p, const TilePlan& plan, int4 tile) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      visible[i] = line_masks[i] & lane_mask.between(2, p.axis[2].kv_tile, row[i].window(plan, 2), tile.z);
    }
  }

  /// Computes `visible` for a tile of additional tokens: both rows attend to its first `columns` columns.
  CUTE_DEVICE void set_first_visible(int columns, int lane4) {
    visible[0] = visible[1] = KeyColumnMask::first(columns, lane4);
  }
};

/// Stores the logsumexp and the remainder of the row that the lane completes (`completes_second_row`). Of the four
/// lanes that share two rows, only the first two store anything.
CUTE_DEVICE void store_statistics(const ForwardParams& p, const TilePlan& plan, const WindowMask& mask,
                                  const RowSums& sums) {
  const int token = select_completed_row(mask.row).token(p, plan);
  if (threadIdx.x % 4 > 1 || token < 0) return;
  const std::int64_t at = statistic_of(p, plan, token);
  p.logsumexp[at] = sums.logsumexp.value;
  if (p.remainder != nullptr) p.remainder[at] = pack_remainder(sums.logsumexp.remainder);
}

}  // namespace natten_jax::sm90
