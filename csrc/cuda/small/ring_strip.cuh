// Coordinates in a launch with a ring: strips, steps and slabs (ring_shape.h), and the columns of a slab that a lane's
// rows see.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/small/products.cuh"
#include "cuda/small/ring_params.h"

namespace natten_jax::small {

/// Returns the index of the unit that a CTA processes in a round. If there is no unit with this index, the CTA is done.
/// The map from CTAs to units rotates from round to round. Otherwise the same CTAs would get the strips with the most
/// work in every round, and would finish late.
CUTE_DEVICE int unit_of_round(const RingParams& p, int round) {
  const unsigned ctas = gridDim.x, shift = static_cast<unsigned>(round) * p.shape.rotation % ctas;
  return static_cast<int>(round * ctas + (blockIdx.x + shift) % ctas);
}

/// The work of a CTA in a round: a segment of a strip, for one batch entry and head. Consecutive units run at the same
/// time and share cached data. Neighboring strips see common columns, and the heads of a token share DRAM and L2 lines.
struct RingUnit {
  int batch, head, across, inside, step, end;

  CUTE_DEVICE RingUnit(const RingParams& p, int number) {
    int segment;
    p.by_strips[0](number, across, number);
    p.by_heads(number, head, number);
    p.by_strips[1](number, inside, number);
    p.by_segments(batch, segment, number);
    step = segment * p.shape.segment_steps;
    end = min(step + p.shape.segment_steps, p.shape.steps);
  }

  CUTE_DEVICE int head_kv(const RingParams& p) const { return p.by_heads_per_kv.divide(head); }
};

/// Returns the address of a row's 16-byte chunk with TMA's swizzle. `rows` is the address of the first row.
template <int kHeadDim>
CUTE_DEVICE std::uint32_t chunk_address(std::uint32_t rows, int row, int chunk) {
  return rows + row * 2 * kHeadDim + (chunk ^ (kHeadDim == 32 ? row >> 1 & 3 : row & 7)) * 16;
}

/// Returns the range of columns that a row sees along a dimension. Rows past the end of the layout are treated as its
/// last row.
template <bool kRowsAreKeys>
CUTE_DEVICE Range<int> visible_range(const DeviceAxis& axis, int row) {
  const int length = axis.query_extent, at = min(row, length - 1);
  if constexpr (kRowsAreKeys) return inverse_window_bounds(axis, at, length, length);
  return window_bounds(axis, at, length);
}

/// Coordinates in dimensions 0 and 1 at which all slabs of a strip begin.
template <bool kRowsAreKeys>
struct RingStrip {
  int across, inside;

  CUTE_DEVICE RingStrip(const RingParams& p, const RingUnit& unit) {
    const RingShape& shape = p.shape;
    across = visible_range<kRowsAreKeys>(p.axis[0], unit.across * shape.adjacent[0] * shape.rows[0]).begin;
    across -= (across - shape.phase[0] + shape.wide) & (shape.wide - 1);
    inside = visible_range<kRowsAreKeys>(p.axis[1], unit.inside * shape.adjacent[1] * shape.rows[1]).begin;
    if (shape.thick == 1) inside -= (inside - shape.phase[1] + kBlockKeys) & (kBlockKeys / shape.wide - 1);
  }
};

/// The dimension along strips. A table in shared memory has the range of columns that each row sees. Slabs have
/// consecutive indices; the first one may begin before the layout.
struct RingAlong {
  const RingParams& p;
  std::uint32_t windows;  // per row: start of its range in the lower half-word, end in the upper one

  CUTE_DEVICE RingAlong(const RingParams& p, std::uint32_t shared) : p(p), windows(shared + p.shape.windows) {}

  CUTE_DEVICE int length() const { return p.axis[2].query_extent; }

  /// Fills the table. All threads have to call it. The CTA has to synchronize before it uses the table.
  template <bool kRowsAreKeys>
  CUTE_DEVICE static void tabulate(const RingParams& p, char* raw) {
    for (int i = threadIdx.x; i < p.axis[2].query_extent; i += blockDim.x) {
      const Range<int> window = visible_range<kRowsAreKeys>(p.axis[2], i);
      reinterpret_cast<std::uint32_t*>(raw + p.shape.windows)[i] = window.begin | window.end << 16;
    }
  }

