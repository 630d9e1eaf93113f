// Values that kernels are compiled for, as launches choose between them.
#pragma once

#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// What a launch says of elements that its kernels were not compiled for; arguments are checked before.
inline Status no_such_elements(ElementType type) {
  return Status::internal("no kernel is compiled for elements of type " + std::to_string(static_cast<int>(type)));
}

/// Calls `call` with the one of `kValues` that `value` is, as a constant.
///
/// Returns:
///   What `call` returns, or `otherwise` where `value` is none of them.
template <auto... kValues, class Value, class Result, class Call>
Result with_constant(Value value, Result otherwise, const Call& call) {
  ((value == kValues ? void(otherwise = call(std::integral_constant<Value, kValues>{})) : void()), ...);
  return otherwise;
}

/// The same for element types of 16 bits.
template <class Result, class Call>
Result with_half_type(ElementType type, Result otherwise, const Call& call) {
  return with_constant<ElementType::kFloat16, ElementType::kBFloat16>(type, otherwise, call);
}

/// The same for the number of a form in a table, every one of which is compiled.
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
