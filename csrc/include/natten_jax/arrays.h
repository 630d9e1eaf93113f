// Pointers to the arrays of one call.
#pragma once

#include <cstdint>

namespace natten_jax {

/// Addresses of the arrays, in the memory of the device that computes. An address is null if a pass or backend does not
/// use the array.
struct Arrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;  ///< [2, 3]: query origin, key/value origin; null: zeros.

  const std::int32_t* layouts;  ///< [batch, 3, 3]: query origin, query extents, key/value extents; null: equal layouts.

  // Terms that are added to logits. A relative bias has one number per offset (natten_jax/offset_table.h). Key biases
  // have one number per key. Null means zeros.
  const float* relative_bias;         ///< [relative_bias_tables, heads, entries].
  std::int64_t relative_bias_tables;  ///< Number of batch entries, or 1 if all entries share a table.
  const float* key_bias;              ///< [batch, keys, key_bias_heads]; the last extent is heads or 1.
  std::int64_t key_bias_heads;
  const float* sinks;           ///< [batch_of_sinks, heads]; null if there are no sinks, or if Scale::heads has them.
  std::int64_t batch_of_sinks;  ///< Number of batch entries, or 1 if all entries share sinks.

  const float* out_scales;  ///< [batch, heads]: factors of the output; null: ones. Only for 8-bit elements.

  // Results of the forward pass, and operands of the backward pass.
  void* out;
  float* logsumexp;
  float* remainder;  ///< Remainder of the logsumexp (natten_jax/logsumexp.h); null if not needed, or if it is zero.

  const void* out_cotangent;
  const float* logsumexp_cotangent;  ///< Null: zeros.
  const float* delta;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  void* additional_keys_gradient;
  void* additional_values_gradient;
  float* relative_bias_gradient;
  float* key_bias_gradient;
  float* sinks_gradient;
};

/// Copies pointers to the parameters of a GPU kernel: the operands and results of a forward pass. A backward pass reads
/// some of them.
template <class Params>
void fill_arrays(const Arrays& arrays, Params& p) {
  p.query = arrays.query;
  p.key = arrays.key;
  p.value = arrays.value;
  p.additional_keys = arrays.additional_keys;
  p.additional_values = arrays.additional_values;
  p.origins = arrays.origins;
  p.layouts = arrays.layouts;
  p.out = arrays.out;
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
}

}  // namespace natten_jax
