// Launches kernels, and lets those of one stream overlap: one starts while the one before it still runs. That takes
// compute capability 9.0; elsewhere kernels may call the functions for it, which then do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace natten_jax {

/// Bytes of parameters that a kernel may have. More than 4096 take CUDA 12.1 and its driver (530), or newer ones.
constexpr std::size_t kMostParameterBytes = 32764;

/// How a kernel is launched.
struct LaunchShape {
  dim3 blocks;        ///< Extents of the grid.
  int threads;        ///< Threads of a block.
  int shared_memory;  ///< Dynamic, in bytes.
  cudaStream_t stream;
  /// Starts when the kernel before it allows that. Until the kernel has called `wait_for_previous_kernel` it must not
  /// read what that one writes, nor write at all; it must call it before it is done.
  bool overlaps = false;
};

/// Lets launches of a kernel on the device at hand have all the shared memory that it can give them.
///
/// What a kernel may have is one number for a device, which all threads of the host share: set to what a launch needs,
/// it could be lowered by another thread's before the launch. It is set once, to the most.
cudaError_t allow_all_shared_memory(const void* kernel);

/// Launches a kernel. The result is that of this launch: errors of other calls that nobody has asked for stay theirs.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchShape& shape, Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= kMostParameterBytes);
  if (shape.shared_memory > 0) {
    const cudaError_t error = allow_all_shared_memory(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_memory;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = shape.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

/// Launches the form of a kernel for `Traits`, which say how many threads and how much shared memory a CTA has.
template <class Traits, class Params>
cudaError_t launch_form(void (*kernel)(Params), dim3 ctas, cudaStream_t stream, const Params& params,
                        bool overlaps = false) {
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  return launch(kernel, {ctas, Traits::kThreads, kSharedMemory, stream, overlaps}, params);
}

/// Lets the next kernel of the stream start, if it is launched to overlap, once all blocks have called
/// this or are done.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Loads what a kernel before the one before wrote. That one is done where the one before has waited for it, but only
/// threads that wait themselves are promised to see all that it wrote: this is read from the second-level cache, past
/// the first, which may hold what was there earlier.
template <class Number>
__device__ __forceinline__ Number load_written(const Number* number) {
  return __ldcg(number);
}

/// Waits until the kernel before is done and what it wrote can be read.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace natten_jax
