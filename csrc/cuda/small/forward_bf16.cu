#include "cuda/small/forward_instances.cuh"

namespace natten_jax::small {

template cudaError_t launch_forward<cutlass::bfloat16_t, 32>(const ForwardParams&, const LaunchShape&);
template cudaError_t launch_forward<cutlass::bfloat16_t, 64>(const ForwardParams&, const LaunchShape&);
template cudaError_t launch_forward<cutlass::bfloat16_t, 128>(const ForwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
