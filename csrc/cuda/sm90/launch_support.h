// What the launches of the Hopper kernels have in common: checks and tensor maps.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cuda/common/counts.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/params.h"
#include "natten_jax/problem.h"

namespace natten_jax::sm90 {

enum class Side { kQuery, kKeyValue };

/// An array of the problem's element type and the width of its heads.
struct Array {
  const void* data;
  std::int64_t head_dim;
};

/// Tokens of a tile.
inline std::int64_t product(const std::int64_t (&tile)[kRank]) {
  return tile[0] * tile[1] * tile[2];
}

/// Head dimension that a kernel is compiled for.
int compiled_head_dim(const Problem& problem);

/// Counts the current device's multiprocessors.
cudaError_t count_multiprocessors(int& count);

/// Encodes tiles of a token grid: encode_tensor_map or encode_head_map.
using Encode = std::string (*)(const TokenGrid&, const std::int64_t (&)[kRank], CUtensorMap&);

/// Says which of the problem's arrays the kernels do not take; empty where they take all.
std::string check_arrays(const Problem& problem, std::int64_t head_dim_step = 64);

/// The maps of an array's dilation groups, by class; classes that no group belongs to have that of another.
std::string encode_classes(const Problem& problem, Side side, Array array, const std::int64_t (&tile)[kRank],
                           CUtensorMap (&maps)[kGroupClasses], Encode encode = encode_tensor_map);

/// The classes that a side's dilation groups belong to, as a bit set.
int group_classes(const Problem& problem, Side side);

/// The map of an array of additional keys or values, `tokens` of which make a tile.
std::string encode_additional(const Problem& problem, Array array, int tokens, CUtensorMap& map,
                              Encode encode = encode_tensor_map);

}  // namespace natten_jax::sm90
