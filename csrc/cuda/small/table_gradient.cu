#include "cuda/small/kernels.h"
#include "cuda/small/table_gradient.cuh"

namespace natten_jax::small {

cudaError_t launch_table_gradient(const TableParams& params, const LaunchShape& shape) {
  return launch(natten_jax_small_table_gradient, shape, params);
}

}  // namespace natten_jax::small
