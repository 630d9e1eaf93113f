#include "cuda/sm80/forward_instances.cuh"

template natten_jax::Status natten_jax::sm80::launch_forward<natten_jax::sm80::Arithmetic::kBFloat16>(
    const ForwardParams&, const ForwardForm&, const SharedMemory&, int, cudaStream_t);
