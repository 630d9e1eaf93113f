// Launch parameters of kernels with regions, except most pointers to arrays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/geometry.h"
#include "cuda/common/launch.cuh"
#include "cuda/small/params.h"
#include "cuda/small/region.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Returns the part of the layout that a call's arrays cover.
Coverage coverage_of(const Arrays& arrays);

/// Fills in a problem's sizes for any kernel, including the kernels of additional tokens' gradients.
template <class Params>
void fill_sizes(const Problem& problem, Params& p) {
  p.queries = static_cast<int>(problem.queries());
  fill_heads(problem, p);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
}

/// Chooses a kernel's region, and fills in the parameters and launch shape that follow from it and the problem.
///
/// Args:
///   rows, columns: shapes of a warp's tile and of a group.
Status prepare_regions(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, const Arrays& arrays, const Device& device, cudaStream_t stream, CommonParams& p,
                       LaunchShape& shape);

}  // namespace natten_jax::small
