// What a pass finds for padding: tokens of arrays that lie outside of their batch entry's layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// When padding is filled, beside other kernels of a stream. The next kernel may overlap in any case.
enum class FillTime {
  kAfter,    ///< When the kernel before is done.
  kBeside,   ///< While it runs: it lets others start early, writes none of the padding, and no kernel before it runs.
  kBetween,  ///< Likewise, and what it wrote is there when the next kernel starts, which runs meanwhile.
};

/// Fills an output with zeros there, its logsumexp with -infinity and the remainder, if there is one, with zeros.
cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream,
                                   FillTime time = FillTime::kAfter);

/// Fills gradients with zeros there: those of keys and values, and those of queries unless something else does.
cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, FillTime time = FillTime::kAfter);

}  // namespace natten_jax
