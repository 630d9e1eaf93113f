// Launches the Hopper kernels; the interface between the FFI handlers and csrc/cuda/sm90.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// What a launch continues: its arrays hold what earlier ones found on other keys, for all queries. It merges this with
/// what it finds, for the queries of a box; all that see one of its keys must be among them. Others may be looked at.
struct Continuation {
  const std::int32_t* first_query;  ///< Device pointer, [3]: where the box begins among the local queries.
  std::int64_t queries[kRank];      ///< Its extents.
};

struct Schedule {
  bool is_ping_pong;   ///< The warpgroups issue products one after the other.
  bool is_persistent;  ///< One CTA a multiprocessor walks over many query tiles.
};

/// Scratch memory of a forward pass.
struct ForwardScratch {
  std::int32_t* next_tile;  ///< One number.
  CUtensorMap* entry_maps;  ///< As many as `entry_maps_of_forward` says.
};

/// Tensor maps in the scratch memory of a pass: where batch entries have layouts of their own.
std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays);
std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays);

/// Runs the forward pass on a stream; `continuation` is null where it continues nothing, which calls with layouts do.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays,
                   const Continuation* continuation, Schedule schedule, const ForwardScratch& scratch,
                   cudaStream_t stream);

/// Fails where the kernels do not take the problem.
Status check_backward(const Problem& problem, const TileShapes& tiles);

/// Scratch memory: sums of the query gradient [batch, heads, x, y, z, head_dim]; a counter of key/value tiles; for
/// deterministic gradients, a counter per query tile [batch, heads, dilation groups, query tiles] of those that have
/// added to its gradient.
std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic);

/// Runs the backward pass of a problem that `check_backward` takes on a stream. Gradients that are not deterministic
/// are faster; those of queries then differ in rounding from run to run. `statistics` are [batch, heads, x, y, z, 2]:
/// logsumexp in base 2, delta; `scratch` has as many elements as `backward_scratch_elements` says.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const float* statistics,
                    float* scratch, CUtensorMap* entry_maps, bool is_deterministic, cudaStream_t stream);

}  // namespace natten_jax::sm90
