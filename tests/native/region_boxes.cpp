// Checks every region that the kernel of key and value gradients could use if batch entries have separate layouts. The
// region's box and tables must have room for all queries that see its keys, in layouts of all lengths. Prints three
// numbers: regions, regions with boxes that are too small, and regions with tables that are too small.
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "cuda/small/region.h"
#include "natten_jax/windows.h"

using namespace natten_jax;
using namespace natten_jax::small;

namespace {

constexpr std::int64_t kLongest = 40;

std::int64_t seen_between(const Window& window, std::int64_t begin, std::int64_t end, std::int64_t length) {
  if (length < window.kernel_size) return length;
  return inverse_window_bounds(window, end - 1, length, length).end -
         inverse_window_bounds(window, begin, length, length).begin;
}

/// Maximum number of queries that see a key tile, and maximum number of queries that see a region, along one dimension
/// and over all lengths. The last region is full (`tiles` tiles); the region before it may have fewer tiles.
struct Seen {
  std::int64_t by_tile = 0, by_region = 0;

  Seen(const Window& window, std::int64_t tile, std::int64_t tiles) {
    for (std::int64_t length = 1; length <= kLongest; ++length) {
      const std::int64_t in_all = divide_up(length, tile);
      for (std::int64_t i = 0; i < in_all; ++i) {
        by_tile = std::max(by_tile, seen_between(window, i * tile, std::min((i + 1) * tile, length), length));
      }
      const std::int64_t first_of_last = std::max<std::int64_t>(in_all - tiles, 0);
      for (std::int64_t first = 0; first < first_of_last; first += tiles) {
        const std::int64_t end = std::min(first + tiles, first_of_last);
        by_region = std::max(by_region, seen_between(window, first * tile, end * tile, length));
      }
      by_region = std::max(by_region, seen_between(window, first_of_last * tile, length, length));
    }
  }
};

}  // namespace

int main() {
  const Device device{227 << 10, 228 << 10, 1 << 10, 132, true};
  int regions = 0, small_boxes = 0, small_tables = 0;
  for (std::int64_t kernel_size = 2; kernel_size <= 11; ++kernel_size) {
    for (const std::int64_t stride : {1, 2}) {
      for (const std::int64_t tile : {1, 2, 4, 8, 16}) {
        Problem problem{};
        problem.element_type = ElementType::kBFloat16;
        problem.batch = problem.heads = problem.heads_kv = 2;
        problem.head_dim = problem.head_dim_v = 32;
        for (int d = 0; d < kRank; ++d) {
          Axis& axis = problem.axes[d];
          axis.query.extent = axis.query.local_extent = d == 0 ? 1 : kLongest;
          axis.kv = axis.query;
          axis.window = {d == 0 ? 1 : kernel_size, d == 0 ? 1 : stride, 1, Ends::kShift};
        }
        const std::int64_t rows[kRank] = {1, tile, kRows / tile}, columns[kRank] = {1, 1, kColumns};
        const auto look = [&](const Region& region) {
          std::int64_t groups[kRank];
          bool is_small = false;
          for (int i = 0; i < kRank; ++i) {
            const Window& window = problem.axes[region.dimension[i]].window;
            const bool is_single = problem.axes[region.dimension[i]].query.extent == 1;
            const Seen seen(window, region.tile[i], region.tiles[i]);
            is_small |= !is_single && seen.by_region > region.extent[i];
            groups[i] = divide_up(is_single ? 1 : seen.by_tile, region.group[i]);
          }
          // The kernel processes two pairs of query groups at a time, and prefetches two more pairs.
          const std::int64_t pairs = groups[0] * groups[2] * divide_up(groups[1], 2);
          ++regions;
          small_boxes += is_small;
          small_tables += 2 * (divide_up(pairs, 2) + 1) > region.table_capacity;
        };
        if (for_each_region(problem, rows, columns, Kernel::kKeyValueGradient, Coverage::kPerEntry, device, look)
                .failed()) {
          return 1;
        }
      }
    }
  }
  std::printf("%d %d %d\n", regions, small_boxes, small_tables);
  return 0;
}
