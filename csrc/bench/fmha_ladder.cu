#include "bench/fmha_ladder.cuh"

namespace natten_jax::bench {

template cudaError_t launch_fmha<ElementType::kBFloat16>(Rung, TileSizes, int, const FmhaParams&, cudaStream_t);
template cudaError_t launch_fmha<ElementType::kFloat16>(Rung, TileSizes, int, const FmhaParams&, cudaStream_t);

}  // namespace natten_jax::bench
