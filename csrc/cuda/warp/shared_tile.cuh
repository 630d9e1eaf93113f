// Tiles in shared memory, which a warp reads and writes as matrices of 8 rows of 16 bytes.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax {

/// Tile of rows of `kRowBytes` bytes. Rows are swizzled, which permutes their 16-byte chunks. The chunks with the same
/// index in eight consecutive rows then lie in different banks. If rows have at least 128 bytes, this also holds for
/// pairs of neighboring chunks: the same pair in the four even rows (or in the four odd rows) of eight consecutive
/// rows.
///
/// The permutation is that of cute::Swizzle. With cute::Swizzle, however, the compiler computes row permutations that
/// are constants here: the backward kernel for heads of 128 dimensions has 5120 instructions with it and 5024 without.
template <int kRowBytes_>
struct SharedTile {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPermuted = kChunks < 8 ? kChunks : 8;
  static_assert(kChunks % kPermuted == 0 && (kPermuted & (kPermuted - 1)) == 0);

  /// Number that is XORed with the chunk indices of a row.
  CUTE_HOST_DEVICE static constexpr int permutation(int row) { return (row & 7) / (8 / kPermuted); }

  /// Offset of a chunk in bytes.
  CUTE_HOST_DEVICE static constexpr std::uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) << 4);
  }

  /// Address of the chunk that is `rows` rows after the chunk at `address`. No bit may be set both in `rows` and in the
  /// row number of the chunk at `address`.
  CUTE_HOST_DEVICE static constexpr std::uint32_t later_row(std::uint32_t address, int rows) {
    return (address ^ (permutation(rows) << 4)) + rows * kRowBytes;
  }

  /// Base address of a lane. `at` returns the address that is `rows` rows and `chunks` chunks after it. `rows` must be
  /// a multiple of 8, and `chunks` a multiple of 2.
  struct Lane {
    std::uint32_t base;

    CUTE_DEVICE Lane(std::uint32_t tile, int row, int chunk) : base(tile + offset(row, chunk)) {}

    CUTE_DEVICE std::uint32_t at(int rows, int chunks) const {
      return (base ^ ((chunks % kPermuted) << 4)) + rows * kRowBytes + chunks / kPermuted * (kPermuted * 16);
    }
  };
};

/// Loads four matrices, each of 8x8 elements of 16 bits or 8x4 elements of 32 bits. Lane 8 * m + r passes the address
/// of row r of matrix m.
CUTE_DEVICE void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U32x4_LDSM_N::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

CUTE_DEVICE void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U16x8_LDSM_T::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

/// Stores four matrices of 8x8 elements of 16 bits. Requires compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kStoresMatrices = true;
CUTE_DEVICE void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#else
inline constexpr bool kStoresMatrices = false;
CUTE_DEVICE void store_matrices(std::uint32_t, const std::uint32_t (&)[4]) {}
#endif

}  // namespace natten_jax
