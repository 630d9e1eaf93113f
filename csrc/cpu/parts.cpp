#include "cpu/parts.h"

#include <algorithm>

namespace natten_jax::cpu {
namespace {

/// Problem of one batch entry with a separate layout. Windows that do not fit the layout are reduced to the largest
/// windows that fit.
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

}  // namespace

Item Part::item(std::int64_t index) const {
  Item item = plan.item(index);
  item.batch += first_entry;
  return item;
}

std::vector<Part> parts_of(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass) {
  if (arrays.layouts == nullptr) return {{make_plan(problem, tiles, arrays, pass), 0, 0}};
  std::vector<Part> parts;
  std::int64_t items = 0;
  for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
    const Problem own = problem_of_entry(problem, arrays.layouts + entry * kRank * kRank);
    parts.push_back({make_plan(own, tiles, arrays, pass), entry, items});
    parts.back().plan.offsets = offset_table(problem.axes);
    items += parts.back().plan.items();
  }
  return parts;
}

std::size_t scratch_bytes(const std::vector<Part>& parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes = std::max(bytes, part.plan.workspace(nullptr).bytes);
  return bytes;
}

}  // namespace natten_jax::cpu
