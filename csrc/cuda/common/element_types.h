// The element types that kernels are compiled for, as launches choose between them.
#pragma once

#include <string>
#include <type_traits>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax {

/// What a launch says of elements that its kernels were not compiled for; arguments are checked before.
inline Status no_such_elements(ElementType type) {
  return Status::internal("no kernel is compiled for elements of type " + std::to_string(static_cast<int>(type)));
}

/// Calls `call` with the one of `kTypes` that `type` is, as a constant.
///
/// Returns:
///   What `call` returns, or `otherwise` where `type` is none of them.
template <ElementType... kTypes, class Result, class Call>
Result with_element_type(ElementType type, Result otherwise, const Call& call) {
  ((type == kTypes ? void(otherwise = call(std::integral_constant<ElementType, kTypes>{})) : void()), ...);
  return otherwise;
}

/// The same for elements of 16 bits.
template <class Result, class Call>
Result with_half_type(ElementType type, Result otherwise, const Call& call) {
  return with_element_type<ElementType::kFloat16, ElementType::kBFloat16>(type, otherwise, call);
}

}  // namespace natten_jax
