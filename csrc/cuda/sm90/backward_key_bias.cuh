// Key biases in the backward kernel, and their gradients. The gradient of a key's bias is the sum of dS over the
// queries of a head.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"

namespace natten_jax::sm90 {

/// Key biases and their gradients in one thread. The thread holds elements of two rows of the logits, for two keys.
template <class Traits>
struct RowBiases {
  float in_products[2];  // bias of each key, divided by the scale of the logits
  float sum[2];          // per key: sum of the thread's elements of dS
  int token[2];          // index of each key among the keys of all batch entries; negative without a key

  /// Loads the biases of the keys for a query head, and resets the sums.
  ///
  /// Args:
  ///   plan: plan of the key/value tile.
  ///   rows: coordinates of the tile's rows in the tile.
  ///   row0: first of the thread's two rows; the second one is row0 + 8.
  CUTE_DEVICE void start(const BackwardParams& p, const KeyTilePlan<Traits::kKeys>& plan, const uchar4* rows, int row0,
                         int head) {
    const int first = token_of_slot(p, plan.kv_slot);
    const float per_logit = products_per_base2_logit(plan.scale * kLog2E);
    const float* head_biases = biases_of_head(p, head);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = row0 + 8 * i;
      const int x = plan.kv_begin.x + rows[row].x, y = plan.kv_begin.y + rows[row].y, z = plan.kv_begin.z + rows[row].z;
      // Additional keys have neither biases nor coordinates.
      const bool exists = !plan.is_additional && row < p.kv_tile_tokens && x < plan.axis[0].kv.local_length &&
                          y < plan.axis[1].kv.local_length && z < plan.axis[2].kv.local_length;
      token[i] = exists ? first + tokens_to_key(p.axis, x, y, z) : -1;
      const std::int64_t at = static_cast<std::int64_t>(token[i]) * p.key_bias_heads;
      in_products[i] = exists ? bias_in_products(load_written(head_biases + at), per_logit) : 0.f;
      sum[i] = 0.f;
    }
  }

  /// Adds the sums of the threads that share a row, and stores the gradients of the biases for a query head.
  CUTE_DEVICE void store(const BackwardParams& p, typename Traits::SharedStorage& shared, int row0, int head) {
    const bool is_first = threadIdx.x % 4 == 0;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    }
    bool stores = is_first;
    if constexpr (!Traits::kSplitsKeys) {
      // Each warpgroup has summed over half of the queries. The second one passes its sums to the first one.
      const bool is_other = threadIdx.x >= 2 * kWarpgroup;
      if (is_first && is_other) shared.bias_sums[row0] = sum[0], shared.bias_sums[row0 + 8] = sum[1];
      cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kBiasSumsReady));
      if (is_first && !is_other) sum[0] += shared.bias_sums[row0], sum[1] += shared.bias_sums[row0 + 8];
      cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kBiasSumsReady));
      stores = is_first && !is_other;
    }
    wait_for_previous_kernel();
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(token[i]) * p.heads + head;
      if (stores && token[i] >= 0) p.key_bias_gradient[at] = sum[i];
    }
  }
};

}  // namespace natten_jax::sm90
