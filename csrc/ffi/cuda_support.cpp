#include "ffi/cuda_support.h"

#include <cuda_runtime_api.h>

#include <string>

namespace natten_jax::ffi {

using xla::ffi::Error;

Error check_compute_capability(int major, int minor) {
  int device = 0, actual_major = 0, actual_minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&actual_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&actual_minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return Error::Internal(std::string("natten_jax: CUDA: ") + cudaGetErrorString(error));
  if (actual_major == major && actual_minor == minor) return Error::Success();
  return Error::InvalidArgument("natten_jax: the device has compute capability " + std::to_string(actual_major) + "." +
                                std::to_string(actual_minor) + ", but must have " + std::to_string(major) + "." +
                                std::to_string(minor));
}

}  // namespace natten_jax::ffi
