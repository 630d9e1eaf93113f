// Key biases in the Hopper kernels. A key's bias is divided by the scale of the logits and added to the unscaled logits
// (products of queries and keys), so the softmax code needs no change.
#pragma once

#include "cuda/common/device_axis.h"
#include "cuda/common/key_bias.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm90 {

/// Factor that converts a bias to a term of unscaled logits. `exponent_scale` is the scale of the logits, times
/// log2(e).
CUTE_DEVICE float products_per_base2_logit(float exponent_scale) {
  return fminf(kLog2E / exponent_scale, FLT_MAX);
}

/// Index of a token among the keys of all batch entries. `kv_slot` is the offset in the key array, in heads, of any
/// key/value head of the token.
template <class Params>
CUTE_DEVICE int token_of_slot(const Params& p, int kv_slot) {
  return kv_slot / p.heads_kv;
}

/// Distance in tokens, in the key array, from a dilation group's first key to its key with indices x, y, z.
CUTE_DEVICE int tokens_to_key(const DeviceAxis (&axis)[3], int x, int y, int z) {
  const int line = x * axis[0].dilation * axis[1].kv_local_extent + y * axis[1].dilation;
  return line * axis[2].kv_local_extent + z * axis[2].dilation;
}

/// Address of the first token's bias for a query head.
template <class Params>
CUTE_DEVICE const float* biases_of_head(const Params& p, int head) {
  return p.key_bias + (p.key_bias_heads == 1 ? 0 : head);
}

}  // namespace natten_jax::sm90
