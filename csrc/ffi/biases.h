// Decodes and checks the operands that are added to logits.
#pragma once

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Decodes the relative bias and the key biases of a call of the host kernels. Needs the decoded problem. Empty arrays
/// mean no bias.
xffi::Error decode_biases(const xffi::AnyBuffer& relative_bias, const xffi::AnyBuffer& key_bias, Call& call);

/// Checks the results for the gradients of both biases, which have the shapes of the biases.
xffi::Error decode_bias_gradients(xffi::Result<xffi::AnyBuffer> relative_bias, xffi::Result<xffi::AnyBuffer> key_bias,
                                  Call& call);

/// Decodes the relative bias of a call of the kernels for small windows: a table per batch entry, or a table for all
/// entries. An empty array means no bias. `products` is scratch for the tables as terms of products of queries and
/// keys, for tiles of shapes `rows` and `columns`; it is empty without a bias.
xffi::Error decode_tables(const xffi::AnyBuffer& relative_bias, xffi::Result<xffi::AnyBuffer> products,
                          const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank], Call& call);

/// Checks the result for the gradient of the relative bias.
xffi::Error decode_table_gradient(xffi::Result<xffi::AnyBuffer> relative_bias, Call& call);

/// Decodes the key biases of a call of GPU kernels, per head or for all heads. An empty array means no bias.
xffi::Error decode_key_bias_of_kernels(const xffi::AnyBuffer& key_bias, Call& call);

/// Decodes the sinks of a call of GPU kernels, per batch entry or for all entries. An empty array means no sinks.
xffi::Error decode_sinks(const xffi::AnyBuffer& sinks, Call& call);

/// Checks the result for the gradient of the sinks.
xffi::Error decode_sinks_gradient(xffi::Result<xffi::AnyBuffer> sinks, Call& call);

/// Checks the result for the gradient of the key biases, per head.
xffi::Error decode_key_bias_gradient(xffi::Result<xffi::AnyBuffer> key_bias, Call& call);

}  // namespace natten_jax::ffi
