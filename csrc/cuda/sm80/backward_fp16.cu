#include "cuda/sm80/backward_instances.cuh"

template cudaError_t natten_jax::sm80::launch_backward<natten_jax::sm80::Arithmetic::kFloat16>(const BackwardParams&,
                                                                                               int, int, int,
                                                                                               cudaStream_t);
