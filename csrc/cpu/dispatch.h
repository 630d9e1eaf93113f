// Which compiled copy of the kernels this processor runs.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace natten_jax::cpu {

/// The kernels for the most capable instruction set that both the build and the processor have.
const KernelTable& host_kernels();

/// Names of the instruction sets that kernels were compiled for, the plainest first.
std::vector<std::string> built_isas();

}  // namespace natten_jax::cpu
