#include "cpu/dispatch.h"

namespace natten_jax::cpu {

namespace baseline {
extern const KernelTable kKernels;
}
#if defined(NATTEN_JAX_X86_ISAS)
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
#endif

const KernelTable& host_kernels() {
  static const KernelTable& chosen = []() -> const KernelTable& {
#if defined(NATTEN_JAX_X86_ISAS)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_avx512) return avx512::kKernels;
    if (has_avx2) return avx2::kKernels;
#endif
    return baseline::kKernels;
  }();
  return chosen;
}

std::vector<std::string> built_isas() {
  std::vector<std::string> names = {baseline::kKernels.isa};
#if defined(NATTEN_JAX_X86_ISAS)
  names.push_back(avx2::kKernels.isa);
  names.push_back(avx512::kKernels.isa);
#endif
  return names;
}

}  // namespace natten_jax::cpu
