// Fills the padding in results of a pass. Padding consists of the tokens outside the layout of their batch entry.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Start of the kernel that fills padding, relative to the previous kernel of the stream. The next kernel may always
/// start while padding is filled.
enum class FillTime {
  /// Starts when the previous kernel has ended, without PDL.
  kAfter,
  /// Starts while the previous kernel runs. That kernel must allow this, and must not write padding. All other kernels
  /// that access the padding must have ended by then.
  kOverlapping,
  /// PDL: waits until the previous kernel has ended, and then lets the next kernel start. So the next kernel can read
  /// the results of the previous kernel.
  kBetween,
};

/// Fills the padding of the output with zeros, and the padding of the logsumexp with -infinity. If there is a
/// remainder, fills its padding with zeros.
cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream,
                                   FillTime time = FillTime::kAfter);

/// Fills the padding of the key and value gradients with zeros. If `has_query_gradient`, also fills the padding of the
/// query gradient.
cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, FillTime time = FillTime::kAfter);

}  // namespace natten_jax
