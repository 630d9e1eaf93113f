// From a problem to what kernels with regions are launched with, but for the arrays.
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

/// Where the tokens of a call's arrays may be.
Places places_of(const Arrays& arrays);

/// Fills in what all kernels have of a problem's sizes, those of additional tokens' gradients among them.
template <class Params>
void fill_sizes(const Problem& problem, Params& p) {
  p.queries = static_cast<int>(problem.queries());
  fill_heads(problem, p);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
}

/// Chooses a kernel's region, fills in what follows from it and the problem, and how the kernel is launched.
///
/// Args:
///   rows, columns: shapes of a warp's tile and of a group.
Status prepare_regions(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, const Arrays& arrays, const Device& device, cudaStream_t stream, CommonParams& p,
                       LaunchShape& shape);

}  // namespace natten_jax::small
