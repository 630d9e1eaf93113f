// Kernels of one stream that overlap: one starts while the one before it still runs. Compute capability 9.0; elsewhere
// kernels may call the functions here, which then do nothing, but must be launched in the usual way.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace natten_jax {

/// Lets the next kernel of the stream start, if it is launched with `launch_overlapped`, once all blocks have called
/// this or are done.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before is done and what it wrote can be read.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel that starts when the one before it allows that. Until it has called `wait_for_previous_kernel` it
/// must not read what that one writes, nor write at all; it must call it before it is done.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), int blocks, int threads, std::size_t shared_memory,
                              cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_memory;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace natten_jax
