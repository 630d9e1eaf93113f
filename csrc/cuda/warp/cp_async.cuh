// Copies from global to shared memory that a thread starts and does not wait for, and how they are addressed.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax {

/// base + token * token_bytes in one instruction: the compiler would add the base to each product.
CUTE_DEVICE const char* advance(const char* base, int token, int token_bytes) {
  const char* result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(token), "r"(token_bytes), "l"(base));
  return result;
}

/// Starts to copy 16 bytes, or to write as many zeros.
CUTE_DEVICE void copy_async(std::uint32_t destination, const void* source, bool is_inside) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(source),
                                                               chunk_at(destination), is_inside);
}

/// Starts to copy 4 bytes, or to write zeros. CuTe's instruction fetches 128 bytes into the second-level cache, of
/// which the rows of neighboring queries lie apart.
CUTE_DEVICE void copy_word_async(std::uint32_t destination, const void* source, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(is_inside ? 4 : 0)
               : "memory");
}

/// Starts to copy the first `bytes` of a chunk, all 16 or none; what is left of it becomes zeros.
///
/// Copies should follow each other: before one that follows a load from shared memory, the compiler puts three
/// instructions that do nothing.
CUTE_DEVICE void copy_chunk(std::uint32_t destination, const char* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(destination), "l"(source), "r"(bytes)
               : "memory");
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

/// Writes a chunk to global memory: the compiler does not know that an address of `advance` lies there.
CUTE_DEVICE void store_chunk(const char* destination, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(destination), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

}  // namespace natten_jax
