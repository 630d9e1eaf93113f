// The XLA FFI handlers of this library, by target name.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace natten_jax::ffi {

struct Registration {
  const char* target;
  const char* platform;
  XLA_FFI_Handler* handler;
};

/// The targets for the host.
std::vector<Registration> host_registrations();

#if defined(NATTEN_JAX_CUDA)
#if defined(NATTEN_JAX_SM90)
/// The targets for Hopper GPUs.
std::vector<Registration> sm90_registrations();
#endif

/// The targets for any NVIDIA GPU since compute capability 8.0.
std::vector<Registration> sm80_registrations();

/// The targets for small windows, which also need compute capability 8.0 or later.
std::vector<Registration> small_registrations();
#endif

#if defined(NATTEN_JAX_BENCH)
/// The targets that only benchmarks call.
std::vector<Registration> bench_registrations();
#endif

}  // namespace natten_jax::ffi
