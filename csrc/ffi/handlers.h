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

/// Every target that this build has.
std::vector<Registration> registrations();

}  // namespace natten_jax::ffi
