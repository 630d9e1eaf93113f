// Checks and tensor maps shared by the launches of the Hopper kernels.
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

/// An array of the problem's element type, and its head dimension.
struct Array {
  const void* data;
  std::int64_t head_dim;
};

/// Returns an error if the kernels do not support the problem's arrays.
Status check_arrays(const Problem& problem);

/// Returns an error if a dimension wraps and batch entries have separate layouts.
Status check_seams(const Problem& problem, const Arrays& arrays);

/// Chooses the form of a kernel for the problem's heads and tiles. The error names the tile that is too large for every
/// form; `pass`, "backward " or empty, precedes the tile's name.
Status choose_form(const Form* forms, int count, const Problem& problem, const TileShapes& tiles, const char* pass,
                   int& chosen);

/// Encodes the maps of an array's dilation groups, by class. A class without groups gets the map of another class.
Status encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                      CUtensorMap (&maps)[kGroupClasses]);

/// Classes of the dilation groups of queries or of keys, as a bit set.
int group_classes(const Problem& problem, Side side);

/// Parameters of `launch_entry_maps` for a problem, except the arrays, which the caller sets.
EntryMaps maps_of_entries(const Problem& problem, const Arrays& arrays, int number_of_arrays, CUtensorMap* result);

/// Encodes the map of an array of additional keys or values, with tiles of `tokens` tokens.
Status encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map);

}  // namespace natten_jax::sm90
