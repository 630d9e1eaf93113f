// Interface of libnatten_jax for the Python module. All other symbols of the library are hidden.
#pragma once

#include <string>
#include <vector>

#if defined(NATTEN_JAX_CUDA)
#include "cuda/common/devices.h"
#endif

#define NATTEN_JAX_EXPORT __attribute__((visibility("default")))

namespace natten_jax {

/// An XLA FFI handler, registered under a name for a platform.
struct Target {
  const char* name;
  const char* platform;
  void* handler;
};

struct BuildInfo {
  int ffi_api_major;
  int ffi_api_minor;
  std::string sources;  ///< A fingerprint of this folder (natten_jax/source_tree.py).
  std::string compiler;
  std::string host_isa;
  std::vector<std::string> host_isas;
  std::string cuda_version;  ///< Empty in a build without CUDA.
  std::vector<std::string> cuda_architectures;
};

NATTEN_JAX_EXPORT std::vector<Target> targets();
NATTEN_JAX_EXPORT BuildInfo build_info();
#if defined(NATTEN_JAX_CUDA)
NATTEN_JAX_EXPORT std::vector<CudaDevice> cuda_devices();
#endif

}  // namespace natten_jax
