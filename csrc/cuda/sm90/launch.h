// Launches the Hopper kernels; the interface between the FFI handlers and csrc/cuda/sm90.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Earlier results that a launch merges with its own. The output arrays hold the results of earlier launches on other
/// keys, for all queries. The launch updates the queries of a box, which must include every query that sees one of its
/// keys. It may also process other queries.
struct Continuation {
  const std::int32_t* first_query;  ///< Device pointer, [3]: first local query of the box.
  std::int64_t queries[kRank];      ///< Extents of the box.
};

struct Schedule {
  bool is_ping_pong;   ///< The warpgroups issue their products in turn.
  bool is_persistent;  ///< Each SM runs one CTA, which processes many query tiles.
};

/// Scratch memory of a forward pass.
struct ForwardScratch {
  std::int32_t* next_tile;  ///< A counter.
  CUtensorMap* entry_maps;  ///< Length: `entry_maps_of_forward`.
};

/// Number of tensor maps in the scratch memory of a pass; zero unless batch entries have separate layouts.
std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays);
std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays);

/// Launches the forward pass on a stream. `continuation`: null unless the launch continues earlier ones; it must be
/// null with per-entry layouts.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays,
                   const Continuation* continuation, Schedule schedule, const ForwardScratch& scratch,
                   cudaStream_t stream);

/// Returns an error if the kernels do not support the problem.
Status check_backward(const Problem& problem, const TileShapes& tiles);

/// Number of float32 elements of scratch memory. They hold dQ sums [batch, heads, x, y, z, head_dim]; a counter of
/// key/value tiles; and for deterministic gradients, a counter per query tile [batch, heads, dilation groups, query
/// tiles] of the CTAs that have added to its dQ.
std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic);

/// Launches the backward pass of a problem that `check_backward` accepts. Non-deterministic gradients are faster, but
/// the rounding of dQ differs from run to run. `statistics`: [batch, heads, x, y, z, 2], logsumexp in base 2 and delta.
/// `scratch`: `backward_scratch_elements` elements.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const float* statistics,
                    float* scratch, CUtensorMap* entry_maps, bool is_deterministic, cudaStream_t stream);

}  // namespace natten_jax::sm90
