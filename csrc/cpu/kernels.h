// The kernels as the rest of the library sees them: one table per instruction set they were compiled for.
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