  CUTE_DEVICE Range<int> load_range(int row) const {
    const std::uint32_t window = load_word(windows + 4 * row);
    return {static_cast<int>(window & 0xffff), static_cast<int>(window >> 16)};
  }

  /// Returns the range of slabs that the tiles of a step see.
  CUTE_DEVICE int2 step_slabs(int step) const {
    const int depth = p.shape.rows[2], thick = p.shape.thick, phase = p.shape.phase[2],
              first = load_range(step * depth).begin - phase,
              last = load_range(min((step + 1) * depth, length()) - 1).end - phase;
    return make_int2(((first + thick) >> p.shape.thick_shift) - 1, ((last + 2 * thick - 1) >> p.shape.thick_shift) - 1);
  }

  CUTE_DEVICE int first_key(int slab) const { return p.shape.phase[2] + (slab << p.shape.thick_shift); }
};

/// Slot of a slab in the ring, and parity of the slot's barriers.
struct RingPosition {
  int slot = 0, parity = 0;

  CUTE_DEVICE void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }

  /// Moves back by `count` slots. `count` is at most the number of slots.
  CUTE_DEVICE void retreat(int count, int slots) {
    slot -= count;
    if (slot < 0) {
      slot += slots;
      parity ^= 1;
    }
  }
};

/// Returns the coordinate of row `row` of a tile in dimension `d`, relative to the tile.
CUTE_DEVICE int row_coordinate(const RingShape& shape, int row, int d) {
  if (d > 0) row >>= logarithm(shape.rows[0]);
  if (d > 1) row >>= logarithm(shape.rows[1]);
  return row & (shape.rows[d] - 1);
}

/// Returns the mask bits of two elements in the format that `additive_mask` reads: the lane's elements in its first or
/// second row (`row`) and in the first or second group of a block (`group`).
CUTE_DEVICE constexpr std::uint32_t bits_of_row(int row, int group) {
  return (group == 0 ? 0x0808u : 0x8080u) << (16 * row);
}

/// Returns the warp index, in a form that the compiler recognizes as warp-uniform. All lanes have to call it.
CUTE_DEVICE int ring_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

/// Returns `number`, and hides its value from the compiler. The compiler then does not keep values that are derived
/// from it in registers across steps.
CUTE_DEVICE int opaque_number(int number) {
  return static_cast<int>(keep_in_register(static_cast<std::uint32_t>(number)));
}

/// Returns the coordinates of a warp among the adjacent warps of a step, in dimensions 0 and 1.
CUTE_DEVICE int2 warp_coordinates(const RingShape& shape, int warp) {
  return make_int2(warp % shape.adjacent[0], warp / shape.adjacent[0] % shape.adjacent[1]);
}

/// Computes the coordinates of the first row of a warp's tile in the first step of a strip.
CUTE_DEVICE void first_row(const RingParams& p, const RingUnit& unit, int warp, int (&row)[kRank]) {
  const RingShape& shape = p.shape;
  const int2 coordinates = warp_coordinates(shape, warp);
  row[0] = (unit.across * shape.adjacent[0] + coordinates.x) * shape.rows[0];
  row[1] = (unit.inside * shape.adjacent[1] + coordinates.y) * shape.rows[1];
  row[2] = 0;
}

/// The two rows of a lane in its warp's tile, and the columns that they see along the strip. In dimensions 0 and 1, a
/// row sees the same part of all slabs of a strip. Along the strip, it sees the same part of all blocks of a slab.
template <bool kRowsAreKeys_>
struct RingRows {
  static constexpr bool kRowsAreKeys = kRowsAreKeys_;

  int along_begin[2], along_size[2];
  int rows_along;   // distance along the strip between the first columns of a block's two halves
  int first_along;  // coordinate along the strip of the lane's columns in a block's first half, relative to the slab
  int tokens[2];    // the lane's rows in a strip's first step; negative if outside of the layout in every step

