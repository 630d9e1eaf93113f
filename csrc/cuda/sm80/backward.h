// The compiled forms of the backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

/// Launches the form for a head dimension of 64, 128 or 256 that works on so many keys at a time.
template <Arithmetic kArithmetic>
cudaError_t launch_backward(const BackwardParams& params, int head_dim, int keys, int ctas, cudaStream_t stream);

extern template cudaError_t launch_backward<Arithmetic::kFloat16>(const BackwardParams&, int, int, int, cudaStream_t);
extern template cudaError_t launch_backward<Arithmetic::kBFloat16>(const BackwardParams&, int, int, int, cudaStream_t);
extern template cudaError_t launch_backward<Arithmetic::kFloat32>(const BackwardParams&, int, int, int, cudaStream_t);
extern template cudaError_t launch_backward<Arithmetic::kTensorFloat32>(const BackwardParams&, int, int, int,
                                                                        cudaStream_t);

}  // namespace natten_jax::sm80
