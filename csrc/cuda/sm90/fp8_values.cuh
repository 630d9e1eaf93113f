// Work of the warpgroup that transposes value tiles, in the forward kernel for 8-bit floats.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"

namespace natten_jax::sm90 {

/// Loads four 8x8 matrices of 16-bit elements, and transposes each of them. Each lane passes the address of one matrix
/// row.
CUTE_DEVICE void load_transposed(std::uint32_t address, std::uint32_t (&word)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

CUTE_DEVICE void store_matrices(std::uint32_t address, const std::uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

/// Transposes a value tile from [token][head_dim] to [head_dim][token]. In the result, tokens are permuted within
/// groups of 16, and so are features (elements of a head).
///
/// The instruction ldmatrix transposes matrices of 16-bit elements, so a word of its result contains two features of
/// two tokens. Two such words, whose tokens are eight apart, contain two features of four tokens. Byte permutations
/// convert them to two words with one feature each. So positions 4 t to 4 t + 3 in a group of 16 tokens contain tokens
/// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Lane t of the four lanes that share a row has the weights of these tokens in its
/// accumulator. The lane can therefore use its weights as the register operand of the next product without shuffles.
///
/// In a group of 16 features, even features come first. `store_output` restores their order.
template <class Traits>
CUTE_DEVICE void transpose_tile(std::uint32_t from, std::uint32_t to) {
  constexpr int kTokens = 32, kFeatures = 16;  // extents of the block that a warp transposes at a time
  constexpr int kTokenGroups = Traits::kColumns / kTokens, kFeatureGroups = Traits::kHeadDim / kFeatures;
  constexpr int kRowBytes = Traits::kColumns;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int group = warp % kTokenGroups, token = kTokens * group + lane;
  const int row = lane % 16, chunk = 2 * group + lane / 16;
  const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
  const std::uint32_t token_address = from + token * kSwizzledRow,
                      row_address = to + row * kRowBytes + 16 * (chunk ^ swizzle);
#pragma unroll 4
  for (int c = warp / kTokenGroups; c < kFeatureGroups; c += 4 / kTokenGroups) {
    std::uint32_t pairs[4], transposed[4];
    load_transposed(token_address + c / 8 * Traits::kColumns * kSwizzledRow + 16 * (c % 8 ^ token % 8), pairs);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      transposed[2 * half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x6420);
      transposed[2 * half + 1] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x7531);
    }
    store_matrices(row_address + c * kFeatures * kRowBytes, transposed);
  }
}

/// Transposes the value tiles for all query tiles of the CTA. Runs in one warpgroup.
template <class Traits>
CUTE_DEVICE void transpose_values(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  Ring<Traits::kPlans> slot;
  Ring<Traits::kStages> v;
  Ring<Traits::kValueStages> transposed;
  while (true) {
    slot.wait_full(shared.full_plan);
    const int kv_tiles = shared.plan[slot.index].kv_tiles;
    if (kv_tiles < 0) return;
    arrive(shared.empty_plan[slot.index]);
    slot.advance();
    for (int left = kv_tiles + p.additional_tiles; left > 0; --left) {
      v.wait_full(shared.full_v);
      transposed.wait_empty(shared.empty_transposed);
      transpose_tile<Traits>(
          shared_address(shared.v + v.index * Traits::kColumns * Traits::kLoadedHeadDim),
          shared_address(shared.transposed + transposed.index * Traits::kColumns * Traits::kHeadDim));
      cutlass::arch::fence_view_async_shared();
      arrive(shared.full_transposed[transposed.index]);
      arrive(shared.empty_v[v.index]);
      transposed.advance();
      v.advance();
    }
  }
}

}  // namespace natten_jax::sm90
