// Launch functions of the compiled kernels, with an instance per arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm80/params.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Shared memory of a device, in bytes.
struct SharedMemory {
  int block;           // maximum that a CTA can use
  int multiprocessor;  // total of an SM, which its CTAs share
  int reserved;        // reserved by the system for each CTA, in addition to what the CTA uses
};

/// Launches a form of the forward kernel on `ctas` CTAs. If two CTAs fit on an SM, uses the maximum number of stages
/// with which they fit; otherwise the maximum with which one CTA fits.
template <Arithmetic kArithmetic>
Status launch_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory, int ctas,
                      cudaStream_t stream);

/// Launches the forward kernel with key biases. The array elements must have 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory,
                                 int ctas, cudaStream_t stream);

/// Launches a form of the backward kernel on `ctas` CTAs.
template <Arithmetic kArithmetic>
Status launch_backward(const BackwardParams& params, const BackwardForm& form, int ctas, cudaStream_t stream);

/// Launches the backward kernel with key biases. The array elements must have 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_backward(const BackwardParams& params, const BackwardForm& form, int ctas,
                                  cudaStream_t stream);

}  // namespace natten_jax::sm80
