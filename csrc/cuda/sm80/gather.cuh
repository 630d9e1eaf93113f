// Copies of rows of tokens into tiles, by all threads of a CTA.
#pragma once

#include "cuda/common/axis.h"
#include "cuda/sm80/shared_tile.cuh"

namespace natten_jax::sm80 {

/// A thread's part of copying tiles of `kRows` rows: one chunk of a few consecutive rows.
template <class Tile, int kRows, int kThreads>
struct Gather {
  static constexpr int kPasses = kRows * Tile::kChunks / kThreads;
  static_assert(kPasses * kThreads == kRows * Tile::kChunks && kPasses <= 32);
  const int first = threadIdx.x / Tile::kChunks * kPasses, chunk = threadIdx.x % Tile::kChunks;

  /// Starts to copy rows of `head_bytes` whose tokens lie `tokens[i]` after `base`, in tokens of `token_bytes`; rows
  /// that are not `visible` and chunks past the head become zeros.
  CUTE_DEVICE void copy(std::uint32_t tile, const char* base, int token_bytes, int head_bytes,
                        const int (&tokens)[kPasses], std::uint32_t visible) const {
    base += chunk * 16;
    visible = chunk * 16 < head_bytes ? visible : 0;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const char* source = base + static_cast<std::int64_t>(tokens[i]) * token_bytes;
      copy_async(tile + Tile::offset(first + i, chunk), source, (visible >> i & 1) != 0);
    }
  }

  /// As `copy`, for rows whose tokens a function of the row says; -1 is none.
  template <class TokenOf>
  CUTE_DEVICE void copy_tokens(std::uint32_t tile, const char* base, int token_bytes, int head_bytes,
                               const TokenOf& token_of) const {
    int tokens[kPasses];
    std::uint32_t visible = 0;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      tokens[i] = token_of(first + i);
      visible |= static_cast<std::uint32_t>(tokens[i] >= 0) << i;
    }
    copy(tile, base, token_bytes, head_bytes, tokens, visible);
  }
};

/// The tokens of a box, of which tiles are copied: local tokens of a dilation group.
struct TokenBox {
  int4 begin, end;  // indices: x, y, z
  int4 pitch;       // tokens between neighbors of the group: x, y, z; its first token

  CUTE_DEVICE int token(int x, int y, int z) const { return x * pitch.x + y * pitch.y + z * pitch.z + pitch.w; }
};

/// Where the rows of a tile of tokens lie: in the tile, and relative to its first token.
struct TileRows {
  static constexpr int kMost = 128;

  uchar4 coordinates[kMost];  // x, y, z
  alignas(16) int tokens[kMost];

  /// Works out the row that a thread is responsible for.
  CUTE_DEVICE void fill(int row, int tile_tokens, int y_extent, int z_extent, int4 pitch) {
    const int line = row / z_extent;
    // Rows past the tile lie in no window.
    const uchar4 at = row < tile_tokens ? make_uchar4(line / y_extent, line % y_extent, row % z_extent, 0)
                                        : make_uchar4(255, 0, 0, 0);
    coordinates[row] = at;
    tokens[row] = at.x * pitch.x + at.y * pitch.y + at.z * pitch.z;
  }

  /// Which of `kCount` rows from `first` on lie before `end`, for a tile that starts at (x, y, z).
  template <int kCount>
  CUTE_DEVICE std::uint32_t visible(int4 end, int x, int y, int z, int first, int tile_tokens) const {
    std::uint32_t bits = 0;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uchar4 at = coordinates[first + i];
      const bool is_visible = first + i < tile_tokens && x + at.x < end.x && y + at.y < end.y && z + at.z < end.z;
      bits |= static_cast<std::uint32_t>(is_visible) << i;
    }
    return bits;
  }

  template <int kCount>
  CUTE_DEVICE void load(int (&result)[kCount], int first) const {
    if constexpr (kCount % 4 != 0) {
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) result[i] = tokens[first + i];
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kCount; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(&tokens[first + i]);
        result[i] = four.x;
        result[i + 1] = four.y;
        result[i + 2] = four.z;
        result[i + 3] = four.w;
      }
    }
  }
};

}  // namespace natten_jax::sm80
