// Copies of tokens to the rows of tiles, by all threads of a CTA.
#pragma once

#include "cuda/common/device_axis.h"
#include "cuda/warp/cp_async.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace natten_jax::sm80 {

/// A thread's part of copying tiles of `kRows_` rows: the same chunk of every kStride-th row.
template <class Tile, int kRows_, int kThreads>
struct Gather {
  static constexpr int kRows = kRows_;
  static constexpr int kPasses = kRows * Tile::kChunks / kThreads;
  static constexpr int kStride = kThreads / Tile::kChunks;  // between two rows of a thread
  static_assert(kPasses * kStride == kRows && kPasses <= 32 && (kStride & (kStride - 1)) == 0);
  const int first = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;

  static constexpr std::uint32_t kAll = static_cast<std::uint32_t>((std::uint64_t(1) << kPasses) - 1);

  /// Starts to copy heads of `head_bytes` of the tokens `tokens[i]`, which are `token_bytes` apart. Rows that are not
  /// `visible` and chunks past the head become zeros.
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

  /// Starts to copy rows whose tokens `token_of` returns for each row; -1 if there is no token.
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

/// Tokens of a box, from which tiles are copied: local tokens of a dilation group.
struct TokenBox {
  int4 begin, end;  // indices: x, y, z
  int4 pitch;       // distance in tokens between neighbors of the group: x, y, z; its first token

  CUTE_DEVICE int token(int x, int y, int z) const { return x * pitch.x + y * pitch.y + z * pitch.z + pitch.w; }
};

/// Coordinates x, y, z of a tile's token in one byte each, and a byte that is zero if the token exists. All bytes are
/// below 128, so that a single subtraction of words compares each byte with its own end.
struct PackedPlace {
  /// Ends as parameter of `is_before`, for a tile that starts at (x, y, z).
  CUTE_DEVICE static std::uint32_t ends(int4 end, int x, int y, int z) {
    const auto in_tile = [](int distance) { return static_cast<std::uint32_t>(min(max(distance, 0), 128)); };
    return (in_tile(end.x - x) | in_tile(end.y - y) << 8 | in_tile(end.z - z) << 16 | 1u << 24) + 0x7f7f7f7fu;
  }

  CUTE_DEVICE static std::uint32_t pack(int3 at, bool exists) {
    return exists ? at.x | at.y << 8 | at.z << 16 : 1u << 24;
  }

  CUTE_DEVICE static bool is_before(std::uint32_t place, std::uint32_t ends) {
    return ((ends - place) & 0x80808080u) == 0x80808080u;
  }
};

/// Positions of the rows of a tile of tokens: in the tile, and relative to its first token. They are stored in the
/// order in which the threads of a `Copy` read them.
template <class Copy>
struct TileRows {
  static constexpr int kMost = 128;

  alignas(16) std::uint32_t places[kMost];  // PackedPlace
  alignas(16) int tokens[kMost];

  /// Index of a row in this order.
  CUTE_DEVICE static int place(int row) {
    return row / Copy::kRows * Copy::kRows + row % Copy::kStride * Copy::kPasses + row % Copy::kRows / Copy::kStride;
  }

  /// Computes the row that a thread is responsible for.
  template <cutlass::FastDivmod DeviceAxis::* kByTile>
  CUTE_DEVICE void fill(const DeviceAxis (&axis)[3], int row, int tile_tokens, int4 pitch) {
    const int3 at = place_in_tile<kByTile>(axis, row);
    const bool exists = row < tile_tokens;
    places[place(row)] = PackedPlace::pack(at, exists);
    tokens[place(row)] = exists ? at.x * pitch.x + at.y * pitch.y + at.z * pitch.z : 0;
  }

  /// True if a row lies before PackedPlace's `ends`.
  CUTE_DEVICE bool is_visible(std::uint32_t ends, int row) const {
    return PackedPlace::is_before(places[place(row)], ends);
  }

  /// Visibility of a thread's rows, one bit per row; `row` is the first row that all threads copy.
  CUTE_DEVICE std::uint32_t visible(const Copy& copy, std::uint32_t ends, int row) const {
    std::uint32_t of_thread[Copy::kPasses], bits = 0;
    load_words(of_thread, places + row + copy.first * Copy::kPasses);
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) {
      bits |= static_cast<std::uint32_t>(PackedPlace::is_before(of_thread[i], ends)) << i;
    }
    return bits;
  }

  CUTE_DEVICE int token(int row) const { return tokens[place(row)]; }

  /// Tokens of a thread's rows, for a tile whose first token is `first`.
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
