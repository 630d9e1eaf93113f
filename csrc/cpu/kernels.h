// Interface of the kernels for the rest of the library: one table per compiled instruction set.
#pragma once

#include <cstddef>

#include "cpu/plan.h"

namespace natten_jax::cpu {

using ItemKernel = void (*)(const Plan& plan, const Item& item, std::byte* scratch);

inline constexpr int kPasses = 3;

struct KernelTable {
  const char* isa;
  ItemKernel kernels[kPasses][kElementTypes];  ///< Indexed by Pass and ElementType.
};

}  // namespace natten_jax::cpu
