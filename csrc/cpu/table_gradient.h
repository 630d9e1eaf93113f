// The query-gradient pass of calls with relative biases, which also computes the gradients of these biases.
#pragma once

#include "cpu/executor.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::cpu {

/// Runs the pass. Repeated runs give bitwise equal gradients, independent of the number of threads.
Status run_with_tables(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

}  // namespace natten_jax::cpu
