#include "cuda/sm80/forward_instances.cuh"

template cudaError_t natten_jax::sm80::launch_forward<natten_jax::sm80::Arithmetic::kTensorFloat32>(
    const ForwardParams&, int, const SharedMemory&, int, cudaStream_t);
