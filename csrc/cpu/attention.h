// Attention on the host: the passes of one call, spread over a thread pool.
#pragma once

#include "cpu/executor.h"
#include "cpu/plan.h"
#include "natten_jax/status.h"

namespace natten_jax::cpu {

/// Computes output and logsumexp.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

/// Computes the gradients of query, key, value and the additional keys and values.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

}  // namespace natten_jax::cpu
