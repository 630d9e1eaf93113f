#include "cuda/small/additional_gradient_instances.cuh"

namespace natten_jax::small {

template cudaError_t launch_additional_gradient<cutlass::half_t, 32>(const AdditionalParams&, int, cudaStream_t);
template cudaError_t launch_additional_gradient<cutlass::half_t, 64>(const AdditionalParams&, int, cudaStream_t);
template cudaError_t launch_additional_gradient<cutlass::half_t, 128>(const AdditionalParams&, int, cudaStream_t);

}  // namespace natten_jax::small
