// What the kernels with a ring are launched with, passed by value.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <type_traits>

#include "cuda/common/device_axis.h"
#include "cuda/small/given_table.h"
#include "cuda/small/ring_bias.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

/// What all kernels with a ring need. Arrays whose tiles come into shared memory are `rows_of(array)`, in the order of
/// `ring_tile_arrays`, those of slabs `columns_of(array)`.
struct RingParams {
  RingShape shape;
  DeviceAxis axis[kRank];  // in the order of the shape's dimensions
  int pitch[kRank];        // tokens between neighbors of a dimension
  int tokens;              // of a batch entry
  int heads;
  int heads_kv;
  int units;  // segments of strips of all batch entries and heads
  Scale scale;
  float exponent_scale;  // of weights as powers of two, where heads have no scales of their own
  cutlass::FastDivmod by_strips[2], by_segments, by_heads, by_heads_per_kv;
  const void* query;
  const void* key;
  const void* value;
  // A warp's tile of each array of rows; a group's part of a slab of each array of columns.
  CUtensorMap tiles[3], slabs[2];
};

/// The forward pass: rows are queries, columns keys and values.
struct RingForwardParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kForward;

  const float* sinks;     // [1 or batch, heads]: a logit of each head that no key stands behind; or null
  bool are_sinks_of_all;  // that all batch entries share
  void* out;
  float* logsumexp;
  float* remainder;  // of the logsumexp, or null

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int) const { return query; }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Query gradients: rows are queries, cotangents of outputs and outputs, columns keys and values.
struct RingQueryParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kQueryGradient;

  const void* out_cotangent;
  const void* out;
  const float* logsumexp;
  const float* remainder;            // null: zeros
  const float* logsumexp_cotangent;  // null: zeros
  // [batch, tokens, heads]: the logsumexp in base 2, or NaN where its remainder counts; delta; the logsumexp in any
  // case; and its remainder.
  float4* statistics;
  void* query_gradient;

  NATTEN_JAX_HOST_DEVICE const void* rows_of(int array) const {
    return array == 0 ? query : array == 1 ? out_cotangent : out;
  }
  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? key : value; }
};

/// Key and value gradients: rows are keys and values, columns queries and cotangents of outputs.
struct RingGradientParams : RingParams {
  static constexpr Kernel kKernel = Kernel::kKeyValueGradient;

  const void* out_cotangent;
  const float4* statistics;  // as in RingQueryParams
  void* key_gradient;
  void* value_gradient;
  CUtensorMap statistics_slabs;

  NATTEN_JAX_HOST_DEVICE const void* columns_of(int array) const { return array == 0 ? query : out_cotangent; }
};

/// What is added to the logits of a kernel with a ring.
enum class RingBiases { kNone, kRelative, kOfKeys };

/// Biases of keys.
struct RingKeyBias {
  const float* of_keys;  // [batch, keys, heads]
  bool is_of_all_heads;  // there is one of each key: [batch, keys]
  float* gradient;       // [batch, keys, heads], of key and value gradients
};

/// What a kernel takes, and such biases.
template <class Params>
struct WithKeyBias : Params {
  RingKeyBias key_bias;
};

/// What a kernel takes, and a relative bias.
template <class Params>
struct WithRelativeBias : Params {
  RingBias bias;
  GivenTable given;              // with lines as they are
  cutlass::FastDivmod by_lines;  // of a plane
};

/// What a kernel takes that has such biases.
template <class Params, RingBiases kBiases>
using RingParamsOf =
    std::conditional_t<kBiases == RingBiases::kRelative, WithRelativeBias<Params>,
                       std::conditional_t<kBiases == RingBiases::kOfKeys, WithKeyBias<Params>, Params>>;

/// Whether lanes store what comes with slabs: biases of keys, where these are columns.
template <class Params>
inline constexpr bool kLanesStore = false;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingForwardParams>> = true;
template <>
inline constexpr bool kLanesStore<WithKeyBias<RingQueryParams>> = true;

}  // namespace natten_jax::small
