#include "bench/fmha_ladder.cuh"

namespace natten_jax::bench {

template cudaError_t launch_fmha<true>(Rung, TileSizes, int, const FmhaParams&, cudaStream_t);
template cudaError_t launch_fmha<false>(Rung, TileSizes, int, const FmhaParams&, cudaStream_t);

}  // namespace natten_jax::bench
