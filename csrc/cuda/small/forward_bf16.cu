#include "cuda/small/forward_instances.cuh"

namespace natten_jax::small {

template cudaError_t launch_forward<cutlass::bfloat16_t, 32>(const ForwardParams&, const LaunchShape&);
template cudaError_t launch_forward<cutlass::bfloat16_t, 64>(const ForwardParams&, const LaunchShape&);
template cudaError_t launch_forward<cutlass::bfloat16_t, 128>(const ForwardParams&, const LaunchShape&);

cudaError_t find_box_kernels(bool& result) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, natten_jax_small_forward<cutlass::bfloat16_t, 32, true, false>);
  result = attributes.ptxVersion >= 90;
  return error;
}

}  // namespace natten_jax::small
