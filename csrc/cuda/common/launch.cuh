// Kernel launches, with programmatic dependent launch (PDL): a kernel can start while the kernel before it in the
// stream still runs. PDL requires compute capability 9.0; on other devices, the PDL functions below do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace natten_jax {

/// Maximum bytes of kernel parameters. More than 4096 require CUDA 12.1 and its driver (530), or newer ones.
constexpr std::size_t kMostParameterBytes = 32764;

/// Launch configuration of a kernel.
struct LaunchShape {
  dim3 blocks;        ///< Extents of the grid.
  int threads;        ///< Threads of a block.
  int shared_memory;  ///< Dynamic, in bytes.
  cudaStream_t stream;
  /// PDL: starts when the previous kernel allows it. Before the kernel calls `wait_for_previous_kernel`, it must not
  /// read what the previous kernel writes, and must not write at all. It must make this call before it ends.
  bool overlaps = false;
};

/// Allows a kernel to use all shared memory of the current device.
///
/// The limit is one number per kernel and device, which all host threads share. If it were set to the need of a launch,
/// another thread could lower it before that launch. So it is set once, to the maximum.
cudaError_t allow_all_shared_memory(const void* kernel);

/// Launches a kernel. Returns the error of this launch; does not clear or report earlier errors of other calls.
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

/// Launches the form of a kernel for `Traits`, which define the threads and shared memory of a CTA.
template <class Traits, class Params>
cudaError_t launch_form(void (*kernel)(Params), dim3 ctas, cudaStream_t stream, const Params& params,
                        bool overlaps = false) {
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  return launch(kernel, {ctas, Traits::kThreads, kSharedMemory, stream, overlaps}, params);
}

/// PDL: griddepcontrol.launch_dependents. The next kernel of the stream may start when all CTAs have called this or
/// ended.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Loads data written two kernels back under PDL, with ld.global.cg. That kernel has ended if the kernel in between
/// waited for it, but its writes are guaranteed visible only to threads that wait themselves. So this reads L2; L1 may
/// be stale.
template <class Number>
__device__ __forceinline__ Number load_written(const Number* number) {
  return __ldcg(number);
}

/// PDL: griddepcontrol.wait. Returns when the previous kernel has ended and its writes are visible.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace natten_jax
