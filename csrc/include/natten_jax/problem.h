// The description of one attention problem, as plain data for host and device code.
//
// Every problem has three token dimensions; problems of lower rank have leading dimensions of extent 1.
#pragma once

#include <cstdint>

#include "natten_jax/windows.h"

namespace natten_jax {

inline constexpr int kRank = 3;

/// Maximum number of tokens of a tile, for every kernel.
inline constexpr std::int64_t kMostTileTokens = 4096;

enum class ElementType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 3 };
inline constexpr int kElementTypes = 4;
/// Number of element types of more than 8 bits; they come first in ElementType. Only some kernels for NVIDIA GPUs
/// support 8-bit elements.
inline constexpr int kWideElementTypes = 3;

NATTEN_JAX_HOST_DEVICE constexpr int element_bytes(ElementType type) {
  constexpr int kBytes[kElementTypes] = {4, 2, 2, 1};
  return kBytes[static_cast<int>(type)];
}

/// The tokens of one side (query or key/value) along one dimension.
struct Tokens {
  std::int64_t extent;        ///< Tokens of the global layout.
  std::int64_t local_extent;  ///< Tokens of the local array.
  std::int64_t origin;        ///< Global coordinate of the first local token.

  /// Range of the indices that the local tokens of a dilation group have within the group. If the dimension wraps,
  /// indices continue into repetitions of the layout. Otherwise the range is clipped to the global layout.
  NATTEN_JAX_HOST_DEVICE constexpr Range<std::int64_t> local_indices(const Window& window, std::int64_t group) const {
    if (window.ends == Ends::kWrap) {
      // group_length does not support negative coordinates, so move the origin by whole repetitions.
      const std::int64_t rounds = origin < 0 ? (extent - 1 - origin) / extent : 0, length = extent / window.dilation;
      const std::int64_t start = origin + rounds * extent;
      return {group_length(window, start, group) - rounds * length,
              group_length(window, start + local_extent, group) - rounds * length};
    }
    const std::int64_t first = larger<std::int64_t>(origin, 0);
    const std::int64_t last = smaller(origin + local_extent, extent);
    // A token's index is the number of tokens of its group that lie before its coordinate.
    return {group_length(window, first, group), group_length(window, last, group)};
  }
};

/// One token dimension: both sides and the windows that relate them.
struct Axis {
  Tokens query;
  Tokens kv;
  Window window;
};

/// Factors of one query head of one batch entry.
struct alignas(8) HeadScale {
  float logits;          ///< Positive.
  float query_gradient;  ///< Positive. Equal to `logits`, or larger if gradients would otherwise lose digits.
};

/// Factors of the logits.
struct Scale {
  float uniform;           ///< Scale of every head if `heads` is null; positive.
  const HeadScale* heads;  ///< [batch, heads], in the memory of the arrays; null if all heads have one scale.

  /// Factors of a head. `head`: index of the head among the heads of all batch entries.
  NATTEN_JAX_HOST_DEVICE HeadScale for_head(std::int64_t head) const {
    if (heads == nullptr) return {uniform, uniform};
#if defined(__CUDA_ARCH__)
    // Bypass L1: with PDL, this kernel may have started before the kernel that wrote the factors ended.
    const float2 both = __ldcg(reinterpret_cast<const float2*>(heads + head));
    return {both.x, both.y};
#else
    return heads[head];
#endif
  }
};

/// The computation, independent of how it is run.
struct Problem {
  ElementType element_type;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t heads_kv;
  std::int64_t head_dim;
  std::int64_t head_dim_v;
  std::int64_t additional_kv;
  // True if the call has this bias and uses GPU kernels. Always false for CPU kernels, because they support the same
  // problems with and without biases.
  bool has_relative_bias;
  bool has_key_bias;
  Scale scale;
  Axis axes[kRank];
  ElementType out_type;  ///< Type of the output: the element type, except for 8-bit elements.

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t heads_per_kv() const { return heads / heads_kv; }

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t queries() const {
    return axes[0].query.local_extent * axes[1].query.local_extent * axes[2].query.local_extent;
  }

  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t keys() const {
    return axes[0].kv.local_extent * axes[1].kv.local_extent * axes[2].kv.local_extent;
  }
};

/// True if a dimension of a problem wraps.
NATTEN_JAX_HOST_DEVICE constexpr bool wraps(const Problem& problem) {
  for (const Axis& axis : problem.axes) {
    if (axis.window.ends == Ends::kWrap) return true;
  }
  return false;
}

/// Tokens of a tile per dimension.
struct TileShapes {
  std::int64_t query[kRank];
  std::int64_t kv[kRank];
};

}  // namespace natten_jax
