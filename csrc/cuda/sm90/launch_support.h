// Helpers of the launches of the Hopper kernels: checks, the choice of a form, and tensor maps.
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

/// Chooses the form of a kernel for the problem's head dimensions and tiles. Returns an error if a tile is too large
/// for every form that is compiled for these head dimensions. `pass` is "backward " or empty, and precedes the tile's
/// name in the error.
Status choose_form(const Form* forms, int count, const Problem& problem, const TileShapes& tiles, const char* pass,
                   int& chosen);

/// Encodes the tensor maps of an array, one per class of dilation groups. A class without groups gets the map of
/// another class.
Status encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                      CUtensorMap (&maps)[kGroupClasses]);

/// Bit set of the classes that have dilation groups, for queries or for keys.
int group_classes(const Problem& problem, Side side);

/// Returns parameters of `launch_entry_maps` for a problem. The caller sets the fields `are_queries`, `base_maps` and
/// `counter`.
EntryMaps maps_of_entries(const Problem& problem, const Arrays& arrays, int number_of_arrays, CUtensorMap* result);

/// Encodes the tensor map of an array of additional keys or values, for loads of `tokens` tokens at a time.
Status encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map);

}  // namespace natten_jax::sm90