  /// Computes the lane's rows in the first step of a strip.
  CUTE_DEVICE void enter_rows(const RingParams& p, const RingUnit& unit) {
    const RingShape& shape = p.shape;
    const int lane = threadIdx.x % 32;
    int first[kRank];
    first_row(p, unit, ring_warp(), first);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      tokens[r] = row_coordinate(shape, lane / 4 + 8 * r, 2) * p.pitch[2];
      CUTE_UNROLL
      for (int d = 0; d < 2; ++d) {
        const int at = first[d] + row_coordinate(shape, lane / 4 + 8 * r, d);
        tokens[r] = at < p.axis[d].query_extent && tokens[r] >= 0 ? tokens[r] + at * p.pitch[d] : -1;
      }
    }
    const bool is_thick = shape.thick > 1;
    first_along = is_thick ? lane % 4 * 2 >> logarithm(shape.wide) : 0;
    rows_along = is_thick ? kColumns >> logarithm(shape.wide) : 0;
  }

  /// Computes the ranges of columns that the lane's rows see along the strip in a step.
  CUTE_DEVICE void enter_step(const RingParams& p, const RingAlong& along, int step) {
    const int lane = opaque_number(threadIdx.x % 32), first = step * p.shape.rows[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int at = first + row_coordinate(p.shape, lane / 4 + 8 * r, 2), row = min(at, along.length() - 1);
      const Range<int> window = along.load_range(row);
      along_begin[r] = window.begin;
      along_size[r] = at < along.length() ? window.end - window.begin : 0;
    }
  }

  /// Computes the tokens of the lane's rows in a step; negative if a row is outside of the layout.
  CUTE_DEVICE void find_tokens(const RingParams& p, int step, int (&result)[2]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      result[r] = tokens[r] >= 0 && along_size[r] > 0 ? tokens[r] + step * p.shape.rows[2] * p.pitch[2] : -1;
    }
  }

  /// Returns a mask for the lane's elements in each block of a slab. It hides (masks out) the columns that a row does
  /// not see along the strip.
  CUTE_DEVICE std::uint32_t slab_mask(int first_key) const {
    std::uint32_t hidden = 0;
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int at = first_key + first_along + h * rows_along;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const bool is_visible = static_cast<unsigned>(at - along_begin[r]) < static_cast<unsigned>(along_size[r]);
        hidden |= is_visible ? 0 : bits_of_row(r, h);
      }
    }
    return hidden;
  }
};

/// The ranges of columns that a lane's rows see in dimensions 0 and 1.
template <bool kRowsAreKeys>
struct RingInside {
  const RingShape& shape;
  int window_begin[2][2], window_size[2][2];
  int across, inside;  // coordinates: of the lane's first column in dimension 0, and of the slab in dimension 1

  CUTE_DEVICE RingInside(const RingParams& p, const RingUnit& unit, const RingStrip<kRowsAreKeys>& strip)
      : shape(p.shape) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    int first[kRank];
    first_row(p, unit, ring_warp(), first);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int d = 0; d < 2; ++d) {
        const int at = first[d] + row_coordinate(shape, lane / 4 + 8 * r, d);
        const Range<int> window = visible_range<kRowsAreKeys>(p.axis[d], at);
        window_begin[r][d] = window.begin;
        window_size[r][d] = at < p.axis[d].query_extent ? window.end - window.begin : 0;
      }
    }
    across = strip.across + (column & (shape.wide - 1));
    inside = strip.inside;
  }

  /// Returns a mask for the lane's elements in a block. It hides (masks out) the columns that a row does not see in
  /// dimensions 0 and 1. `bit(h, e)` returns the bit of element e (of four) in half h of the block.
  template <class Bit>
  CUTE_DEVICE std::uint32_t hidden(int group, int inner, const Bit& bit) const {
    const int column = threadIdx.x % 4 * 2, wide_shift = logarithm(shape.wide), high = kBlockKeys >> wide_shift;
    std::uint32_t result = 0;
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int at = shape.thick > 1 ? inside : inside + inner * high + ((kColumns * h + column) >> wide_shift);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const bool is_inside =
            static_cast<unsigned>(at - window_begin[r][1]) < static_cast<unsigned>(window_size[r][1]);
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          const bool is_visible =
              is_inside && static_cast<unsigned>(across + group * shape.wide + e - window_begin[r][0]) <
                               static_cast<unsigned>(window_size[r][0]);
          if (!is_visible) result |= bit(h, 2 * r + e);
        }
      }
    }
    return result;
  }
};

