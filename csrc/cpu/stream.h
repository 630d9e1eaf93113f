// Iteration over the stream tokens of an item: each lane block visits the tokens that it sees, in boxes.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/element.h"
#include "cpu/lane_block.h"
#include "cpu/vector.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Rows of a stream tile, as floats. Each token of the tile has a row.
struct FloatRows {
  const float* base;          ///< Row of the tile's first token.
  std::int64_t begin[kRank];  ///< Group indices of the tile's first token.
  std::int64_t pitch[kRank];  ///< Distance between neighboring tokens along each dimension, in floats.
};

/// Rows of the two arrays that a pass streams: keys and values, or queries and output cotangents.
struct RowPair {
  FloatRows a;  ///< Keys or queries: rows of head_dim elements.
  FloatRows b;  ///< Values or output cotangents: rows of head_dim_v elements.
};

NATTEN_JAX_INLINE std::int64_t lesser(std::int64_t a, std::int64_t b) {
  return b < a ? b : a;
}
NATTEN_JAX_INLINE std::int64_t greater(std::int64_t a, std::int64_t b) {
  return a < b ? b : a;
}

NATTEN_JAX_INLINE std::int64_t volume(const Box& box) {
  return (box.end[0] - box.begin[0]) * (box.end[1] - box.begin[1]) * (box.end[2] - box.begin[2]);
}

NATTEN_JAX_INLINE Box common(const Box& a, const Box& b) {
  Box box;
  for (int dim = 0; dim < kRank; ++dim) {
    box.begin[dim] = greater(a.begin[dim], b.begin[dim]);
    box.end[dim] = lesser(a.end[dim], b.end[dim]);
  }
  return box;
}

NATTEN_JAX_INLINE bool is_empty(const Box& a) {
  return a.end[0] <= a.begin[0] || a.end[1] <= a.begin[1] || a.end[2] <= a.begin[2];
}

NATTEN_JAX_INLINE bool contains(const Box& outer, const Box& inner) {
  bool inside = true;
  for (int dim = 0; dim < kRank; ++dim) {
    inside = inside && outer.begin[dim] <= inner.begin[dim] && inner.end[dim] <= outer.end[dim];
  }
  return inside;
}

/// Divides a box into tiles of at most `shape` tokens, and calls visit(tile) for each tile. If a dimension wraps, each
/// tile lies within one repetition of the layout.
template <typename Visit>
NATTEN_JAX_INLINE void for_each_tile(const Box& box, const TokenMap& tokens, const std::int64_t* shape, Visit visit) {
  const Repetition* at = tokens.repeated;
  const auto end_of = [&](int dim, std::int64_t begin) {
    return at[dim].row_end(begin, lesser(begin + shape[dim], box.end[dim]));
  };
  Box tile;
  for (tile.begin[0] = at[0].next(box.begin[0]); tile.begin[0] < box.end[0]; tile.begin[0] = at[0].next(tile.end[0])) {
    tile.end[0] = end_of(0, tile.begin[0]);
    for (tile.begin[1] = at[1].next(box.begin[1]); tile.begin[1] < box.end[1];
         tile.begin[1] = at[1].next(tile.end[1])) {
      tile.end[1] = end_of(1, tile.begin[1]);
      for (tile.begin[2] = at[2].next(box.begin[2]); tile.begin[2] < box.end[2];
           tile.begin[2] = at[2].next(tile.end[2])) {
        tile.end[2] = end_of(2, tile.begin[2]);
        visit(tile);
      }
    }
  }
}

/// Calls visit(row number, mask) for every row of a box. The mask is set for the lanes that see the row.
template <typename Visit>
NATTEN_JAX_INLINE void for_each_masked_row(const LaneBlock& block, const Box& box, Visit visit) {
  std::int64_t row = 0;
  for (std::int64_t x = box.begin[0]; x < box.end[0]; ++x) {
    const Mask in_x = holds(block.first[0], block.last[0], static_cast<std::int32_t>(x));
    for (std::int64_t y = box.begin[1]; y < box.end[1]; ++y) {
      const Mask in_plane = in_x & holds(block.first[1], block.last[1], static_cast<std::int32_t>(y));
      for (std::int64_t z = box.begin[2]; z < box.end[2]; ++z) {
        visit(row++, in_plane & holds(block.first[2], block.last[2], static_cast<std::int32_t>(z)));
      }
    }
  }
}

