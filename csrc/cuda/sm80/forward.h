// The compiled forms of the forward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

/// Bytes of shared memory of a device.
struct SharedMemory {
  int block;           // that a CTA may have
  int multiprocessor;  // that its CTAs share
  int reserved;        // that each CTA takes besides its own
};

/// The form for more queries than the others take: its rows, the head dimension that it is compiled for, and the bytes
/// of shared memory that its CTAs need. It takes 16-bit elements.
constexpr int kWideFormRows = 256;
constexpr int kWideFormHeadDim = 128;
constexpr int kWideFormSharedMemory = 226 << 10;

/// Launches a form for a head dimension of 64, 128 or 256 on `ctas` CTAs; cudaErrorInvalidConfiguration where none
/// fits.
template <Arithmetic kArithmetic>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, const SharedMemory& memory, int ctas,
                           cudaStream_t stream);

extern template cudaError_t launch_forward<Arithmetic::kFloat16>(const ForwardParams&, int, const SharedMemory&, int,
                                                                 cudaStream_t);
extern template cudaError_t launch_forward<Arithmetic::kBFloat16>(const ForwardParams&, int, const SharedMemory&, int,
                                                                  cudaStream_t);
extern template cudaError_t launch_forward<Arithmetic::kFloat32>(const ForwardParams&, int, const SharedMemory&, int,
                                                                 cudaStream_t);
extern template cudaError_t launch_forward<Arithmetic::kTensorFloat32>(const ForwardParams&, int, const SharedMemory&,
                                                                       int, cudaStream_t);

}  // namespace natten_jax::sm80
