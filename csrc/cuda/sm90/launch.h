// Launches of the Hopper kernels. This is the interface that csrc/cuda/sm90 provides to the FFI handlers.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Continuation of earlier launches on other keys. The output arrays contain the results of these launches for all
/// queries. The new launch merges its results with them for the queries of a box. The box must contain every query that
/// attends to a key of the new launch. The launch may also process queries outside of the box.
struct Continuation {
  const std::int32_t* first_query;  ///< Device pointer, [3]: local coordinates of the box's first query.
  std::int64_t queries[kRank];      ///< Extents of the box.
};

struct Schedule {
  bool is_ping_pong;   ///< True if the warpgroups take turns in issuing their products.
  bool is_persistent;  ///< True if each SM runs one CTA for many query tiles, false if each query tile has a CTA.
};

/// Scratch memory of a forward pass.
struct ForwardScratch {
  std::int32_t* next_tile;  ///< Counter of the query tiles that CTAs have taken.
  CUtensorMap* entry_maps;  ///< Array of `entry_maps_of_forward` tensor maps.
};

/// Number of tensor maps in the scratch memory of a pass. It is zero unless batch entries have separate layouts.
std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays);
std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays);

/// Launches the forward pass on a stream. `continuation` is null unless the launch continues earlier ones. It must be
/// null if batch entries have separate layouts.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays,
                   const Continuation* continuation, Schedule schedule, const ForwardScratch& scratch,
                   cudaStream_t stream);

/// Returns an error if the backward kernels do not support the problem.
Status check_backward(const Problem& problem, const TileShapes& tiles);

/// Number of float32 elements in the scratch memory of a backward pass. The scratch memory contains dQ sums [batch,
/// heads, x, y, z, head_dim] and a counter of the key/value tiles that CTAs have taken. If `is_deterministic`, it also
/// contains a counter per query tile [batch, heads, dilation groups, query tiles]. Each of these counts the CTAs that
/// have added to the query tile's dQ.
std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic);

/// Launches the backward pass of a problem that `check_backward` accepts. Unless `is_deterministic`, the pass is
/// faster, but the rounding errors of dQ differ between executions. `statistics` has shape [batch, heads, x, y, z, 2]
/// and contains logsumexps in base 2 and deltas. `scratch` has `backward_scratch_elements` elements.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const float* statistics,
                    float* scratch, CUtensorMap* entry_maps, bool is_deterministic, cudaStream_t stream);

}  // namespace natten_jax::sm90
