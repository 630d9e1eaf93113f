// What a pass finds for padding: tokens of arrays that lie outside of their batch entry's layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"

namespace natten_jax {

// Both let the next kernel overlap. Where one `overlaps` itself, the kernel before lets it start early and writes none
// of the padding, and no kernel before that one may still be running.

/// Fills an output with zeros there, its logsumexp with -infinity and the remainder, if there is one, with zeros.
cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream,
                                   bool overlaps = false);

/// Fills gradients with zeros there: those of keys and values, and those of queries unless something else does.
cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, bool overlaps = false);

}  // namespace natten_jax