/// Rows of a tile as floats. Rows of float arrays are used in place. Rows of other types are converted into `packed`.
///
/// Args:
///   tile: tokens of the tile.
///   tokens: memory layout of the tokens.
///   data: row of the batch entry's first token, for the head that is read.
///   heads: number of heads, which is the number of rows per token.
///   width: elements per row.
///   packed: space for the tile's rows.
template <typename T>
NATTEN_JAX_INLINE FloatRows float_rows(const Box& tile, const TokenMap& tokens, const T* data, std::int64_t heads,
                                       std::int64_t width, float* packed) {
  const std::int64_t step = heads * width;
  const std::int64_t* begin = tile.begin;
  if constexpr (std::is_same_v<T, float>) {
    return {data + tokens.row(tile.begin) * step,
            {begin[0], begin[1], begin[2]},
            {tokens.pitch[0] * step, tokens.pitch[1] * step, tokens.pitch[2] * step}};
  } else {
    float* target = packed;
    const std::int64_t first = tokens.row(tile.begin);
    for (std::int64_t x = 0; x < tile.end[0] - begin[0]; ++x) {
      for (std::int64_t y = 0; y < tile.end[1] - begin[1]; ++y) {
        const std::int64_t line = first + x * tokens.pitch[0] + y * tokens.pitch[1];
        for (std::int64_t z = 0; z < tile.end[2] - begin[2]; ++z, target += width) {
          widen(data + (line + z * tokens.pitch[2]) * step, target, width);
        }
      }
    }
    const std::int64_t pitch_y = (tile.end[2] - begin[2]) * width;
    const std::int64_t pitch_x = (tile.end[1] - begin[1]) * pitch_y;
    return {packed, {begin[0], begin[1], begin[2]}, {pitch_x, pitch_y, width}};
  }
}

/// Visits the stream tokens that the lane blocks of an item see, in boxes of at most one stream tile.
///
/// If `T` is float, rows are used in place. Each block has separate tiles, which start at the block's hull, so that the
/// number of tiles is minimal. If `T` is another type, rows are converted. All blocks share the tiles, so that each row
/// is converted only once.
///
/// Args:
///   blocks: the lane blocks.
///   count: number of blocks.
///   tokens: memory layout of the streamed tokens.
///   shape: tokens per dimension of a stream tile.
///   locate: locate(tile) returns the rows of a tile.
///   visit: visit(block number, box, rows) is called for each box; `rows` is the result of `locate`.
template <typename T, typename Locate, typename Visit>
NATTEN_JAX_INLINE void stream_boxes(const LaneBlock* blocks, std::int64_t count, const TokenMap& tokens,
                                    const std::int64_t* shape, Locate locate, Visit visit) {
  if constexpr (std::is_same_v<T, float>) {
    for (std::int64_t i = 0; i < count; ++i) {
      for_each_tile(blocks[i].hull, tokens, shape, [&](const Box& tile) { visit(i, tile, locate(tile)); });
    }
  } else {
    for_each_tile(enclosing_hull(blocks, count), tokens, shape, [&](const Box& tile) {
      const auto rows = locate(tile);
      for (std::int64_t i = 0; i < count; ++i) {
        const Box box = common(blocks[i].hull, tile);
        if (!is_empty(box)) visit(i, box, rows);
      }
    });
  }
}

/// Writes the addresses of the rows of a box to `addresses`, in the order of for_each_masked_row.
NATTEN_JAX_INLINE void write_row_addresses(const FloatRows& rows, const Box& box, const float** addresses) {
  for (std::int64_t x = box.begin[0]; x < box.end[0]; ++x) {
    for (std::int64_t y = box.begin[1]; y < box.end[1]; ++y) {
      const float* line = rows.base + (x - rows.begin[0]) * rows.pitch[0] + (y - rows.begin[1]) * rows.pitch[1];
      for (std::int64_t z = box.begin[2]; z < box.end[2]; ++z)
        *addresses++ = line + (z - rows.begin[2]) * rows.pitch[2];
    }
  }
}

NATTEN_JAX_INLINE void clear(float* data, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) data[i] = 0.0f;
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
