// The order in which the Hopper backward kernel takes key/value tiles.
#pragma once

#include "cuda/sm90/backward_params.h"

namespace natten_jax::sm90 {

/// Fills in the order of at most `kMostSortedTiles` tiles, whose numbers `p` must hold: those that the most query tiles
/// see come first, so that all CTAs are done at about the same time. Where a part of a layout lies is not known here:
/// it is sorted as if it were at the start.
void sort_tiles(const Problem& problem, const TileShapes& tiles, BackwardParams& p);

}  // namespace natten_jax::sm90
