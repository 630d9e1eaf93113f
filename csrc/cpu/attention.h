// Attention on the host. The work items of a pass are distributed over a thread pool.
#pragma once

#include "cpu/executor.h"
#include "cpu/plan.h"
#include "natten_jax/status.h"

namespace natten_jax::cpu {

/// Computes output and logsumexp, and the remainder of the logsumexp if its array is not null.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

/// Computes the gradients of query, key, value, additional keys and values, and biases.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

}  // namespace natten_jax::cpu
