#include "cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/parts.h"
#include "cpu/table_gradient.h"

namespace natten_jax::cpu {
namespace {

Status run_pass(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass,
                const Executor& executor) {
  const std::vector<Part> parts = parts_of(problem, tiles, arrays, pass);
  const ItemKernel kernel = host_kernels().kernels[static_cast<int>(pass)][static_cast<int>(problem.element_type)];
  const std::int64_t items = parts.back().first_item + parts.back().plan.items();
  const bool is_done = run_items(executor, items, scratch_bytes(parts), [&](std::int64_t index, std::byte* scratch) {
    const auto next = std::upper_bound(parts.begin(), parts.end(), index,
                                       [](std::int64_t i, const Part& part) { return i < part.first_item; });
    const Part& part = *std::prev(next);
    kernel(part.plan, part.item(index - part.first_item), scratch);
  });
  return is_done ? Status() : Status::resource_exhausted("no memory for the scratch buffers of attention");
}

/// True if the arrays of queries or keys contain padding: tokens outside the layout of their batch entry. No item owns
/// padding, so no kernel writes results there.
bool has_padding(const Problem& problem, const std::int32_t* layouts, bool are_queries) {
  for (std::int64_t i = 0; layouts != nullptr && i < problem.batch * kRank; ++i) {
    const std::int32_t* layout = layouts + i / kRank * kRank * kRank + i % kRank;
    const Axis& axis = problem.axes[i % kRank];
    if (are_queries ? layout[0] + axis.query.local_extent > layout[kRank] : axis.kv.local_extent > layout[2 * kRank]) {
      return true;
    }
  }
  return false;
}

/// True if some local keys lie outside the global layout. Halos at the edges of the layout contain such keys. No item
/// owns these keys, so no kernel writes their gradients.
bool has_keys_outside(const Problem& problem) {
  for (const Axis& axis : problem.axes) {
    if (axis.kv.origin < 0 || axis.kv.origin + axis.kv.local_extent > axis.kv.extent) return true;
  }
  return false;
}

}  // namespace

Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor) {
  if (has_padding(problem, arrays.layouts, true)) {
    const std::int64_t rows = problem.batch * problem.queries() * problem.heads;
    std::memset(arrays.out, 0,
                static_cast<std::size_t>(rows * problem.head_dim_v * element_bytes(problem.element_type)));
    std::fill_n(arrays.logsumexp, rows, -std::numeric_limits<float>::infinity());
    if (arrays.remainder != nullptr) std::fill_n(arrays.remainder, rows, 0.0f);
  }
  return run_pass(problem, tiles, arrays, Pass::kForward, executor);
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Executor& executor) {
  if (has_padding(problem, arrays.layouts, true)) {
    const std::int64_t elements = problem.batch * problem.queries() * problem.heads * problem.head_dim;
    std::memset(arrays.query_gradient, 0, static_cast<std::size_t>(elements * element_bytes(problem.element_type)));
  }
  if (has_keys_outside(problem) || has_padding(problem, arrays.layouts, false)) {
    const std::size_t rows = static_cast<std::size_t>(problem.batch * problem.keys() * problem.heads_kv);
    const auto width = static_cast<std::size_t>(element_bytes(problem.element_type));
    std::memset(arrays.key_gradient, 0, rows * static_cast<std::size_t>(problem.head_dim) * width);
    std::memset(arrays.value_gradient, 0, rows * static_cast<std::size_t>(problem.head_dim_v) * width);
    if (arrays.key_bias != nullptr) {
      std::fill_n(arrays.key_bias_gradient, problem.batch * problem.keys() * problem.heads, 0.0f);
    }
  }
  NATTEN_JAX_RETURN_IF_FAILED(arrays.relative_bias == nullptr
                                  ? run_pass(problem, tiles, arrays, Pass::kQueryGradient, executor)
                                  : run_with_tables(problem, tiles, arrays, executor));
  return run_pass(problem, tiles, arrays, Pass::kKeyValueGradient, executor);
}

}  // namespace natten_jax::cpu
