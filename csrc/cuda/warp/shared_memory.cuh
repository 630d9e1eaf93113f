// Addresses in shared memory, and accesses to words and chunks of 16 bytes.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/int.hpp>

namespace natten_jax {

CUTE_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Keeps an address in a register. The empty assembly is opaque to the compiler. Otherwise, the compiler would
/// recompute the address from special registers in every step of a loop, which would stall the step.
CUTE_DEVICE std::uint32_t keep_in_register(std::uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

/// Returns the CTA's dynamic shared memory, which starts at `raw`.
///
/// If `kKeepsAddress`, the address of this memory stays in a register. Choose this for kernels with few registers to
/// spare. In other kernels, `kKeepsAddress` costs time, because the compiler then keeps fewer of the values that it
/// derives from the address. For example, the forward pass for heads of 256 dimensions was 4% slower.
template <class Storage, bool kKeepsAddress>
CUTE_DEVICE Storage& shared_storage(char* raw) {
  if constexpr (!kKeepsAddress) return *reinterpret_cast<Storage*>(raw);
  return *static_cast<Storage*>(__cvta_shared_to_generic(keep_in_register(shared_address(raw))));
}

/// Returns the chunk at an address in shared memory, in the type that CuTe's instructions take.
CUTE_DEVICE cute::uint128_t& chunk_at(std::uint32_t address) {
  return *static_cast<cute::uint128_t*>(__cvta_shared_to_generic(address));
}

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

}  // namespace natten_jax
