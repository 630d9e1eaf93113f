#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/small/ring_shape.h"
#include "cuda/small/ring_span.h"

namespace natten_jax::small {
namespace {

/// Maximum number of rounds for which work is balanced. In each round, a CTA processes one unit. With more rounds, the
/// differences between units average out.
constexpr std::int64_t kMostRounds = 32;

/// Returns the relative work of each strip along dimension `i` of the shape. `i` is 0 or 1. If rows are keys, the
/// relative work is the number of blocks that the strip's warps see.
std::vector<double> blocks_of_strips(const Problem& problem, Kernel kernel, const RingShape& shape, int i) {
  const bool rows_are_keys = kernel == Kernel::kKeyValueGradient;
  const Span span{problem.axes[shape.dimension[i]], rows_are_keys};
  const std::int64_t rows = shape.rows[i], adjacent = shape.adjacent[i],
                     block_extent = i == 0            ? shape.wide
                                    : shape.thick > 1 ? 1
                                                      : kBlockKeys / shape.wide;
  std::vector<double> result;
  for (std::int64_t strip = 0; strip < span.length(); strip += rows * adjacent) {
    // If rows are queries, the work is the same for all strips: every warp reads the same number of blocks, even at an
    // edge of the layout.
    const StripBlocks strip_blocks(span, strip, rows, adjacent, block_extent, shape.phase[i]);
    result.push_back(rows_are_keys ? static_cast<double>(strip_blocks.total) : 1);
  }
  return result;
}

}  // namespace

void balance_ring(const Problem& problem, Kernel kernel, const Device& device, RingShape& shape) {
  shape.rotation = 0;
  const std::int64_t ctas = device.multiprocessors, heads = problem.heads,
                     units = problem.batch * heads * shape.strips[0] * shape.strips[1] * shape.segments;
  if (shape.warps == 0 || units <= ctas || units > kMostRounds * ctas) return;
  const std::vector<double> across = blocks_of_strips(problem, kernel, shape, 0),
                            inside = blocks_of_strips(problem, kernel, shape, 1);
  double average = 0;
  for (const double a : across) {
    for (const double b : inside) average += a * b / (shape.strips[0] * shape.strips[1]);
  }
  // Relative times of the units, in the order of RingUnit. About half of a tile's time does not depend on the columns
  // that it sees.
  std::vector<double> times(static_cast<std::size_t>(units));
  for (std::int64_t unit = 0; unit < units; ++unit) {
    const std::int64_t inner = unit / shape.strips[0] / heads, segment = inner / shape.strips[1] % shape.segments,
                       steps = std::min<std::int64_t>(shape.segment_steps, shape.steps - segment * shape.segment_steps);
    times[unit] =
        static_cast<double>(steps) * (average + across[unit % shape.strips[0]] * inside[inner % shape.strips[1]]);
  }
  double least = std::numeric_limits<double>::max();
  for (std::int64_t rotation = 0; rotation < ctas; ++rotation) {
    double longest = 0;
    for (std::int64_t cta = 0; cta < ctas && longest < least; ++cta) {
      double time = 0;
      for (std::int64_t round = 0; round * ctas < units; ++round) {
        const std::int64_t unit = round * ctas + (cta + round * rotation) % ctas;
        if (unit < units) time += times[unit];
      }
      longest = std::max(longest, time);
    }
    if (longest >= least) continue;
    least = longest;
    shape.rotation = static_cast<int>(rotation);
  }
}

}  // namespace natten_jax::small
