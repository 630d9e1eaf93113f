// What a call adds to its logits, checked.
#pragma once

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Decodes the relative bias and the bias of keys of a call of the host kernels whose problem is known; none where an
/// array is empty.
xffi::Error decode_biases(const xffi::AnyBuffer& relative_bias, const xffi::AnyBuffer& key_bias, Call& call);

/// Checks the results that are their gradients, as large as they are.
xffi::Error decode_bias_gradients(xffi::Result<xffi::AnyBuffer> relative_bias, xffi::Result<xffi::AnyBuffer> key_bias,
                                  Call& call);

/// Decodes the relative bias of a call of the kernels for small windows: a table for each batch entry, or one for all
/// of them; none where the array is empty. `products`, where tables come in products of queries and keys for tiles of
/// these shapes, is likewise.
xffi::Error decode_tables(const xffi::AnyBuffer& relative_bias, xffi::Result<xffi::AnyBuffer> products,
                          const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank], Call& call);

/// Checks the result that is its gradient.
xffi::Error decode_table_gradient(xffi::Result<xffi::AnyBuffer> relative_bias, Call& call);

/// Decodes the biases of keys of a call of kernels for GPUs, of each head or one for all heads; none where the array is
/// empty.
xffi::Error decode_key_bias_of_kernels(const xffi::AnyBuffer& key_bias, Call& call);

/// Decodes the sinks of a call of the same kernels, of each batch entry or for all of them; none likewise.
xffi::Error decode_sinks(const xffi::AnyBuffer& sinks, Call& call);

/// Checks the result that is their gradient.
xffi::Error decode_sinks_gradient(xffi::Result<xffi::AnyBuffer> sinks, Call& call);

/// Checks the result that is their gradient, of each head.
xffi::Error decode_key_bias_gradient(xffi::Result<xffi::AnyBuffer> key_bias, Call& call);

}  // namespace natten_jax::ffi
