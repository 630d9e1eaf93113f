// Gradient of sinks. The gradient of a sink is the negative sum, over queries, of the sink's softmax weight times
// delta. The order of this sum is fixed. Kernels that own queries compute parts of the sum (sinks_parts.cuh). With
// per-entry layouts, separate kernels compute the whole gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/small/bias_table.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

struct SinksParams;  // params.h

/// Returns the maximum number of parts into which the queries are divided. `batch_of_sinks` is the number of batch
/// entries with separate sinks. Over all these batch entries, there are enough parts to fill a GPU.
inline std::int64_t parts_of_sinks(std::int64_t batch_of_sinks) {
  constexpr std::int64_t kMost = 256;
  return std::max<std::int64_t>(kMost / batch_of_sinks, 1);
}

/// Rounds a number of heads or parts up to a multiple of kEntriesOfChunk.
inline std::int64_t filled_to_chunks(std::int64_t number) {
  return divide_up(number, kEntriesOfChunk) * kEntriesOfChunk;
}

/// Returns an upper bound of the number of query tiles per batch entry and head, over all warps of a kernel's regions.
/// In each dimension of a dilation group, the bound is less than twice the actual number.
inline std::int64_t most_tiles_of_regions(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank]) {
  std::int64_t result = 1;
  for (int d = 0; d < kRank; ++d) {
    const std::int64_t dilation = axes[d].window.dilation;
    result *= 2 * query_tiles(axes[d], tile[d]) - dilation;
  }
  return result;
}

/// Returns the number of floats in the gradient's scratch memory.
inline std::int64_t scratch_of_sinks(const Problem& problem, const std::int64_t (&tile)[kRank],
                                     std::int64_t batch_of_sinks) {
  const std::int64_t sinks = batch_of_sinks * problem.heads,
                     tiles = problem.batch / batch_of_sinks * most_tiles_of_regions(problem.axes, tile);
  return std::max(sinks * filled_to_chunks(tiles),
                  batch_of_sinks * parts_of_sinks(batch_of_sinks) * filled_to_chunks(problem.heads));
}

/// Launches the kernel that adds up the parts of query tiles. It is needed only if no other kernel adds them up.
///
/// Args:
///   overlaps: true if the kernel may start before the previous kernel ends (PDL).
cudaError_t launch_sums_of_sinks(const SinksParams& params, bool overlaps, cudaStream_t stream);

/// Computes the gradient of a checked problem's sinks from the statistics of queries. It is called after a backward
/// pass, and runs on a stream.
///
/// Args:
///   statistics: [batch, queries, heads, 4], written by the backward pass.
///   parts: scratch memory of scratch_of_sinks() floats.
Status run_sinks_gradient(const Problem& problem, const Arrays& arrays, const float* statistics, float* parts,
                          cudaStream_t stream);

}  // namespace natten_jax::small
