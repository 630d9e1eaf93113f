#include "cpu/table_gradient.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/parts.h"

namespace natten_jax::cpu {
namespace {

/// Number of ranges (see ItemRange) that suffices to keep all threads of a host busy. It is limited because the
/// gradients of each range take memory.
constexpr std::int64_t kEnoughRanges = 128;

/// Work items of a key/value head that one thread processes in sequence. They add to the same gradients, which no other
/// range uses.
struct ItemRange {
  const Part* part;
  std::int64_t begin;
  std::int64_t end;
};

/// ItemRanges of all key/value heads, in the order of the flattened [batch, heads_kv].
struct ItemRanges {
  std::vector<ItemRange> all;
  /// Per head: index of its first range in `all`. The last element is the size of `all`.
  std::vector<std::int64_t> first_of_head;
};

ItemRanges divide_items(const Problem& problem, const std::vector<Part>& parts) {
  const std::int64_t heads = problem.batch * problem.heads_kv;
  const std::int64_t most = (kEnoughRanges + heads - 1) / heads;
  ItemRanges ranges{{}, {0}};
  for (const Part& part : parts) {
    const std::int64_t own_heads = part.plan.problem.batch * problem.heads_kv;
    const std::int64_t items = part.plan.items() / own_heads;
    const std::int64_t count = std::min(most, items);
    for (std::int64_t head = 0; head < own_heads; ++head) {
      const std::int64_t first = head * items;
      for (std::int64_t i = 0; i < count; ++i) {
        ranges.all.push_back({&part, first + items * i / count, first + items * (i + 1) / count});
      }
      ranges.first_of_head.push_back(static_cast<std::int64_t>(ranges.all.size()));
    }
  }
  return ranges;
}

struct Free {
  void operator()(float* numbers) const { std::free(numbers); }
};

}  // namespace

Status run_with_tables(const Problem& problem, const TileShapes& tiles, const Arrays& arrays,
                       const Executor& executor) {
  const Status no_memory = Status::resource_exhausted("no memory for the gradients of relative biases");
  const std::vector<Part> parts = parts_of(problem, tiles, arrays, Pass::kQueryGradient);
  const ItemRanges ranges = divide_items(problem, parts);
  const std::int64_t tables = problem.heads_per_kv() * offset_table(problem.axes).entries;
  const std::size_t numbers = std::max<std::size_t>(ranges.all.size(), 1) * static_cast<std::size_t>(tables);
  const std::unique_ptr<float, Free> sums(static_cast<float*>(std::calloc(numbers, sizeof(float))));
  if (sums == nullptr) return no_memory;

  constexpr int kPass = static_cast<int>(Pass::kQueryGradient);
  const ItemKernel kernel = host_kernels().kernels[kPass][static_cast<int>(problem.element_type)];
  const auto count = static_cast<std::int64_t>(ranges.all.size());
  if (!run_items(executor, count, scratch_bytes(parts), [&](std::int64_t index, std::byte* scratch) {
        const ItemRange& range = ranges.all[static_cast<std::size_t>(index)];
        for (std::int64_t i = range.begin; i < range.end; ++i) {
          Item item = range.part->item(i);
          item.table_sums = sums.get() + index * tables;
          kernel(range.part->plan, item, scratch);
        }
      })) {
    return no_memory;
  }
  const std::int64_t heads = problem.batch * problem.heads_kv;
  const bool is_done = run_items(executor, heads, 0, [&](std::int64_t head, std::byte*) {
    const std::int64_t* range = ranges.first_of_head.data() + head;
    float* gradient = arrays.relative_bias_gradient + head * tables;
    std::fill_n(gradient, tables, 0.0f);
    for (std::int64_t i = range[0]; i < range[1]; ++i) {
      const float* own = sums.get() + i * tables;
      for (std::int64_t entry = 0; entry < tables; ++entry) gradient[entry] += own[entry];
    }
  });
  return is_done ? Status() : no_memory;
}

}  // namespace natten_jax::cpu
