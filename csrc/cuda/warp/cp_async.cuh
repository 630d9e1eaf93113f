// Asynchronous copies from global to shared memory (cp.async), and their addresses.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax {

/// Computes base + token * token_bytes in one instruction. Without this function, the compiler emits a separate
/// addition of `base` after each multiplication.
CUTE_DEVICE const char* advance(const char* base, int token, int token_bytes) {
  const char* result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(token), "r"(token_bytes), "l"(base));
  return result;
}

/// Starts to copy 16 bytes. If `is_inside` is false, writes 16 zero bytes instead.
CUTE_DEVICE void copy_async(std::uint32_t destination, const void* source, bool is_inside) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(source),
                                                               chunk_at(destination), is_inside);
}

/// Starts to copy 4 bytes. If `is_inside` is false, writes zeros instead. CuTe's instruction would also prefetch 128
/// bytes into L2. This does not help, because the values of neighboring queries are further apart.
CUTE_DEVICE void copy_word_async(std::uint32_t destination, const void* source, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(is_inside ? 4 : 0)
               : "memory");
}

/// Starts to copy a chunk of 16 bytes if `bytes` is 16, or to write 16 zero bytes if it is 0.
///
/// Issue copies back to back: the compiler puts three no-ops between a load from shared memory and a later copy.
CUTE_DEVICE void copy_chunk(std::uint32_t destination, const char* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

CUTE_DEVICE void commit_copies() {
  cute::cp_async_fence();
}

/// Waits until at most `kPending` of this thread's most recent groups of copies are in flight. If `kPending` is 0,
/// CuTe's function waits for all copies instead, which takes one more instruction.
template <int kPending>
CUTE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Writes a chunk of 16 bytes to global memory. It needs inline assembly, because the compiler cannot infer that an
/// address from `advance` is in global memory.
CUTE_DEVICE void store_chunk(const char* destination, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(destination), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

}  // namespace natten_jax
