// The compiled kernels, for each arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm80/params.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Bytes of shared memory of a device.
struct SharedMemory {
  int block;           // that a CTA may have
  int multiprocessor;  // that its CTAs share
  int reserved;        // that each CTA takes besides its own
};

/// Launches a form of the forward kernel on `ctas` CTAs, with the most stages of which two CTAs fit on a
/// multiprocessor, or else the most.
template <Arithmetic kArithmetic>
Status launch_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory, int ctas,
                      cudaStream_t stream);

/// The same of the kernels that add biases of keys, for elements of 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory,
                                 int ctas, cudaStream_t stream);

/// Launches a form of the backward kernel on `ctas` CTAs.
template <Arithmetic kArithmetic>
Status launch_backward(const BackwardParams& params, const BackwardForm& form, int ctas, cudaStream_t stream);

/// The same of the kernels that add biases of keys, for elements of 16 bits.
template <Arithmetic kArithmetic>
Status launch_key_biased_backward(const BackwardParams& params, const BackwardForm& form, int ctas,
                                  cudaStream_t stream);

}  // namespace natten_jax::sm80
