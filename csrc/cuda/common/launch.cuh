// Kernel launches, with programmatic dependent launch (PDL): a kernel can start while the kernel before it in the
// stream still runs. PDL requires compute capability 9.0; on other devices, the PDL functions below do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace natten_jax {

/// Maximum size of kernel parameters, in bytes. Sizes above 4096 require CUDA 12.1 or later, and driver 530 or later.
constexpr std::size_t kMostParameterBytes = 32764;

/// Launch configuration of a kernel.
struct LaunchShape {
  dim3 blocks;        ///< Extents of the grid.
  int threads;        ///< Threads of a block.
  int shared_memory;  ///< Dynamic shared memory of a block, in bytes.
  cudaStream_t stream;
  /// PDL: the kernel starts when the previous kernel allows it. Every kernel with this flag must call
  /// `wait_for_previous_kernel`. Before this call, the kernel must not read what the previous kernel writes. It must
  /// also not write anything (FillTime::kOverlapping of padding.h is an exception).
  bool overlaps = false;
};

/// Allows a kernel to use all shared memory of the current device.
///
/// All host threads share one limit per kernel and device. If a thread set the limit to the size that its launch needs,
/// another thread could lower the limit before this launch. So the limit is set once, to the maximum.
cudaError_t allow_all_shared_memory(const void* kernel);

/// Launches a kernel. Returns the error of this launch. Neither returns nor clears errors of earlier calls.
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

/// Launches a form of a kernel. `Traits` defines the number of threads and the shared memory of its CTAs.
template <class Traits, class Params>
cudaError_t launch_form(void (*kernel)(Params), dim3 ctas, cudaStream_t stream, const Params& params,
                        bool overlaps = false) {
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  return launch(kernel, {ctas, Traits::kThreads, kSharedMemory, stream, overlaps}, params);
}

/// PDL: griddepcontrol.launch_dependents. The next kernel of the stream may start when every CTA has called this
/// function or has ended.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Loads data with ld.global.cg. This is needed under PDL if kernel C reads what kernel A has written, and kernel B was
/// launched between them. If B waited for A before it allowed C to start, A has ended. But A's writes are guaranteed to
/// be visible only to threads that have called `wait_for_previous_kernel`. For other threads of C, L1 may be stale, so
/// this function reads L2.
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
