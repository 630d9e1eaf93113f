#include "cuda/sm90/forward_instances.cuh"

template cudaError_t natten_jax::sm90::launch_forward<true>(const ForwardParams&, int, int, bool, int, cudaStream_t);
