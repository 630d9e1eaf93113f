// Biases of keys in the forward kernel: copied with the keys of a step, and added to its products.
#pragma once

#include "cuda/sm80/forward_traits.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm80 {

/// A form of the kernel that adds biases of keys.
template <class Traits>
struct KeyBiased : Traits {
  static constexpr bool kHasKeyBias = true;
  /// Steps whose biases are in shared memory: those of the next one are copied before a step's are read.
  static constexpr int kBiasedSteps = Traits::kStages > 2 ? Traits::kStages : 2;

  struct SharedStorage : Traits::SharedStorage {
    alignas(16) float key_bias[kBiasedSteps][Traits::kColumns];
    const float* biases_of_head;  // that of the batch entry's first key
  };
};

/// Notes where the biases of the CTA's head are; steps are loaded after a barrier.
template <class Traits>
CUTE_DEVICE void find_biases(const ForwardParams& p, typename Traits::SharedStorage& shared, int batch, int head) {
  if (threadIdx.x > 0) return;
  shared.biases_of_head = p.key_bias + batch * p.keys * p.key_bias_heads + (p.key_bias_heads == 1 ? 0 : head);
}

/// Starts to copy the biases of a step's keys, of which additional ones have none. Columns that hold no key which a
/// query sees are masked whatever is added to them: they get the bias of some key.
template <class Traits>
CUTE_DEVICE void load_biases(const ForwardParams& p, const typename Traits::SharedStorage& shared, int step) {
  using Steps = KeySteps<Traits::kThreads>;
  if (threadIdx.x >= Traits::kColumns) return;
  const int place = shared.steps.places[step % Steps::kCapacity];
  const int in_tile = (place >> 3) + threadIdx.x;
  const unsigned token = shared.steps.tiles[step % Steps::kCapacity].w + shared.columns.token(in_tile);
  const char* of_head = reinterpret_cast<const char*>(shared.biases_of_head);
  copy_word_async(shared_address(&shared.key_bias[step % Traits::kBiasedSteps][threadIdx.x]),
                  advance(of_head, min(token, static_cast<unsigned>(p.keys) - 1), p.key_bias_heads * 4),
                  (place & Steps::kWindow) != 0);
}

/// Adds them to the step's products, which a logit is `per_logit` of. A negative bias that is so no number hides its
/// key.
template <class Traits, int kRowBlocks>
CUTE_DEVICE void add_biases(float (&s)[kRowBlocks][Traits::kColumns / 8][4],
                            const typename Traits::SharedStorage& shared, int step, float per_logit) {
  const float* biases = shared.key_bias[step % Traits::kBiasedSteps] + 2 * (threadIdx.x % 4);
  CUTE_UNROLL
  for (int n = 0; n < Traits::kColumns / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(biases + 8 * n);
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) s[m][n][e] = (e % 2 == 0 ? pair.x : pair.y) * per_logit;
    }
  }
}

}  // namespace natten_jax::sm80
