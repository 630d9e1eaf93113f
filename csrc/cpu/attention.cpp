#include "cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "cpu/dispatch.h"

namespace natten_jax::cpu {
namespace {

/// The problem of one batch entry, which has a layout of its own; windows are the largest that fit it.
Problem problem_of_entry(const Problem& all, const std::int32_t* layout) {
  Problem p = all;
  p.batch = 1;
  for (int dim = 0; dim < kRank; ++dim) {
    Axis& axis = p.axes[dim];
    axis.query.origin = layout[dim];
    axis.query.extent = layout[kRank + dim];
    axis.kv.extent = layout[2 * kRank + dim];
    const std::int64_t most =
        std::max(axis.kv.extent / axis.window.dilation, std::min<std::int64_t>(axis.kv.extent, 1));
    axis.window.kernel_size = std::min(axis.window.kernel_size, most);
    axis.window.stride = std::max<std::int64_t>(std::min(axis.window.stride, axis.window.kernel_size), 1);
  }
  return p;
}

/// A pass over entries of the batch that are alike.
struct Part {
  Plan plan;
  std::int64_t first_entry;
  std::int64_t first_item;
};

/// All entries in one part; or one each, where they have layouts of their own.
std::vector<Part> parts_of(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass) {
  if (arrays.layouts == nullptr) return {{make_plan(problem, tiles, arrays, pass), 0, 0}};
  std::vector<Part> parts;
  std::int64_t items = 0;
  for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
    const Problem own = problem_of_entry(problem, arrays.layouts + entry * kRank * kRank);
    parts.push_back({make_plan(own, tiles, arrays, pass), entry, items});
    items += parts.back().plan.items();
  }
  return parts;
}

Status run_pass(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass,
                const Executor& executor) {
  const std::vector<Part> parts = parts_of(problem, tiles, arrays, pass);
  const ItemKernel kernel = host_kernels().kernels[static_cast<int>(pass)][static_cast<int>(problem.element_type)];
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes = std::max(bytes, part.plan.workspace(nullptr).bytes);
  const std::int64_t items = parts.back().first_item + parts.back().plan.items();
  const bool is_done = run_items(executor, items, bytes, [&](std::int64_t index, std::byte* scratch) {
    const auto next = std::upper_bound(parts.begin(), parts.end(), index,
                                       [](std::int64_t i, const Part& part) { return i < part.first_item; });
    const Part& part = *std::prev(next);
    Item item = part.plan.item(index - part.first_item);
    item.batch += part.first_entry;
    kernel(part.plan, item, scratch);
  });
  return is_done ? Status() : Status::resource_exhausted("no memory for the scratch buffers of attention");
}

/// Whether some tokens of an array lie outside of the layouts of their entries, as padding does. Nothing owns them.
bool has_padding(const Problem& problem, const std::int32_t* layouts, bool of_queries) {
  for (std::int64_t i = 0; layouts != nullptr && i < problem.batch * kRank; ++i) {
    const std::int32_t* layout = layouts + i / kRank * kRank * kRank + i % kRank;
    const Axis& axis = problem.axes[i % kRank];
    if (of_queries ? layout[0] + axis.query.local_extent > layout[kRank] : axis.kv.local_extent > layout[2 * kRank]) {
      return true;
    }
  }
  return false;
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
  }
  NATTEN_JAX_RETURN_IF_FAILED(run_pass(problem, tiles, arrays, Pass::kQueryGradient, executor));
  return run_pass(problem, tiles, arrays, Pass::kKeyValueGradient, executor);
}

}  // namespace natten_jax::cpu
