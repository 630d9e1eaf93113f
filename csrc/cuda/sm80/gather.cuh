// Copies of tokens from arrays to the rows of tiles in shared memory, by all threads of a CTA.
#pragma once

#include "cuda/common/device_axis.h"
#include "cuda/warp/cp_async.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace natten_jax::sm80 {

/// Copies tiles of `kRows_` rows. A thread copies the same chunk of 16 bytes in every kStride-th row.
template <class Tile, int kRows_, int kThreads>
struct Gather {
  static constexpr int kRows = kRows_;
  static constexpr int kPasses = kRows * Tile::kChunks / kThreads;
  static constexpr int kStride = kThreads / Tile::kChunks;  // number of rows from one row of a thread to its next row
  static_assert(kPasses * kStride == kRows && kPasses <= 32 && (kStride & (kStride - 1)) == 0);
  const int first = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;

  static constexpr std::uint32_t kAll = static_cast<std::uint32_t>((std::uint64_t(1) << kPasses) - 1);

  /// Starts the copies of this thread. Its `i`th row receives the head of token `tokens[i]`. A head has `head_bytes`,
  /// and neighboring tokens are `token_bytes` apart. Chunks past the head become zeros, as do rows whose bit of
  /// `visible` is zero.
  CUTE_DEVICE void copy(std::uint32_t tile, const char* base, int token_bytes, int head_bytes,
                        const int (&tokens)[kPasses], std::uint32_t visible) const {
    base += chunk * 16;
    const bool is_inside = chunk * 16 < head_bytes;
    const std::uint32_t destination = tile + Tile::offset(first, chunk);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      copy_async(Tile::later_row(destination, i * kStride), advance(base, tokens[i], token_bytes),
                 is_inside && (visible >> i & 1) != 0);
    }
  }

  /// Starts the copies of this thread. `token_of(row)` returns the token of a row, or -1 for a row of zeros.
  template <class TokenOf>
  CUTE_DEVICE void copy_tokens(std::uint32_t tile, const char* base, int token_bytes, int head_bytes,
                               const TokenOf& token_of) const {
    int tokens[kPasses];
    std::uint32_t visible = 0;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      tokens[i] = token_of(first + i * kStride);
      visible |= static_cast<std::uint32_t>(tokens[i] >= 0) << i;
    }
    copy(tile, base, token_bytes, head_bytes, tokens, visible);
  }
};

/// A box of the local tokens of a dilation group. Tiles are copied from it.
struct TokenBox {
  int4 begin, end;  // indices in the group: x, y, z
  int4 pitch;       // x, y, z: distance in tokens between neighbors in the group; w: first token of the group

  CUTE_DEVICE int token(int x, int y, int z) const { return x * pitch.x + y * pitch.y + z * pitch.z + pitch.w; }
};

/// Position of a token in a tile, packed into a word. Three bytes hold its coordinates x, y, z. The fourth byte is zero
/// if the token exists, and otherwise one. All bytes are below 128, so that one subtraction of words compares all
/// coordinates with the end of a box.
struct PackedPosition {
  /// Packs the end of a box for `is_before`, relative to the first token (x, y, z) of a tile.
  CUTE_DEVICE static std::uint32_t ends(int4 end, int x, int y, int z) {
    const auto in_tile = [](int distance) { return static_cast<std::uint32_t>(min(max(distance, 0), 128)); };
    return (in_tile(end.x - x) | in_tile(end.y - y) << 8 | in_tile(end.z - z) << 16 | 1u << 24) + 0x7f7f7f7fu;
  }

  CUTE_DEVICE static std::uint32_t pack(int3 at, bool exists) {
    return exists ? at.x | at.y << 8 | at.z << 16 : 1u << 24;
  }

  CUTE_DEVICE static bool is_before(std::uint32_t position, std::uint32_t ends) {
    return ((ends - position) & 0x80808080u) == 0x80808080u;
  }
};

/// Positions of the rows of a tile. Each row has a position in the tile, and a token relative to the tile's first
/// token. Rows are stored in the order in which the threads of a `Copy` read them.
template <class Copy>
struct TileRows {
  static constexpr int kMost = 128;

  alignas(16) std::uint32_t positions[kMost];  // PackedPosition
  alignas(16) int tokens[kMost];

  /// Index of a row in `positions` and `tokens`.
  CUTE_DEVICE static int index(int row) {
    return row / Copy::kRows * Copy::kRows + row % Copy::kStride * Copy::kPasses + row % Copy::kRows / Copy::kStride;
  }

  /// Computes the position of one row. `pitch` is as in TokenBox.
  template <cutlass::FastDivmod DeviceAxis::* kByTile>
  CUTE_DEVICE void fill(const DeviceAxis (&axis)[3], int row, int tile_tokens, int4 pitch) {
    const int3 at = position_in_tile<kByTile>(axis, row);
    const bool exists = row < tile_tokens;
    positions[index(row)] = PackedPosition::pack(at, exists);
    tokens[index(row)] = exists ? at.x * pitch.x + at.y * pitch.y + at.z * pitch.z : 0;
  }

  /// True if a row has a token, and the token lies before `ends`, a result of PackedPosition::ends, in every dimension.
  CUTE_DEVICE bool is_visible(std::uint32_t ends, int row) const {
    return PackedPosition::is_before(positions[index(row)], ends);
  }

  /// `is_visible` of the rows that this thread copies, one bit per row. `row` is the first row that the threads copy.
  CUTE_DEVICE std::uint32_t visible(const Copy& copy, std::uint32_t ends, int row) const {
    std::uint32_t thread_positions[Copy::kPasses], bits = 0;
    load_words(thread_positions, positions + row + copy.first * Copy::kPasses);
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) {
      bits |= static_cast<std::uint32_t>(PackedPosition::is_before(thread_positions[i], ends)) << i;
    }
    return bits;
  }

  CUTE_DEVICE int token(int row) const { return tokens[index(row)]; }

  /// Tokens of the rows that this thread copies. `row` is the first row that the threads copy, and `first` is the first
  /// token of the tile.
  CUTE_DEVICE void load(const Copy& copy, int (&result)[Copy::kPasses], int row, int first) const {
    load_words(result, tokens + row + copy.first * Copy::kPasses);
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) result[i] += first;
  }

 private:
  template <class Word>
  CUTE_DEVICE static void load_words(Word (&result)[Copy::kPasses], const Word* words) {
    constexpr int kAtOnce = Copy::kPasses % 4 == 0 ? 4 : 1;
    struct alignas(kAtOnce * sizeof(Word)) Words {
      Word word[kAtOnce];
    };
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; i += kAtOnce) {
      const Words some = *reinterpret_cast<const Words*>(words + i);
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) result[i + j] = some.word[j];
    }
  }
};

}  // namespace natten_jax::sm80
