// The compiled kernels for small windows.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// Whether the current device runs code of the kernels that was compiled for an architecture with the engine that
/// copies boxes: code for older ones, which the driver translates, has none.
cudaError_t find_box_kernels(bool& result);

/// Launches the kernel that `kernel_of(has_boxes)` is for the region's way of loading columns.
template <int kHeadDim, class Params, class KernelOf>
cudaError_t launch_form(const Params& params, const LaunchShape& shape, const KernelOf& kernel_of) {
  if constexpr (kHeadDim <= kLargestBoxHeadDim) {
    if (params.region.has_boxes) return launch(kernel_of(std::true_type{}), shape, params);
  }
  return launch(kernel_of(std::false_type{}), shape, params);
}

/// Launches the forward kernel for an element type (ElementOf) and compiled width of heads.
template <class Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, const LaunchShape& shape);

/// The same for the kernel of query gradients.
template <class Element, int kHeadDim>
cudaError_t launch_query_gradient(const BackwardParams& params, const LaunchShape& shape);

/// Launches both kernels of the gradients of additional keys and values: `ctas` of the first one.
template <class Element, int kHeadDim>
cudaError_t launch_additional_gradient(const AdditionalParams& params, int ctas, cudaStream_t stream);

/// The same for the kernel of all gradients of whole layouts, whose heads the copy engine can load.
template <class Element, int kHeadDim>
cudaError_t launch_whole_gradient(const BackwardParams& params, const LaunchShape& shape);

/// The same for the kernel of key and value gradients.
template <class Element, int kHeadDim>
cudaError_t launch_key_value_gradient(const BackwardParams& params, const LaunchShape& shape);

}  // namespace natten_jax::small
