// CUDA runtime calls: errors as Status, and attributes of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "natten_jax/status.h"

namespace natten_jax {

/// Converts a CUDA error to an internal error. Invalid arguments cannot cause it, because they are checked earlier.
inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // Clears the error, so that no other call reports it again.
  return Status::internal(std::string("CUDA: ") + cudaGetErrorString(error));
}

/// Reads attributes of the current device.
inline Status read_attributes(std::initializer_list<std::pair<int*, cudaDeviceAttr>> attributes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  for (const auto& [value, attribute] : attributes) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  }
  return status_of(error);
}

}  // namespace natten_jax
