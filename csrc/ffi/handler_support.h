// Shared code of all XLA FFI handlers of this library.
#pragma once

#include <array>
#include <exception>
#include <string>
#include <utility>

#include "ffi/decode.h"
#include "natten_jax/status.h"

namespace natten_jax::ffi {

/// Runs a handler's body. Exceptions must not leave a handler: XLA calls it through a C interface.
template <typename Body>
xffi::Error guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& exception) {
    return xffi::Error(xffi::ErrorCode::kInternal, std::string("natten_jax: ") + exception.what());
  } catch (...) {
    return xffi::Error(xffi::ErrorCode::kInternal, "natten_jax: unknown exception");
  }
}

/// Converts the status of a call to an XLA error.
xffi::Error error_of(const Status& status);

/// Checks an operand or result with values per query and head: one float32 number if `is_statistic`, otherwise
/// head_dim_v elements of the output's type.
xffi::Error check_query_array(const char* name, const xffi::AnyBuffer& array, const Problem& p, bool is_statistic);

/// Checks the array of logsumexp remainders (natten_jax/logsumexp.h). It has the shape of the logsumexp, or is empty.
/// If it is empty, sets `values` to null.
xffi::Error check_remainder(const char* name, const xffi::AnyBuffer& array, const Problem& p, float*& values);

/// The results of a forward pass.
struct ForwardResults {
  xffi::Result<xffi::AnyBuffer> out, logsumexp, remainder;
};

/// Decodes and checks a call of a forward pass, including its results. See `decode_call` for the other arguments.
xffi::Error decode_forward(const ProblemOperands& operands, ForwardResults results, const xffi::Dictionary& dictionary,
                           std::int64_t further, Memory memory, Call& call, Elements elements = Elements::kWide);

/// Operands of a backward pass that have values per query. A pointer is null if the target does not take the operand.
struct Saved {
  const xffi::AnyBuffer *logsumexp, *remainder, *out, *out_cotangent, *logsumexp_cotangent, *delta;
};

/// The gradients of query, key, value and additional keys and values.
using Gradients = std::array<xffi::Result<xffi::AnyBuffer>, 5>;

/// Decodes and checks a call of a backward pass, including the layouts of its batch entries.
xffi::Error decode_backward(const ProblemOperands& operands, const xffi::AnyBuffer& layouts, const Saved& saved,
                            Gradients gradients, const xffi::Dictionary& dictionary, std::int64_t further,
                            Memory memory, Call& call);

/// Checks that a backward pass supports the heads: heads with separate scales must not share keys and values.
xffi::Error check_heads_of_gradients(const Problem& p);

/// Checks the results for the gradients of query, key, value and additional keys and values.
xffi::Error check_gradients(const ProblemOperands& operands, const std::array<const xffi::AnyBuffer*, 5>& gradients);

/// Makes a handler from its body. The body takes the operands of `bind_problem` as a struct, followed by the target's
/// other arguments.
template <typename Body>
auto on_problem(Body body) {
  using xffi::AnyBuffer;
  return [body](AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys, AnyBuffer additional_values,
                AnyBuffer origins, AnyBuffer scales, auto... further) {
    return guarded([&]() -> xffi::Error {
      return body(ProblemOperands{query, key, value, additional_keys, additional_values, origins, scales}, further...);
    });
  };
}

/// Binds the operands that every handler starts with.
inline auto bind_problem() {
  return xffi::Ffi::Bind()
      .Arg<xffi::AnyBuffer>()   // query
      .Arg<xffi::AnyBuffer>()   // key
      .Arg<xffi::AnyBuffer>()   // value
      .Arg<xffi::AnyBuffer>()   // additional_keys
      .Arg<xffi::AnyBuffer>()   // additional_values
      .Arg<xffi::AnyBuffer>()   // origins
      .Arg<xffi::AnyBuffer>();  // scales
}

/// Adds the results of a forward pass to a binding.
template <typename Binding>
auto bind_forward(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Ret<xffi::AnyBuffer>()   // out
      .template Ret<xffi::AnyBuffer>()   // logsumexp
      .template Ret<xffi::AnyBuffer>();  // remainder
}

/// Adds the results of a backward pass to a binding.
template <typename Binding>
auto bind_gradients(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Ret<xffi::AnyBuffer>()   // dquery
      .template Ret<xffi::AnyBuffer>()   // dkey
      .template Ret<xffi::AnyBuffer>()   // dvalue
      .template Ret<xffi::AnyBuffer>()   // dadditional_keys
      .template Ret<xffi::AnyBuffer>();  // dadditional_values
}

}  // namespace natten_jax::ffi
