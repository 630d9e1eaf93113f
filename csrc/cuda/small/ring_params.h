// Parameters of the kernels with a ring, passed by value.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <type_traits>

#include "cuda/common/device_axis.h"
#include "cuda/small/given_table.h"
#include "cuda/small/ring_bias.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

/// Parameters of all kernels with a ring. `rows_of(array)` are the arrays whose tiles are loaded to shared memory, in
/// the order of `ring_tile_arrays`; `columns_of(array)` are the arrays of slabs.
struct RingParams {
  RingShape shape;
  DeviceAxis axis[kRank];  // in the order of the shape's dimensions
  int pitch[kRank];        // distance in tokens between neighbors along a dimension
  int tokens;              // per batch entry
  int heads;
  int heads_kv;
  int units;  // segments of strips, over all batch entries and heads
  Scale scale;
  float exponent_scale;  // from products to logits in base 2, without per-head scales
  cutlass::FastDivmod by_strips[2], by_segments, by_heads, by_heads_per_kv;
  const void* query;
  const void* key;
  const void* value;
  // TMA maps: a warp's tile of each array of rows; a group's part of a slab of each array of columns.
  CUtensorMap tiles[3], slabs[2];
};

/// The forward pass: rows are queries, columns keys and values.
struct RingForwardParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kForward;

  const float* sinks;     // [1 or batch, heads]: an extra logit per head in the softmax denominator; or null
  bool are_sinks_of_all;  // one set of sinks for all batch entries
  void* out;
  float* logsumexp;
  float* remainder;  // remainder of the logsumexp, or null

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int) const { return query; }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Query gradients: rows are queries, dO and O, columns keys and values.
struct RingQueryParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kQueryGradient;

  const void* out_cotangent;
  const void* out;
  const float* logsumexp;
  const float* remainder;            // null: zeros
  const float* logsumexp_cotangent;  // null: zeros
  // [batch, tokens, heads]: the logsumexp in base 2 (NaN if its remainder matters), delta, the logsumexp
  // in base 2 in any case, and its remainder.
  float4* statistics;
  void* query_gradient;

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int array) const {
    return array == 0 ? query : array == 1 ? out_cotangent : out;
  }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Key and value gradients: rows are keys and values, columns queries and dO.
struct RingGradientParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kKeyValueGradient;

  const void* out_cotangent;
  const float4* statistics;  // as in RingQueryParams
  void* key_gradient;
  void* value_gradient;
  CUtensorMap statistics_slabs;

  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? query : out_cotangent; }
};

/// The biases that a kernel with a ring adds to logits.
enum class RingBiases { kNone, kRelative, kOfKeys };

/// Key biases.
struct RingKeyBias {
  const float* of_keys;  // [batch, keys, heads]
  bool is_of_all_heads;  // one bias per key, shared by all heads: [batch, keys]
  float* gradient;       // [batch, keys, heads], from the kernel of key and value gradients
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
  GivenTable given;              // with unpadded lines
  cutlass::FastDivmod by_lines;  // divides by the lines of a plane
};

/// Parameters of a kernel with the given kind of biases.
template <class Params, RingBiases kBiases>
using RingParamsOf =
    std::conditional_t<kBiases == RingBiases::kRelative, WithRelativeBias<Params>,
                       std::conditional_t<kBiases == RingBiases::kOfKeys, WithKeyBias<Params>, Params>>;

/// True if loader lanes store data next to the slabs: key biases, if keys are columns.
template <class Params>
inline constexpr bool kLanesStore = false;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingForwardParams>> = true;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingQueryParams>> = true;

}  // namespace natten_jax::small
