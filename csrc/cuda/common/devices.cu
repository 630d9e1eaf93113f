#include <cuda_runtime.h>

#include "cuda/common/devices.h"
#include "natten_jax/problem.h"

namespace natten_jax {
namespace {

// The window arithmetic is the same on the host and on the device, at compile time and at run time.
static_assert(window_bounds(4, 8, 3, 1, false).begin == 3 && window_bounds(4, 8, 3, 1, false).end == 6);
static_assert(inverse_window_bounds(0, 8, 8, 3, 1, false).end == 2);
static_assert(group_length(10, 4, 1) == 3);

/// Proves that the window arithmetic compiles for devices; kernels use it like this.
__global__ void windows_compile_for_devices(Dimension dimension, std::int64_t group, Range<std::int64_t>* ranges) {
  ranges[0] = dimension.visible_keys(threadIdx.x, group);
  ranges[1] = dimension.visible_queries(threadIdx.x, group);
}

[[maybe_unused]] constexpr auto kKeepsKernel = &windows_compile_for_devices;

}  // namespace

std::vector<CudaDevice> list_cuda_devices() {
  std::vector<CudaDevice> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // A missing driver is an answer, not an error that a later call should find.
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
