#include "library.h"

#include <algorithm>

#include "cpu/dispatch.h"
#include "ffi/handlers.h"

namespace natten_jax {
namespace {

#if defined(NATTEN_JAX_CUDA)
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}
#endif

std::string compiler() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#else
  return std::string("gcc ") + __VERSION__;
#endif
}

}  // namespace

std::vector<Target> targets() {
  std::vector<Target> targets;
  const auto add = [&](const std::vector<ffi::Registration>& registrations) {
    for (const ffi::Registration& r : registrations) {
      targets.push_back({r.target, r.platform, reinterpret_cast<void*>(r.handler)});
    }
  };
  add(ffi::host_registrations());
#if defined(NATTEN_JAX_CUDA)
  add(ffi::sm80_registrations());
  add(ffi::small_registrations());
#if defined(NATTEN_JAX_SM90)
  add(ffi::sm90_registrations());
#endif
#endif
#if defined(NATTEN_JAX_BENCH)
  add(ffi::bench_registrations());
#endif
  return targets;
}

BuildInfo build_info() {
  BuildInfo info{};
  info.ffi_api_major = XLA_FFI_API_MAJOR;
  info.ffi_api_minor = XLA_FFI_API_MINOR;
  info.sources = NATTEN_JAX_SOURCES;
  info.compiler = compiler();
  info.host_isa = cpu::host_kernels().isa;
  info.host_isas = cpu::built_isas();
#if defined(NATTEN_JAX_CUDA)
  info.cuda_version = NATTEN_JAX_CUDA_VERSION;
  info.cuda_architectures = split(NATTEN_JAX_CUDA_ARCHITECTURES);
#endif
  return info;
}

#if defined(NATTEN_JAX_CUDA)
std::vector<CudaDevice> cuda_devices() {
  return list_cuda_devices();
}
#endif

}  // namespace natten_jax
