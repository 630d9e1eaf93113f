#include <algorithm>

#include "cuda/small/kernels.h"
#include "cuda/small/table_gradient.cuh"

namespace natten_jax::small {

cudaError_t launch_table_gradient(const TableParams& params, const LaunchShape& shape) {
  constexpr std::int64_t kWarp = 32, kLeastThreads = 128;
  LaunchShape launch_shape = shape;
  // Use a thread per chunk of a record, but at least kLeastThreads threads, because threads also add the sums to the
  // table's entries.
  const std::int64_t chunks = divide_up(params.record, kEntriesOfChunk * kWarp) * kWarp;
  launch_shape.threads = static_cast<int>(std::clamp<std::int64_t>(chunks, kLeastThreads, kTableThreads));
  launch_shape.shared_memory = bytes_of_runs(params.record);
  return launch(natten_jax_small_table_gradient, launch_shape, params);
}

}  // namespace natten_jax::small
