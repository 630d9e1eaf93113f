// Selection of an instruction set. The kernels are compiled once per instruction set.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace natten_jax::cpu {

/// Kernels for the most capable instruction set that both the build and the processor support.
const KernelTable& host_kernels();

/// Names of the instruction sets that kernels were compiled for, least capable first.
std::vector<std::string> built_isas();

}  // namespace natten_jax::cpu
