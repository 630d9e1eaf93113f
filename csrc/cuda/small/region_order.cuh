// Order in which CTAs take regions if dimensions wrap.
#pragma once

#include "cuda/small/params.h"

namespace natten_jax::small {

/// Position of a region: its dilation group and its index in the group, per dimension.
struct RegionPlace {
  int residue[kRank], number[kRank];
};

/// Returns region `id`, in an order with the regions at a seam first. They take longer. If they came last, like the
/// lower edge of an image in plain order, most SMs would be idle while the last CTAs compute them.
CUTE_DEVICE RegionPlace find_cut_regions_first(const CommonParams& p, int id) {
  // Regions cut in the first dimension, then those cut only in the second, and so on; finally all others.
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
  RegionPlace result;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const int next = id / count[d];
    p.axis[d].by_dilation(result.number[d], result.residue[d], first[d] + id - next * count[d]);
    id = next;
    // A dimension's last regions come first in this order.
    result.number[d] -= p.seam_regions[d].at_end;
    if (result.number[d] < 0) result.number[d] += p.region.regions[d];
  }
  return result;
}

}  // namespace natten_jax::small
