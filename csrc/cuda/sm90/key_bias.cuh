// Key biases in the Hopper kernels. Products of queries and keys include the key's bias divided by the scale of the
// logits, so the softmax code needs no change.
#pragma once

#include "cuda/common/device_axis.h"
#include "cuda/common/key_bias.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm90 {

/// Factor that converts a bias to a term of the products, given the scale of the logits in base 2.
CUTE_DEVICE float products_per_base2_logit(float exponent_scale) {
  return fminf(kLog2E / exponent_scale, FLT_MAX);
}

/// Token index of a head's slot in the key array, over all batch entries.
template <class Params>
CUTE_DEVICE int token_of_slot(const Params& p, int kv_slot) {
  return kv_slot / p.heads_kv;
}

/// Tokens of the key array from a dilation group's first key to the one at x, y, z in the group.
CUTE_DEVICE int tokens_to_key(const DeviceAxis (&axis)[3], int x, int y, int z) {
  const int line = x * axis[0].dilation * axis[1].kv_local_extent + y * axis[1].dilation;
  return line * axis[2].kv_local_extent + z * axis[2].dilation;
}

/// Biases of a query head, from the first token on.
template <class Params>
CUTE_DEVICE const float* biases_of_head(const Params& p, int head) {
  return p.key_bias + (p.key_bias_heads == 1 ? 0 : head);
}

}  // namespace natten_jax::sm90
