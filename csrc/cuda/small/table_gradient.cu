#include <algorithm>

#include "cuda/small/kernels.h"
#include "cuda/small/table_gradient.cuh"

namespace natten_jax::small {

cudaError_t launch_table_gradient(const TableParams& params, const LaunchShape& shape) {
  constexpr int kWarp = 32;
  LaunchShape own = shape;
  // A number of a record each, as far as there are threads.
  own.threads = static_cast<int>(std::min<std::int64_t>(divide_up(params.record, kWarp) * kWarp, kTableThreads));
  own.shared_memory = bytes_of_runs(params.record);
  return launch(natten_jax_small_table_gradient, own, params);
}

}  // namespace natten_jax::small
