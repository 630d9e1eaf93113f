// The compiled kernels for small windows.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/common/constants.h"
#include "cuda/common/launch.cuh"
#include "cuda/small/bias_table.h"
#include "cuda/small/params.h"
#include "cuda/small/whole_bias.h"

namespace natten_jax::small {

/// Calls `call` with a compiled head width as a compile-time constant. Kernels with biases are compiled for fewer
/// widths.
template <Feature kFeature = Feature::kNone, class Call>
cudaError_t with_head_dim(int head_dim, const Call& call) {
  static_assert(kHeadDims[1] == kLargestBiasedHeadDim);
  if constexpr (kFeature == Feature::kRelativeBias || kFeature == Feature::kKeyBias) {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, call);
  } else {
    return with_constant<kHeadDims[0], kHeadDims[1], kHeadDims[2]>(head_dim, cudaErrorInvalidValue, call);
  }
}

/// Launches `kernel_of(head_dim, has_boxes)`. `has_boxes` is true if TMA loads the region's columns.
template <Feature kFeature, class Params, class KernelOf>
cudaError_t launch_loading(int head_dim, const Params& params, const LaunchShape& shape, const KernelOf& kernel_of) {
  return with_head_dim<kFeature>(head_dim, [&](auto width) {
    if constexpr (width <= kLargestBoxHeadDim) {
      if (params.region.has_boxes) return launch(kernel_of(width, std::true_type{}), shape, params);
    }
    return launch(kernel_of(width, std::false_type{}), shape, params);
  });
}

/// Sets `result` to true if the kernel code that the current device runs was compiled for an architecture with TMA, and
/// to false otherwise. If the driver JIT-compiles code for an older architecture, that code does not use TMA.
template <ElementType kType, Feature kFeature>
cudaError_t find_box_kernels(bool& result);

/// Launches the forward kernel for a 16-bit element type, a feature and a compiled head width.
template <ElementType kType, Feature kFeature>
cudaError_t launch_forward(int head_dim, const ForwardParams& params, const LaunchShape& shape);

/// Each function launches one kernel, which computes query gradients, key and value gradients, or all gradients of
/// whole layouts. launch_whole_gradient requires heads that TMA can load, and dimensions that do not wrap.
template <ElementType kType, Feature kFeature>
cudaError_t launch_query_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape);
template <ElementType kType, Feature kFeature>
cudaError_t launch_key_value_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape);
template <ElementType kType, Feature kFeature>
cudaError_t launch_whole_gradient(int head_dim, const WholeParams<kFeature == Feature::kRelativeBias>& params,
                                  const LaunchShape& shape);

/// Launches the kernel that adds up the records of tiles for the gradient of a relative bias.
cudaError_t launch_table_gradient(const TableParams& params, const LaunchShape& shape);

/// Launches both kernels for the gradients of additional keys and values. The first one has `ctas` CTAs, which compute
/// partial gradients; the second one adds these up.
template <ElementType kType>
cudaError_t launch_additional_gradient(int head_dim, const AdditionalParams& params, int ctas, cudaStream_t stream);

}  // namespace natten_jax::small
