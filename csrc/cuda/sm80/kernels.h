// The compiled kernels, per arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm80/params.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Bytes of shared memory of a device.
struct SharedMemory {
  int block;           // maximum per CTA
  int multiprocessor;  // per SM, shared by its CTAs
  int reserved;        // additional bytes that each CTA takes
};

/// Launches a form of the forward kernel on `ctas` CTAs. Uses the most stages with which two CTAs fit on an SM;
/// otherwise the most that fit.
template <Arithmetic kArithmetic>
Status launch_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory, int ctas,
                      cudaStream_t stream);

/// Launches the forward kernel with key biases, for elements of 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory,
                                 int ctas, cudaStream_t stream);

/// Launches a form of the backward kernel on `ctas` CTAs.
template <Arithmetic kArithmetic>
Status launch_backward(const BackwardParams& params, const BackwardForm& form, int ctas, cudaStream_t stream);

/// Launches the backward kernel with key biases, for elements of 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_backward(const BackwardParams& params, const BackwardForm& form, int ctas,
                                  cudaStream_t stream);

}  // namespace natten_jax::sm80
