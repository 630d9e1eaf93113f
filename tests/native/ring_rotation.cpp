// Counts how many strips (ring_shape.h) next to a border each CTA of an H100 processes in the ring kernels of key and
// value gradients. It compares launches in which the strip order is rotated in each round with launches without
// rotation. Prints four numbers per layout:
//
// - border strips of the average CTA, rounded up;
// - maximum number of border strips of a CTA, with rotation;
// - maximum number of border strips of a CTA, without rotation;
// - number of units that are not processed exactly once.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/small/ring_shape.h"

using namespace natten_jax;
using namespace natten_jax::small;

int main() {
  const Device device{227 << 10, 228 << 10, 1 << 10, 132, true};
  const std::int64_t ctas = device.multiprocessors;
  for (const std::int64_t extent : {96, 128, 160}) {
    for (const std::int64_t head_dim : {32, 64}) {
      Problem problem{};
      problem.element_type = ElementType::kBFloat16;
      problem.batch = problem.heads = problem.heads_kv = 8;
      problem.head_dim = problem.head_dim_v = head_dim;
      for (int d = 0; d < kRank; ++d) {
        Axis& axis = problem.axes[d];
        axis.query.extent = axis.query.local_extent = d == 0 ? 1 : extent;
        axis.kv = axis.query;
        axis.window = {d == 0 ? 1 : 13, 1, 1, Ends::kShift};
      }
      RingShape shape = choose_gradient_ring(problem, Coverage::kComplete, RingLoads::kBoxes, device);
      balance_ring(problem, Kernel::kKeyValueGradient, device, shape);
      const std::int64_t strips = shape.strips[0],
                         units = problem.batch * problem.heads * strips * shape.strips[1] * shape.segments;
      std::int64_t at_border = 0, most[2] = {}, wrong = 0;
      for (const bool rotates : {false, true}) {
        std::vector<int> taken(units);
        for (std::int64_t cta = 0; cta < ctas; ++cta) {
          std::int64_t count = 0;
          for (std::int64_t round = 0; round * ctas < units; ++round) {
            const std::int64_t unit = round * ctas + (cta + (rotates ? round * shape.rotation : 0)) % ctas;
            if (unit >= units) continue;
            ++taken[unit];
            count += unit % strips == 0 || unit % strips == strips - 1;
          }
          most[rotates] = std::max(most[rotates], count);
          if (rotates) at_border += count;
        }
        wrong += std::count_if(taken.begin(), taken.end(), [](int times) { return times != 1; });
      }
      std::printf("%lld %lld %lld %lld\n", static_cast<long long>(divide_up(at_border, ctas)),
                  static_cast<long long>(most[1]), static_cast<long long>(most[0]), static_cast<long long>(wrong));
    }
  }
}
