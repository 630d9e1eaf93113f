// Key biases in the backward kernel, and their gradients. The gradient of a key's bias is the sum of dS over the
// queries of a head.
#pragma once

#include "cuda/common/key_bias.cuh"
#include "cuda/sm80/backward_traits.cuh"

namespace natten_jax::sm80 {

/// The form `Traits` of the kernel with key biases.
template <class Traits>
struct BackwardKeyBiased : Traits {
  static constexpr bool kHasKeyBias = true;

  struct SharedStorage : Traits::SharedStorage {
    float key_bias[Traits::kKeys];  // biases for the current query head, divided by the scale of the logits
    // Several warps compute logits of the same keys and different queries. Each of these warps has its own row of
    // partial sums of dS.
    float bias_sums[Traits::LogitWarps::kColumnWarps][Traits::kKeys];
  };
};

/// A thread's partial gradients of key biases: the sum of its elements of dS per key (row of dS).
template <class Traits>
struct BiasSums {
  static constexpr int kRows = Traits::kLogitRows / 8;  // number of rows of a thread, which are eight apart

  float row_sums[kRows] = {};

  /// Writes the gradients of the biases for a query head and resets the sums. All threads of the CTA must call it.
  CUTE_DEVICE void finish(const BackwardParams& p, typename Traits::SharedStorage& shared, const KeyHead& own,
                          int head) {
    constexpr int kColumnWarps = Traits::LogitWarps::kColumnWarps;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < Traits::kLogitWarps) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float sum = row_sums[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = warp / kColumnWarps * Traits::kLogitRows + lane / 4 + 8 * i;
        if (lane % 4 == 0) shared.bias_sums[warp % kColumnWarps][row] = sum;
        row_sums[i] = 0.f;
      }
    }
    __syncthreads();
    for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
      float sum = 0.f;
      CUTE_UNROLL
      for (int i = 0; i < kColumnWarps; ++i) sum += shared.bias_sums[i][row];
      write(p, shared, own, head, row, sum);
    }
  }

  /// Writes zeros, for a tile whose keys no query attends to.
  CUTE_DEVICE static void write_zeros(const BackwardParams& p, const typename Traits::SharedStorage& shared,
                                      const KeyHead& own) {
    for (int head = 0; head < own.queries; ++head) {
      for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) write(p, shared, own, head, row, 0.f);
    }
  }

 private:
  CUTE_DEVICE static void write(const BackwardParams& p, const typename Traits::SharedStorage& shared,
                                const KeyHead& own, int head, int row, float gradient) {
    const int token = shared.row_windows[row][0].w;
    if (token < 0) return;
    const std::int64_t first_bias = (own.batch * p.keys + token) * p.heads;
    p.key_bias_gradient[first_bias + own.head * own.queries + head] = gradient;
  }
};

/// Placeholder for BiasSums in kernels without key biases.
struct NoBiasSums {};

template <class Traits>
using BiasSumsOf = std::conditional_t<Traits::kHasKeyBias, BiasSums<Traits>, NoBiasSums>;

/// Loads the biases of a tile's keys for a query head. Other threads may read them only after a barrier.
template <class Traits>
CUTE_DEVICE void load_biases(const BackwardParams& p, typename Traits::SharedStorage& shared, const KeyHead& own,
                             int head) {
  const float per_logit = products_per_logit(own.scale(p).logits);
  const int bias_head = p.key_bias_heads == 1 ? 0 : own.head * own.queries + head;
  for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
    const int token = max(shared.row_windows[row][0].w, 0);  // rows without a key load any bias; they are masked later
    const float bias = p.key_bias[(own.batch * p.keys + token) * p.key_bias_heads + bias_head];
    shared.key_bias[row] = bias_in_products(bias, per_logit);
  }
}

/// Sets the logsumexp of queries that attend to no key from -infinity to infinity, so that their weights are zero. Each
/// thread changes the logsumexp that it copied itself, so no barrier is needed between the copy and this call.
template <class Traits>
CUTE_DEVICE void mask_queries_without_keys(typename Traits::SharedStorage& shared, int stage) {
  if (threadIdx.x >= Traits::kQueries) return;
  float& logsumexp = shared.logsumexp[stage][threadIdx.x];
  if (logsumexp == -INFINITY) logsumexp = INFINITY;
}

}  // namespace natten_jax::sm80
