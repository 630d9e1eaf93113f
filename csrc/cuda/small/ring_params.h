// Parameters of the kernels with a ring (ring_shape.h), passed by value.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <type_traits>

#include "cuda/common/device_axis.h"
#include "cuda/small/given_table.h"
#include "cuda/small/ring_bias.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

/// Parameters of all kernels with a ring. In derived structs, `rows_of(i)` returns array `i` of the arrays whose tiles
/// are loaded to shared memory (ring_tile_arrays), and `columns_of(i)` returns one of the two arrays whose columns are
/// loaded in slabs.
struct RingParams {
  RingShape shape;
  DeviceAxis axis[kRank];  // in the order of the shape's dimensions
  int pitch[kRank];        // distances in tokens between neighbors along the shape's dimensions
  int tokens;              // number of tokens per batch entry
  int heads;
  int heads_kv;
  int units;  // number of units (RingUnit): segments of strips, over all batch entries and heads
  Scale scale;
  float exponent_scale;  // factor from products to logits in base 2, if scales are not per head
  cutlass::FastDivmod by_strips[2], by_segments, by_heads, by_heads_per_kv;
  const void* query;
  const void* key;
  const void* value;
  // TMA tensor maps.
  // - tiles: for each array of rows; a box is a warp's tile.
  // - slabs: for each array of columns; a box is the part of a slab that belongs to one group.
  CUtensorMap tiles[3], slabs[2];
};

/// Parameters of the forward pass. Rows are queries. Columns are keys and values.
struct RingForwardParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kForward;

  const float* sinks;     // [1 or batch, heads] or null: an extra logit per head in the softmax denominator
  bool are_sinks_shared;  // all batch entries have the same sinks
  void* out;
  float* logsumexp;
  float* remainder;  // remainder of the logsumexp, or null

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int) const { return query; }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Parameters of the kernel of query gradients. Rows are queries, dO and O. Columns are keys and values.
struct RingQueryParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kQueryGradient;

  const void* out_cotangent;
  const void* out;
  const float* logsumexp;
  const float* remainder;            // null stands for zeros
  const float* logsumexp_cotangent;  // null stands for zeros
  // [batch, tokens, heads]. The four numbers of an element are:
  // - the logsumexp in base 2, or NaN if its remainder is significant
  // - delta
  // - the logsumexp in base 2, even if its remainder is significant
  // - the remainder
  float4* statistics;
  void* query_gradient;

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int array) const {
    return array == 0 ? query : array == 1 ? out_cotangent : out;
  }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Parameters of the kernel of key and value gradients. Rows are keys and values. Columns are queries and dO.
struct RingGradientParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kKeyValueGradient;

  const void* out_cotangent;
  const float4* statistics;  // RingQueryParams::statistics
  void* key_gradient;
  void* value_gradient;
  CUtensorMap statistics_slabs;

  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? query : out_cotangent; }
};

/// Kind of biases that a kernel with a ring adds to logits.
enum class RingBiases { kNone, kRelative, kKey };

/// Key biases.
struct RingKeyBias {
  const float* biases;      // [batch, keys, heads]
  bool is_shared_by_heads;  // all heads have the same biases: `biases` is [batch, keys]
  float* gradient;          // [batch, keys, heads], written by the kernel of key and value gradients
};

/// Kernel parameters with key biases.
template <class Params>
struct WithKeyBias : Params {
  RingKeyBias key_bias;
};

/// Kernel parameters with a relative bias.
template <class Params>
struct WithRelativeBias : Params {
  RingBias bias;
  GivenTable given;              // the caller's biases; their lines have no padding
  cutlass::FastDivmod by_lines;  // divides by the number of lines of a plane
};

/// Parameters of a kernel with the given kind of biases.
template <class Params, RingBiases kBiases>
using RingParamsOf = std::conditional_t<kBiases == RingBiases::kRelative, WithRelativeBias<Params>,
                                        std::conditional_t<kBiases == RingBiases::kKey, WithKeyBias<Params>, Params>>;

/// True if lanes of loader warps store data in shared memory, in addition to the slabs that TMA loads. They store key
/// biases if keys are columns.
template <class Params>
inline constexpr bool kLanesStore = false;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingForwardParams>> = true;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingQueryParams>> = true;

}  // namespace natten_jax::small
