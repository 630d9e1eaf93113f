#include "cuda/sm90/backward_instances.cuh"

template natten_jax::Status natten_jax::sm90::launch_backward<natten_jax::ElementType::kBFloat16>(const BackwardParams&,
                                                                                                  int, cudaStream_t);
