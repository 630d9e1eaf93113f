// The pass for gradients of queries, where it finds those of relative biases, too.
#pragma once

#include "cpu/executor.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::cpu {

/// Runs it. Sums are the same in every run, whatever the number of threads is.
Status run_with_tables(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor);

}  // namespace natten_jax::cpu
