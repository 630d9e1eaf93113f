// Pointers to the arrays of one call.
#pragma once

#include <cstdint>

namespace natten_jax {

/// Where the arrays lie, in the memory of the device that computes; null where a pass or backend has no use for one.
struct Arrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;  ///< [2, 3]: query origin, key/value origin; null: zeros.

  const std::int32_t* layouts;  ///< [batch, 3, 3]: query origin, query extents, key/value extents; null: all alike.

  // What is added to logits: of offsets (natten_jax/offset_table.h), and of keys. Null: nothing.
  const float* relative_bias;         ///< [relative_bias_tables, heads, entries]:
  std::int64_t relative_bias_tables;  ///< one for each batch entry, or one for all of them.
  const float* key_bias;              ///< [batch, keys, heads]; or likewise with one number for all of them:
  std::int64_t key_bias_heads;
  const float* sinks;           ///< [batch_of_sinks, heads]; null: none, or beside scales (Scale).
  std::int64_t batch_of_sinks;  ///< Batch entries, or one for all of them.

  const float* out_scales;  ///< [batch, heads]: factors of the output; null: ones. Of 8-bit elements alone.

  // What the forward pass finds, and the backward pass is given.
  void* out;
  float* logsumexp;
  float* remainder;  ///< The logsumexp's (natten_jax/logsumexp.h); null where nobody wants it, or it is all zeros.

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

/// Fills in what kernels of GPUs are launched with: the arrays that a forward pass reads and writes, and those of them
/// that a backward pass reads.
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
