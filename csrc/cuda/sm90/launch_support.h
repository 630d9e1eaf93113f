// What the launches of the Hopper kernels have in common: checks and tensor maps.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/forms.h"
#include "cuda/sm90/params.h"
#include "cuda/tma/entry_maps.h"
#include "cuda/tma/tensor_map.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

enum class Side { kQuery, kKeyValue };

/// An array of the problem's element type and the width of its heads.
struct Array {
  const void* data;
  std::int64_t head_dim;
};

/// Fails where the kernels do not take the problem's arrays.
Status check_arrays(const Problem& problem);

/// An error where a dimension wraps beside what goes around none.
Status check_seams(const Problem& problem, const Arrays& arrays);

/// Chooses the form of a kernel for the problem's heads and tiles, or says which tile is too large for all. `pass`
/// comes before the tile's name: "backward ", or nothing.
Status choose_form(const Form* forms, int count, const Problem& problem, const TileShapes& tiles, const char* pass,
                   int& chosen);

/// The maps of an array's dilation groups, by class; classes that no group belongs to have that of another.
Status encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                      CUtensorMap (&maps)[kGroupClasses]);

/// The classes that a side's dilation groups belong to, as a bit set.
int group_classes(const Problem& problem, Side side);

/// What `launch_entry_maps` is given of a problem; which arrays there are is the caller's to fill in.
EntryMaps maps_of_entries(const Problem& problem, const Arrays& arrays, int number_of_arrays, CUtensorMap* result);

/// The map of an array of additional keys or values, `tokens` of which make a tile.
Status encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map);

}  // namespace natten_jax::sm90
