// Tiles in shared memory: asynchronous copies into them, and the lanes' addresses for reading them as matrices.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/config.hpp>

namespace natten_jax::sm80 {

/// Rows of `kRowBytes`, whose 16-byte chunks are permuted so that a chunk of eight consecutive rows, or two
/// neighboring chunks of every other of eight rows, lie in different banks.
///
/// cute::Swizzle permutes the same way, but with it the compiler works rows' permutations out that are constants here:
/// the backward kernel for heads of 128 has 5120 instructions with it and 5024 without.
template <int kRowBytes_>
struct SharedTile {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPermuted = kChunks < 8 ? kChunks : 8;
  static_assert(kChunks % kPermuted == 0 && (kPermuted & (kPermuted - 1)) == 0);

  /// What the chunk numbers of a row are permuted by.
  CUTE_HOST_DEVICE static constexpr int permutation(int row) { return (row & 7) / (8 / kPermuted); }

  /// Offset of a chunk in bytes.
  CUTE_HOST_DEVICE static constexpr std::uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) << 4);
  }

  /// The address of the chunk `rows` below that at `address`, where the lower row's number is no more than their or.
  CUTE_HOST_DEVICE static constexpr std::uint32_t later_row(std::uint32_t address, int rows) {
    return (address ^ (permutation(rows) << 4)) + rows * kRowBytes;
  }

  /// The address that a lane reads from, to which rows in multiples of 8 and chunks in multiples of 2 are added.
  struct Lane {
    std::uint32_t base;

    CUTE_DEVICE Lane(std::uint32_t tile, int row, int chunk) : base(tile + offset(row, chunk)) {}

    CUTE_DEVICE std::uint32_t at(int rows, int chunks) const {
      return (base ^ ((chunks % kPermuted) << 4)) + rows * kRowBytes + chunks / kPermuted * (kPermuted * 16);
    }
  };
};

CUTE_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// An address that stays in a register: opaque, so that the compiler does not work it out anew in every step from
/// special registers, for which the step would wait.
CUTE_DEVICE std::uint32_t kept(std::uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

/// The CTA's dynamic shared memory, which starts at `raw`.
///
/// Its address is kept where `kIsKept`: for kernels with few registers to spare. In others the compiler keeps more than
/// the address on its own, and less where it must keep that: the forward pass for heads of 256 was 4% slower.
template <class Storage, bool kIsKept>
CUTE_DEVICE Storage& shared_storage(char* raw) {
  if constexpr (!kIsKept) return *reinterpret_cast<Storage*>(raw);
  return *static_cast<Storage*>(__cvta_shared_to_generic(kept(shared_address(raw))));
}

/// What lies at an address in shared memory, as CuTe's instructions take it.
CUTE_DEVICE cute::uint128_t& chunk_at(std::uint32_t address) {
  return *static_cast<cute::uint128_t*>(__cvta_shared_to_generic(address));
}

/// Starts to copy 16 bytes, or to write as many zeros.
CUTE_DEVICE void copy_async(std::uint32_t destination, const void* source, bool is_inside) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(source),
                                                               chunk_at(destination), is_inside);
}

CUTE_DEVICE void commit_copies() {
  cute::cp_async_fence();
}

/// Waits until at most `kPending` of this thread's latest groups of copies are under way. CuTe's function waits for all
/// copies instead where that is 0, which is one more instruction.
template <int kPending>
CUTE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements, or 8x4 of 32-bit ones; lane i names a row of matrix i / 8.
CUTE_DEVICE void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U32x4_LDSM_N::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

CUTE_DEVICE void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  cute::SM75_U16x8_LDSM_T::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}

/// The other way round, which takes compute capability 9.0.
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

CUTE_DEVICE std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

CUTE_DEVICE void store_word(std::uint32_t address, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

CUTE_DEVICE void store_words(std::uint32_t address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}

CUTE_DEVICE uint4 load_chunk(std::uint32_t address) {
  uint4 chunk;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(address)
               : "memory");
  return chunk;
}

}  // namespace natten_jax::sm80
