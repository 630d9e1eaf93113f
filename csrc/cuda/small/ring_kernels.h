// Launch functions of the compiled kernels with a ring (ring_shape.h).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/constants.h"
#include "cuda/common/launch.cuh"
#include "cuda/small/ring_params.h"

namespace natten_jax::small {

/// Launches the forward kernel for a 16-bit element type and heads of 32 or 64. The kernels that load slabs as TMA
/// boxes exist only in builds with code for Hopper.
template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_forward(int head_dim, const RingForwardParams& params, const LaunchShape& shape);

/// Launches the kernel of query gradients.
template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_query_gradient(int head_dim, const RingQueryParams& params, const LaunchShape& shape);

/// Launches the kernel of key and value gradients.
template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_key_value_gradient(int head_dim, const RingGradientParams& params, const LaunchShape& shape);

/// Launch the two kernels that support a relative bias. These kernels always load slabs as TMA boxes.
template <ElementType kType>
cudaError_t launch_ring_biased_forward(int head_dim, const WithRelativeBias<RingForwardParams>& params,
                                       const LaunchShape& shape);
template <ElementType kType>
cudaError_t launch_ring_biased_key_value_gradient(int head_dim, const WithRelativeBias<RingGradientParams>& params,
                                                  const LaunchShape& shape);

/// Launch the three kernels that support key biases. These kernels always load slabs as TMA boxes.
template <ElementType kType>
cudaError_t launch_ring_key_biased_forward(int head_dim, const WithKeyBias<RingForwardParams>& params,
                                           const LaunchShape& shape);
template <ElementType kType>
cudaError_t launch_ring_key_biased_query_gradient(int head_dim, const WithKeyBias<RingQueryParams>& params,
                                                  const LaunchShape& shape);
template <ElementType kType>
cudaError_t launch_ring_key_biased_key_value_gradient(int head_dim, const WithKeyBias<RingGradientParams>& params,
                                                      const LaunchShape& shape);

}  // namespace natten_jax::small
