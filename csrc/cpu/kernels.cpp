// The kernels of one instruction set. CMake compiles this file once per instruction set. It defines NATTEN_JAX_ISA as
// the name of the instruction set, and sets compiler flags that enable it.
#include "cpu/kernels.h"

#include "cpu/backward.h"
#include "cpu/forward.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {

#define NATTEN_JAX_STRING_(name) #name
#define NATTEN_JAX_STRING(name) NATTEN_JAX_STRING_(name)

extern const KernelTable kKernels;
const KernelTable kKernels = {
    NATTEN_JAX_STRING(NATTEN_JAX_ISA),
    {
        {forward<float>, forward<Half>, forward<BFloat16>},
        {query_gradient<float>, query_gradient<Half>, query_gradient<BFloat16>},
        {key_value_gradient<float>, key_value_gradient<Half>, key_value_gradient<BFloat16>},
    },
};

}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
