#include "cuda/sm80/backward_instances.cuh"

template natten_jax::Status natten_jax::sm80::launch_backward<natten_jax::sm80::Arithmetic::kTensorFloat32>(
    const BackwardParams&, const BackwardForm&, int, cudaStream_t);
