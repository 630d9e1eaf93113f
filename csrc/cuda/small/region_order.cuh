// In which order CTAs take regions where dimensions wrap.
#pragma once

#include "cuda/small/params.h"

namespace natten_jax::small {

/// Where a region lies: its dilation group, and its number in that, of each dimension.
struct RegionPlace {
  int residue[kRank], number[kRank];
};

/// The `id`th region, of which those that a seam cuts come first: they take longer, and where they came last, as
/// the lower edge of an image does by its numbers, few multiprocessors would be left to finish them.
CUTE_DEVICE RegionPlace find_cut_regions_first(const CommonParams& p, int id) {
  // Those that are cut in the first dimension; those that are cut in the second one alone, and so on; all others.
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
    // The last ones of a dimension begin the order.
    result.number[d] -= p.seam_regions[d].at_end;
    if (result.number[d] < 0) result.number[d] += p.region.regions[d];
  }
  return result;
}

}  // namespace natten_jax::small
