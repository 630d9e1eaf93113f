#include "cuda/common/seam_boxes.h"

#include <algorithm>
#include <vector>

namespace natten_jax {
namespace {

/// Maximum number of boxes per tile that can be loaded while the previous tile is computed. If a tile has more boxes,
/// loads take longer than the computation.
constexpr double kOverlappedBoxes = 3;

/// A possible extent of boxes along a dimension. No box may cross a seam (the end of a dimension that wraps), so a pass
/// may need more tiles. `tiles` is the number of tiles divided by the number that a dimension without seams would need.
struct Candidate {
  std::int64_t box;
  double tiles;
};

/// Possible extents of boxes along a dimension.
std::vector<Candidate> candidates(const Axis& axis, std::int64_t tile, std::int64_t outer) {
  const Window& window = axis.window;
  if (window.ends != Ends::kWrap) return {{tile, 1}};
  const std::int64_t length = axis.kv.extent / window.dilation;
  // Maximum number of inner tokens (keys in the forward pass) of an outer tile. The queries of a stride group share a
  // window, which may add `stride` - 1 tokens at each end.
  const std::int64_t most = window.kernel_size + std::min(outer, length) - 1 + 2 * (window.stride - 1);
  // If a seam lies among these tokens, the tiles begin up to `box` - 1 tokens earlier. The last tile has room for
  // `room` of these earlier tokens.
  const std::int64_t tiles = (most + tile - 1) / tile, room = tiles * tile - most;
  const double seams = std::min(static_cast<double>(most) / static_cast<double>(length), 1.);
  std::vector<Candidate> result;
  for (std::int64_t box = tile; box > 0; --box) {
    // No seam may cut a box. So the extent of a box must divide the distance between seams, unless only one seam can
    // lie among the tokens.
    if (tile % box != 0 || (length % box != 0 && most + box - 1 > length)) continue;
    const std::int64_t more = std::max<std::int64_t>(box - 1 - room, 0);
    result.push_back({box, 1 + seams * static_cast<double>(more) / static_cast<double>(box * tiles)});
  }
  return result;
}

}  // namespace

SeamBoxes choose_seam_boxes(const Problem& problem, const std::int64_t (&tile)[kRank],
                            const std::int64_t (&outer)[kRank]) {
  std::vector<Candidate> axis_candidates[kRank];
  for (int d = 0; d < kRank; ++d) axis_candidates[d] = candidates(problem.axes[d], tile[d], outer[d]);
  SeamBoxes best{{tile[0], tile[1], tile[2]}, -1};
  for (const Candidate& x : axis_candidates[0]) {
    for (const Candidate& y : axis_candidates[1]) {
      for (const Candidate& z : axis_candidates[2]) {
        const auto boxes = static_cast<double>(tile[0] / x.box * (tile[1] / y.box) * (tile[2] / z.box));
        const double times = x.tiles * y.tiles * z.tiles * std::max(boxes / kOverlappedBoxes, 1.);
        if (best.times < 0 || times < best.times) best = {{x.box, y.box, z.box}, times};
      }
    }
  }
  return best;
}

}  // namespace natten_jax
