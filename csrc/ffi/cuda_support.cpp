#include "ffi/cuda_support.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/common/cuda_status.h"
#include "ffi/handler_support.h"

namespace natten_jax::ffi {

using xffi::Error;

Error decode_device_call(const ProblemOperands& operands, const Attributes& attributes, Call& call,
                         const std::int32_t*& origins) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_origins(operands.origins, origins));
  return decode_problem(operands, attributes, origins != nullptr ? nullptr : kNoOrigins, call);
}

Error check_compute_capability(int major, int minor) {
  int device = 0, actual_major = 0, actual_minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&actual_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&actual_minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) return error_of(status_of(error));
  if (actual_major == major && actual_minor == minor) return Error::Success();
  return Error::InvalidArgument("natten_jax: the device has compute capability " + std::to_string(actual_major) + "." +
                                std::to_string(actual_minor) + ", but must have " + std::to_string(major) + "." +
                                std::to_string(minor));
}

}  // namespace natten_jax::ffi
