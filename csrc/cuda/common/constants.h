// Conversion of runtime values to the compile-time constants that select a kernel.
#pragma once

#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Error for an element type without compiled kernels. It is an internal error, because arguments are checked earlier.
inline Status no_such_elements(ElementType type) {
  return Status::internal("no kernel is compiled for elements of type " + std::to_string(static_cast<int>(type)));
}

/// Calls `call` with `value` as a compile-time constant, if it is one of `kValues`.
///
/// Returns:
///   The result of `call`, or `otherwise` if `value` is not in `kValues`.
template <auto... kValues, class Value, class Result, class Call>
Result with_constant(Value value, Result otherwise, const Call& call) {
  ((value == kValues ? void(otherwise = call(std::integral_constant<Value, kValues>{})) : void()), ...);
  return otherwise;
}

/// Calls `call` with `type` as a compile-time constant if its elements have 16 bits. Otherwise, returns `otherwise`.
template <class Result, class Call>
Result with_half_type(ElementType type, Result otherwise, const Call& call) {
  return with_constant<ElementType::kFloat16, ElementType::kBFloat16>(type, otherwise, call);
}

/// Calls `call` with `form`, an index into the table `kForms`, as a compile-time constant. `call` is compiled for every
/// form of the table.
template <const auto& kForms, class Call, int... kNumbers>
Status with_form(int form, const Call& call, std::integer_sequence<int, kNumbers...>) {
  return with_constant<kNumbers...>(form, Status::internal("no kernel is compiled in form " + std::to_string(form)),
                                    call);
}
template <const auto& kForms, class Call>
Status with_form(int form, const Call& call) {
  return with_form<kForms>(form, call, std::make_integer_sequence<int, static_cast<int>(std::size(kForms))>{});
}

}  // namespace natten_jax
