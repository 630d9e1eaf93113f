// The gradient of sinks: what a sink weighs in each query's softmax, times how much of the loss its lack of a value
// costs, added up in a fixed order. Kernels that own queries begin it (sinks_parts.cuh); where batch entries have
// layouts of their own, kernels of its own do all.
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

/// How many parts of the queries are added up at most, for sinks of so many batch entries: enough to fill a GPU.
inline std::int64_t parts_of_sinks(std::int64_t batch_of_sinks) {
  constexpr std::int64_t kMost = 256;
  return std::max<std::int64_t>(kMost / batch_of_sinks, 1);
}

/// A number of heads, or of parts, filled up to chunks.
inline std::int64_t filled_to_chunks(std::int64_t number) {
  return divide_up(number, kEntriesOfChunk) * kEntriesOfChunk;
}

/// Tiles of queries that all warps of a kernel's regions have at most, of a batch entry and head: in each dimension of
/// a dilation group, less than twice as many as there are.
inline std::int64_t most_tiles_of_regions(const Axis (&axes)[kRank], const std::int64_t (&tile)[kRank]) {
  std::int64_t result = 1;
  for (int d = 0; d < kRank; ++d) {
    const std::int64_t dilation = axes[d].window.dilation;
    result *= 2 * query_tiles(axes[d], tile[d]) - dilation;
  }
  return result;
}

/// Numbers of scratch memory that the gradient takes.
inline std::int64_t scratch_of_sinks(const Problem& problem, const std::int64_t (&tile)[kRank],
                                     std::int64_t batch_of_sinks) {
  const std::int64_t sinks = batch_of_sinks * problem.heads,
                     tiles = problem.batch / batch_of_sinks * most_tiles_of_regions(problem.axes, tile);
  return std::max(sinks * filled_to_chunks(tiles),
                  batch_of_sinks * parts_of_sinks(batch_of_sinks) * filled_to_chunks(problem.heads));
}

/// Launches the kernel that adds up what tiles of queries have written, where no other one does.
///
/// Args:
///   overlaps: whether it may start before the kernel in front of it is done.
cudaError_t launch_sums_of_sinks(const SinksParams& params, bool overlaps, cudaStream_t stream);

/// Finds the gradient of a checked problem's sinks on a stream from what is known of queries, once a backward pass has
/// run.
///
/// Args:
///   statistics: those of the pass, [batch, queries, heads, 4].
///   parts: scratch memory, of scratch_of_sinks() numbers.
Status run_sinks_gradient(const Problem& problem, const Arrays& arrays, const float* statistics, float* parts,
                          cudaStream_t stream);

}  // namespace natten_jax::small
