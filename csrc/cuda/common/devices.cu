#include <cuda_runtime.h>

#include "cuda/common/devices.h"

namespace natten_jax {

std::vector<CudaDevice> list_cuda_devices() {
  std::vector<CudaDevice> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // Clear the error: a missing driver is a valid result.
    return devices;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                       static_cast<int>(properties.sharedMemPerBlockOptin), properties.totalGlobalMem});
  }
  return devices;
}

}  // namespace natten_jax
