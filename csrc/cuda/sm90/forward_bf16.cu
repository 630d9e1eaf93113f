#include "cuda/sm90/forward_instances.cuh"

template natten_jax::Status natten_jax::sm90::launch_forward<natten_jax::ElementType::kBFloat16>(const ForwardParams&,
                                                                                                 int, bool, int,
                                                                                                 cudaStream_t);
