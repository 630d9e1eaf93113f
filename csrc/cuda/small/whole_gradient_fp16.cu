#include "cuda/small/whole_gradient_instances.cuh"

namespace natten_jax::small {

template cudaError_t launch_whole_gradient<cutlass::half_t, 32>(const BackwardParams&, const LaunchShape&);
template cudaError_t launch_whole_gradient<cutlass::half_t, 64>(const BackwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
