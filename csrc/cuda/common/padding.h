// Results of a pass in padding: tokens of arrays outside their batch entry's layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// When padding is filled, relative to other kernels of the stream. The next kernel may overlap in all cases.
enum class FillTime {
  kAfter,    ///< After the previous kernel has ended.
  kBeside,   ///< While the previous kernel runs, which must allow it, write no padding, and follow ended kernels.
  kBetween,  ///< After the previous kernel, while the next one runs, which can read the previous one's results.
};

/// Fills the padding of an output with zeros, of its logsumexp with -infinity, and of the remainder, if any, with
/// zeros.
cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream,
                                   FillTime time = FillTime::kAfter);

/// Fills the padding of key and value gradients with zeros, and also of query gradients if `has_query_gradient`.
cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, FillTime time = FillTime::kAfter);

}  // namespace natten_jax
