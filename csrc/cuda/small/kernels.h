// The compiled kernels for small windows.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/launch.cuh"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// Launches the forward kernel for an element type (ElementOf) and compiled width of heads.
template <class Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, const LaunchShape& shape);

/// The same for the kernel of query gradients.
template <class Element, int kHeadDim>
cudaError_t launch_query_gradient(const BackwardParams& params, const LaunchShape& shape);

/// The same for the kernel of key and value gradients.
template <class Element, int kHeadDim>
cudaError_t launch_key_value_gradient(const BackwardParams& params, const LaunchShape& shape);

}  // namespace natten_jax::small
