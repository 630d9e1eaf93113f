// What the instances of the Hopper kernels have in common: a kernel for each form of a table.
#pragma once

#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda/common/cuda_status.h"
#include "cuda/sm90/forms.h"

namespace natten_jax::sm90 {

template <class Launch, int... kNumbers>
Status with_number(int form, const Launch& launch, std::integer_sequence<int, kNumbers...>) {
  Status result = Status::internal("no kernel is compiled in form " + std::to_string(form));
  ((form == kNumbers ? void(result = launch(std::integral_constant<int, kNumbers>{})) : void()), ...);
  return result;
}

/// Calls `launch` with the number of a form as a constant. Every form of the table is compiled, and no others.
template <const auto& kForms, class Launch>
Status with_form(int form, const Launch& launch) {
  return with_number(form, launch, std::make_integer_sequence<int, static_cast<int>(std::size(kForms))>{});
}

}  // namespace natten_jax::sm90