/// Masks of the blocks that a warp of queries multiplies (RingForm), in registers.
template <int kForm>
struct RingMasks : RingRows<false> {
  static constexpr int kGroups = kRingForms[kForm].groups, kInner = kRingForms[kForm].inner, kBlocks = kGroups * kInner;

  std::uint32_t inside[kBlocks];
  int block;  // index of the warp's first block in a slab

  CUTE_DEVICE void enter_strip(const RingParams& p, std::uint32_t, const RingUnit& unit,
                               const RingStrip<false>& strip) {
    const RingShape& shape = p.shape;
    const int wide_shift = logarithm(shape.wide), high = kBlockKeys >> wide_shift;
    int first[kRank];
    first_row(p, unit, ring_warp(), first);
    const int group =
        min((visible_range<false>(p.axis[0], first[0]).begin - strip.across) >> wide_shift, shape.groups - kGroups);
    const int inner = shape.thick > 1
                          ? 0
                          : min((visible_range<false>(p.axis[1], first[1]).begin - strip.inside) >> logarithm(high),
                                shape.group_blocks - kInner);
    block = group * shape.group_blocks + inner;
    enter_rows(p, unit);
    const RingInside<false> windows(p, unit, strip);
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      inside[b] = windows.hidden(group + b / kInner, inner + b % kInner,
                                 [](int h, int element) { return (h == 0 ? 8u : 128u) << (8 * element); });
    }
  }
};

/// Masks of the blocks that a warp of keys sees, in shared memory: a byte per block and lane. The number of blocks
/// varies, because more queries see the keys at an edge of the layout.
struct RingTable : RingRows<true> {
  std::uint32_t table;  // address of the lane's byte for the first block
  int block;            // index of the warp's first block in a slab
  int blocks, inner;    // number of blocks of a slab that the warp sees: in total, and per group

  CUTE_DEVICE void enter_strip(const RingParams& p, std::uint32_t shared, const RingUnit& unit,
                               const RingStrip<true>& strip) {
    const RingShape& shape = p.shape;
    const int warp = ring_warp(), lane = threadIdx.x % 32, wide_shift = logarithm(shape.wide),
              high_shift = logarithm(kBlockKeys) - wide_shift;
    int first[kRank];
    first_row(p, unit, warp, first);
    const auto blocks_of = [&](int d, int begin, int shift, int& count) {
      const int behind = min(first[d] + shape.rows[d], p.axis[d].query_extent) - 1,
                end = visible_range<true>(p.axis[d], behind).end - begin,
                block = (visible_range<true>(p.axis[d], first[d]).begin - begin) >> shift;
      count = first[d] < p.axis[d].query_extent ? ((end + (1 << shift) - 1) >> shift) - block : 0;
      return block;
    };
    int groups = 0;
    const int group = blocks_of(0, strip.across, wide_shift, groups);
    int inner_count = 0, first_inner = blocks_of(1, strip.inside, high_shift, inner_count);
    if (shape.thick > 1) {
      first_inner = 0;
      inner_count = min(inner_count, 1);
    }
    inner = inner_count;
    blocks = groups * inner;
    block = group * shape.group_blocks + first_inner;
    enter_rows(p, unit);
    table = shared + shape.masks + warp * shape.blocks * 32 + lane;
    __syncwarp();  // all lanes have read the masks of the previous strip
    const RingInside<true> windows(p, unit, strip);
    std::uint32_t to = table;
    CUTE_NO_UNROLL
    for (int g = 0; g < groups; ++g) {
      CUTE_NO_UNROLL
      for (int i = 0; i < inner; ++i) {
        // The bits are in the order that spread_bits requires.
        const std::uint32_t bits =
            windows.hidden(group + g, first_inner + i, [](int h, int element) { return 1u << (4 * h + 3 - element); });
        asm volatile("st.shared.u8 [%0], %1;" : : "r"(to), "r"(bits) : "memory");
        to += 32;
      }
    }
  }
};

}  // namespace natten_jax::small
