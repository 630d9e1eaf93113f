// Tiles in shared memory, which a warp reads and writes as matrices of 8 rows of 16 bytes.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax {

/// Rows of `kRowBytes`, swizzled: 16-byte chunks are permuted so that the same chunk of eight consecutive rows, or two
/// neighboring chunks of every second one of eight rows, lie in different banks.
///
/// cute::Swizzle permutes in the same way, but then the compiler computes row permutations that are constants here: the
/// backward kernel for heads of 128 has 5120 instructions with it and 5024 without.
template <int kRowBytes_>
struct SharedTile {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPermuted = kChunks < 8 ? kChunks : 8;
  static_assert(kChunks % kPermuted == 0 && (kPermuted & (kPermuted - 1)) == 0);

  /// Number that is XORed with the chunk numbers of a row.
  CUTE_HOST_DEVICE static constexpr int permutation(int row) { return (row & 7) / (8 / kPermuted); }

  /// Offset of a chunk in bytes.
  CUTE_HOST_DEVICE static constexpr std::uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) << 4);
  }

  /// Address of the chunk `rows` below the chunk at `address`. The sum of both row numbers must equal their bitwise or.
  CUTE_HOST_DEVICE static constexpr std::uint32_t later_row(std::uint32_t address, int rows) {
    return (address ^ (permutation(rows) << 4)) + rows * kRowBytes;
  }

  /// Base address of a lane. Rows in multiples of 8 and chunks in multiples of 2 can be added to it.
  struct Lane {
    std::uint32_t base;

    CUTE_DEVICE Lane(std::uint32_t tile, int row, int chunk) : base(tile + offset(row, chunk)) {}

    CUTE_DEVICE std::uint32_t at(int rows, int chunks) const {
      return (base ^ ((chunks % kPermuted) << 4)) + rows * kRowBytes + chunks / kPermuted * (kPermuted * 16);
    }
  };
};

/// Loads four 8x8 matrices of 16-bit elements, or 8x4 of 32-bit elements; lane i passes the address of a row of matrix
/// i / 8.
CUTE_DEVICE void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U32x4_LDSM_N::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

CUTE_DEVICE void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U16x8_LDSM_T::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

/// Stores matrices, which requires compute capability 9.0.
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
