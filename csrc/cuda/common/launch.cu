#include <mutex>
#include <set>
#include <utility>

#include "cuda/common/launch.cuh"

namespace natten_jax {

cudaError_t allow_all_shared_memory(const void* kernel) {
  static std::mutex mutex;
  // Pairs of kernel and device whose shared-memory limit is set. The set is never destroyed, because kernels may be
  // launched after static objects are destroyed.
  static auto& allowed = *new std::set<std::pair<const void*, int>>;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device}) > 0) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  // Failures are not cached, because a later call may succeed.
  if (error == cudaSuccess) allowed.insert({kernel, device});
  return error;
}

}  // namespace natten_jax
