// Converts runtime values to the constants that kernels are compiled for.
#pragma once

#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// Error for an element type that kernels were not compiled for. It is internal, because arguments are checked before.
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

/// Calls `call` with the element type as a constant, if it has 16 bits.
template <class Result, class Call>
Result with_half_type(ElementType type, Result otherwise, const Call& call) {
  return with_constant<ElementType::kFloat16, ElementType::kBFloat16>(type, otherwise, call);
}

/// Calls `call` with the number of a form in a table as a constant. All forms of the table are compiled.
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
