// Launches the kernels of the gradient of sinks: what a sink weighs in each query's softmax, times how much of the loss
// its lack of a value costs, added up in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/small/bias_table.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// How many parts of the queries are added up at most, for sinks of so many batch entries: enough to fill a GPU.
inline std::int64_t parts_of_sinks(std::int64_t batch_of_sinks) {
  constexpr std::int64_t kMost = 256;
  return std::max<std::int64_t>(kMost / batch_of_sinks, 1);
}

/// Heads, filled up to chunks.
inline std::int64_t filled_heads(std::int64_t heads) {
  return divide_up(heads, kEntriesOfChunk) * kEntriesOfChunk;
}

/// Finds the gradient of a checked problem's sinks on a stream, once a backward pass has run.
///
/// Args:
///   statistics: those of the pass, [batch, queries, heads, 4].
///   parts: scratch memory, [batch_of_sinks, parts_of_sinks(), filled_heads()].
Status run_sinks_gradient(const Problem& problem, const Arrays& arrays, const float* statistics, float* parts,
                          cudaStream_t stream);

}  // namespace natten_jax::small
