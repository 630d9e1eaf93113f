#include "cpu/attention.h"

#include <cstring>

#include "cpu/dispatch.h"

namespace natten_jax::cpu {
namespace {

Status run_pass(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass,
                const Executor& executor) {
  const Plan plan = make_plan(problem, tiles, arrays, pass);
  const ItemKernel kernel = host_kernels().kernels[static_cast<int>(pass)][static_cast<int>(problem.element_type)];
  const bool is_done =
      run_items(executor, plan.items(), plan.workspace(nullptr).bytes,
                [&](std::int64_t index, std::byte* scratch) { kernel(plan, plan.item(index), scratch); });
  return is_done ? Status() : Status::resource_exhausted("no memory for the scratch buffers of attention");
}

/// Whether some local keys lie outside the global layout, as a halo at its edge does. Nothing owns them.
bool has_keys_outside(const Problem& problem) {
  for (const Axis& axis : problem.axes) {
    if (axis.kv.origin < 0 || axis.kv.origin + axis.kv.local_extent > axis.kv.extent) return true;
  }
  return false;
}

}  // namespace

Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor) {
  return run_pass(problem, tiles, arrays, Pass::kForward, executor);
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor) {
  if (has_keys_outside(problem)) {
    const std::size_t rows = static_cast<std::size_t>(problem.batch * problem.keys() * problem.heads_kv);
    const auto width = static_cast<std::size_t>(element_bytes(problem.element_type));
    std::memset(arrays.key_gradient, 0, rows * static_cast<std::size_t>(problem.head_dim) * width);
    std::memset(arrays.value_gradient, 0, rows * static_cast<std::size_t>(problem.head_dim_v) * width);
  }
  NATTEN_JAX_RETURN_IF_FAILED(run_pass(problem, tiles, arrays, Pass::kQueryGradient, executor));
  return run_pass(problem, tiles, arrays, Pass::kKeyValueGradient, executor);
}

}  // namespace natten_jax::cpu
