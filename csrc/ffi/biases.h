// Decodes and checks the operands that are added to logits.
#pragma once

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Decodes the relative bias and the key biases of a call of the host kernels. `call.problem` must have been decoded
/// before. Empty arrays mean no bias.
xffi::Error decode_biases(const xffi::AnyBuffer& relative_bias, const xffi::AnyBuffer& key_bias, Call& call);

/// Checks the results that hold the gradients of both biases. Each gradient has the shape of its bias.
xffi::Error decode_bias_gradients(xffi::Result<xffi::AnyBuffer> relative_bias, xffi::Result<xffi::AnyBuffer> key_bias,
                                  Call& call);

/// Decodes the relative bias of a call of the kernels for small windows. There is one table per batch entry, or one
/// table that all entries share. An empty array means no bias.
///
/// `products` is scratch memory for the tables in the form that kernels add to products of queries and keys. Its size
/// depends on the shapes of tiles, `rows` and `columns`. Without a bias, it is empty.
xffi::Error decode_tables(const xffi::AnyBuffer& relative_bias, xffi::Result<xffi::AnyBuffer> products,
                          const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank], Call& call);

/// Checks the result buffer that receives the gradient of the relative bias.
xffi::Error decode_table_gradient(xffi::Result<xffi::AnyBuffer> relative_bias, Call& call);

/// Decodes the key biases of a call of GPU kernels. They are separate for each head, or shared by all heads. An empty
/// array means no bias.
xffi::Error decode_key_bias_of_kernels(const xffi::AnyBuffer& key_bias, Call& call);

/// Decodes the sinks of a call of GPU kernels. They are separate for each batch entry, or shared by all entries. An
/// empty array means no sinks.
xffi::Error decode_sinks(const xffi::AnyBuffer& sinks, Call& call);

/// Checks the result for the gradient of the sinks.
xffi::Error decode_sinks_gradient(xffi::Result<xffi::AnyBuffer> sinks, Call& call);

/// Checks the result for the gradient of the key biases. It is separate for each head, even if heads share biases.
xffi::Error decode_key_bias_gradient(xffi::Result<xffi::AnyBuffer> key_bias, Call& call);

}  // namespace natten_jax::ffi
