// Order in which CTAs process regions if a dimension wraps.
#pragma once

#include "cuda/small/params.h"

namespace natten_jax::small {

/// Position of a region in each dimension: its dilation group, and its index in this group.
struct RegionPosition {
  int residue[kRank], number[kRank];
};

/// Returns the position of region `id`. The regions that a seam cuts come first, because they take longer
/// (region_order.h). In index order, the cut regions at the lower edge of an image would come last, and most SMs would
/// be idle while the last CTAs compute them.
CUTE_DEVICE RegionPosition find_cut_regions_first(const CommonParams& p, int id) {
  // The order: regions cut in dimension 0, then regions cut in dimension 1 but not in dimension 0, then regions cut
  // only in dimension 2, and then all other regions.
  int first[kRank] = {}, count[kRank];
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) count[d] = p.axis[d].dilation * p.region.regions[d];
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const int cut = p.axis[d].dilation * p.seam_regions[d].count, all = count[d];
    count[d] = cut;
    const int regions = count[0] * count[1] * count[2];
    if (id < regions) break;
    id -= regions;
    first[d] = cut;
    count[d] = all - cut;
  }
  RegionPosition result;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const int next = id / count[d];
    p.axis[d].by_dilation(result.number[d], result.residue[d], first[d] + id - next * count[d]);
    id = next;
    // Along a dimension, the cut regions at its end come before the cut regions at its beginning.
    result.number[d] -= p.seam_regions[d].at_end;
    if (result.number[d] < 0) result.number[d] += p.region.regions[d];
  }
  return result;
}

}  // namespace natten_jax::small
