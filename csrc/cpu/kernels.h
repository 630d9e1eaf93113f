// Interface between kernels and the rest of the library: a table of kernels for each compiled instruction set.
#pragma once

#include <cstddef>

#include "cpu/plan.h"

namespace natten_jax::cpu {

using ItemKernel = void (*)(const Plan& plan, const Item& item, std::byte* scratch);

inline constexpr int kPasses = 3;

struct KernelTable {
  const char* isa;
  ItemKernel kernels[kPasses][kElementTypes];  ///< Indices: Pass, ElementType.
};

}  // namespace natten_jax::cpu
