// Key biases in the forward kernel. They are copied together with the keys of a step, and are the initial values of the
// accumulators of the products of queries and keys.
#pragma once

#include "cuda/common/key_bias.cuh"
#include "cuda/sm80/forward_traits.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm80 {

/// The form `Traits` of the kernel with key biases.
template <class Traits>
struct KeyBiased : Traits {
  static constexpr bool kHasKeyBias = true;
  /// Number of steps whose biases fit into shared memory at a time. At least two, because the biases of the next step
  /// are copied before all warps have read those of the current step.
  static constexpr int kBiasedSteps = Traits::kStages > 2 ? Traits::kStages : 2;
  /// True if `prepare_biases` converts the biases of a step in shared memory, before the barrier at the beginning of
  /// the step. It divides them by the scale of the logits and stores each pair of biases twice, so that a lane loads
  /// the four initial values of a block of products at once. Forms with a ring have no such barrier, so lanes convert
  /// biases when they read them.
  static constexpr bool kPreparesBiases = !Traits::kIsRing;

  struct SharedStorage : Traits::SharedStorage {
    alignas(16) float key_bias[kBiasedSteps][(kPreparesBiases ? 2 : 1) * Traits::kColumns];
    const float* biases_of_head;  // address of the bias of the batch entry's first key, for the CTA's head
    float products_per_logit;
  };

  /// Index of a column's bias in `key_bias` of a step.
  CUTE_DEVICE static int bias_index(int column) { return kPreparesBiases ? column / 2 * 4 + column % 2 : column; }
};

/// Stores the address of the biases for the CTA's head, and their conversion factor, in shared memory. `load_biases`
/// may be called only after a barrier.
template <class Traits>
CUTE_DEVICE void find_biases(const ForwardParams& p, typename Traits::SharedStorage& shared, int batch, int head) {
  if (threadIdx.x > 0) return;
  shared.biases_of_head = p.key_bias + batch * p.keys * p.key_bias_heads + (p.key_bias_heads == 1 ? 0 : head);
  shared.products_per_logit = products_per_logit(p.scale.for_head(batch * p.heads + head).logits);
}

/// Starts the copies of the biases of a step's keys. Additional keys have a bias of zero. Columns without a key get the
/// bias of an arbitrary key, because their logits are masked anyway.
template <class Traits>
CUTE_DEVICE void load_biases(const ForwardParams& p, const typename Traits::SharedStorage& shared, int step) {
  using Steps = KeySteps<Traits::kThreads>;
  const int column = threadIdx.x;
  if (column >= Traits::kColumns) return;
  const int packed_column = shared.steps.packed_columns[step % Steps::kCapacity];
  const unsigned token =
      shared.steps.tiles[step % Steps::kCapacity].w + shared.columns.token((packed_column >> 3) + column);
  const char* head_biases = reinterpret_cast<const char*>(shared.biases_of_head);
  copy_word_async(shared_address(&shared.key_bias[step % Traits::kBiasedSteps][Traits::bias_index(column)]),
                  advance(head_biases, min(token, static_cast<unsigned>(p.keys) - 1), p.key_bias_heads * 4),
                  (packed_column & Steps::kWindow) != 0);
}

/// Divides a step's biases by the scale of the logits, so that they can be added to products of queries and keys. Each
/// thread converts the bias that it copied itself, so no barrier is needed between the copy and this call.
template <class Traits>
CUTE_DEVICE void prepare_biases(typename Traits::SharedStorage& shared, int step) {
  if (!Traits::kPreparesBiases || threadIdx.x >= Traits::kColumns) return;
  float* copied = &shared.key_bias[step % Traits::kBiasedSteps][Traits::bias_index(threadIdx.x)];
  copied[0] = copied[2] = bias_in_products(copied[0], shared.products_per_logit);
}

/// Initialises the accumulators of a step's products of queries and keys with the biases.
template <class Traits, int kRowBlocks>
CUTE_DEVICE void start_at_biases(float (&s)[kRowBlocks][Traits::kColumns / 8][4],
                                 const typename Traits::SharedStorage& shared, int step) {
  const float* biases = shared.key_bias[step % Traits::kBiasedSteps];
  CUTE_UNROLL
  for (int n = 0; n < Traits::kColumns / 8; ++n) {
    const float* lane_biases = biases + Traits::bias_index(8 * n + 2 * (threadIdx.x % 4));
    float4 block;
    if constexpr (Traits::kPreparesBiases) {
      block = *reinterpret_cast<const float4*>(lane_biases);
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(lane_biases);
      block.x = block.z = bias_in_products(pair.x, shared.products_per_logit);
      block.y = block.w = bias_in_products(pair.y, shared.products_per_logit);
    }
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      s[m][n][0] = block.x, s[m][n][1] = block.y, s[m][n][2] = block.z, s[m][n][3] = block.w;
    }
  }
}

}  // namespace natten_jax::sm80
