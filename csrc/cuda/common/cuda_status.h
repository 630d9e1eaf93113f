// What the CUDA runtime says, as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "natten_jax/status.h"

namespace natten_jax {

/// Failures of CUDA are internal: arguments are checked before it sees them.
inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // It is reported here: no later call should find it.
  return Status::internal(std::string("CUDA: ") + cudaGetErrorString(error));
}

}  // namespace natten_jax
