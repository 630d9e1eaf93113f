#include "cuda/small/ring_launch.h"

#include <algorithm>
#include <type_traits>

#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/small/bias_launch.h"
#include "cuda/small/read_device.h"
#include "cuda/small/region_cache.h"
#include "cuda/small/ring_kernels.h"
#include "cuda/tma/tensor_map.h"
#include "natten_jax/logsumexp.h"
#include "natten_jax/offset_table.h"

namespace natten_jax::small {
namespace {

/// Chooses the method of loading slabs on the current device.
Status find_ring_loads(RingLoads& result) {
  bool is_hopper = false;
  NATTEN_JAX_RETURN_IF_FAILED(find_hopper(is_hopper));
  result = is_hopper ? RingLoads::kBoxes : RingLoads::kChunks;
  return {};
}

/// Encodes the TMA tensor map of an array. `box` has the extents of a box in tokens, in the order of the shape's
/// dimensions.
Status encode_boxes(const Problem& problem, const RingParams& p, const void* array, std::int64_t heads,
                    const int (&box)[kRank], CUtensorMap& map) {
  TokenBoxes tokens{};
  tokens.data = array;
  tokens.element_type = problem.element_type;
  tokens.batch = problem.batch;
  tokens.heads = heads;
  tokens.head_dim = problem.head_dim;
  for (int i = 0; i < kRank; ++i) {
    tokens.extent[i] = p.axis[i].kv_extent;
    tokens.pitch[i] = p.pitch[i];
    tokens.dilation[i] = 1;
  }
  return encode_box_map(tokens, box, map);
}

/// If TMA loads slabs, encodes the tensor maps of a kernel's arrays. A box of an array of columns is the part of a slab
/// that belongs to one group of blocks.
template <class Params>
Status encode_arrays(const Problem& problem, Params& p) {
  constexpr bool kRowsAreKeys = Params::kKernel == Kernel::kKeyValueGradient;
  if (p.shape.loads != RingLoads::kBoxes) return {};
  if constexpr (!kRowsAreKeys) {
    for (int i = 0; i < ring_tile_arrays(Params::kKernel); ++i) {
      NATTEN_JAX_RETURN_IF_FAILED(encode_boxes(problem, p, p.rows_of(i), problem.heads, p.shape.rows, p.tiles[i]));
    }
  }
  const int group[kRank] = {p.shape.wide, p.shape.inner, p.shape.thick};
  const std::int64_t heads = kRowsAreKeys ? problem.heads : problem.heads_kv;
  for (int i = 0; i < 2; ++i) {
    NATTEN_JAX_RETURN_IF_FAILED(encode_boxes(problem, p, p.columns_of(i), heads, group, p.slabs[i]));
  }
  if constexpr (kRowsAreKeys) {
    // TMA loads the four floats of a query and head as eight 16-bit elements.
    Problem statistics_problem = problem;
    statistics_problem.head_dim = kStatisticsBytes / 2;
    NATTEN_JAX_RETURN_IF_FAILED(encode_boxes(statistics_problem, p, p.statistics, heads, group, p.statistics_slabs));
  }
  return {};
}

/// Calls `call` with a problem's element type and the method of loading slabs as constants.
template <class Call>
Status with_ring_kernels(const Problem& problem, RingLoads loads, const Call& call) {
  return status_of(with_half_type(problem.element_type, cudaErrorInvalidValue, [&](auto type) -> cudaError_t {
#if defined(NATTEN_JAX_SM90)
    if (loads == RingLoads::kBoxes) return call(type, std::integral_constant<RingLoads, RingLoads::kBoxes>{});
#endif
    if (loads == RingLoads::kChunks) return call(type, std::integral_constant<RingLoads, RingLoads::kChunks>{});
    return cudaErrorInvalidValue;
  }));
}

/// Fills in the parameters that all kernels share, and the launch shape.
Status prepare(const Problem& problem, const RingShape& shape, const Arrays& arrays, cudaStream_t stream, RingParams& p,
               LaunchShape& launch) {
  p.shape = shape;
  for (int i = 0; i < kRank; ++i) {
    const int d = shape.dimension[i];
    p.axis[i] = device_axis(problem.axes[d], 1, 1);
    p.pitch[i] = 1;
    for (int inner = d + 1; inner < kRank; ++inner) {
      p.pitch[i] *= static_cast<int>(problem.axes[inner].query.local_extent);
    }
  }
  p.tokens = static_cast<int>(problem.queries());
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.scale = problem.scale;
  p.exponent_scale = problem.scale.uniform * kLog2E;
  p.units = static_cast<int>(problem.batch * problem.heads) * shape.strips[0] * shape.strips[1] * shape.segments;
  for (int i = 0; i < 2; ++i) p.by_strips[i] = cutlass::FastDivmod(shape.strips[i]);
  p.by_segments = cutlass::FastDivmod(shape.segments);
  p.by_heads = cutlass::FastDivmod(p.heads);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
  p.query = arrays.query;
  p.key = arrays.key;
  p.value = arrays.value;
  int multiprocessors = 0;
  NATTEN_JAX_RETURN_IF_FAILED(read_attributes({{&multiprocessors, cudaDevAttrMultiProcessorCount}}));
  const int threads = ring_threads(shape.loads, static_cast<int>(problem.head_dim));
  launch = {dim3(static_cast<unsigned>(std::min(p.units, multiprocessors))), threads, shape.bytes, stream};
  return {};
}

/// Runs `call`, which launches a kernel that always loads slabs as TMA boxes. Returns an error for the other method of
/// loading slabs, which is never chosen for such kernels.
template <RingLoads kLoads, class Call>
cudaError_t with_boxes(const Call& call) {
  if constexpr (kLoads == RingLoads::kBoxes) {
    return call();
  } else {
    return cudaErrorInvalidValue;
  }
}

template <class Params>
WithKeyBias<Params> with_key_bias(const Params& p, const Arrays& arrays) {
  return {p, {arrays.key_bias, arrays.key_bias_heads == 1, arrays.key_bias_gradient}};
}

template <class Params>
WithRelativeBias<Params> with_relative_bias(const Params& p, const Problem& problem, const Arrays& arrays) {
  const OffsetTable offsets = offset_table(problem.axes);
  return {p, RingBias(problem.axes, p.shape, Params::kKernel), given_table(problem, offsets.pitch[1], arrays),
          cutlass::FastDivmod(static_cast<int>(offsets.pitch[0] / offsets.pitch[1]))};
}

}  // namespace

Status find_forward_ring(const Problem& problem, const TileShapes& tiles, Coverage coverage, const Device& device,
                         RingShape& result) {
  result = {};
  if (!can_have_ring(problem, coverage)) return {};
  RingLoads loads{};
  NATTEN_JAX_RETURN_IF_FAILED(find_ring_loads(loads));
  result = find_ring(problem, tiles.query, tiles.kv, Kernel::kForward, coverage, loads, device);
  return {};
}

Status find_gradient_rings(const Problem& problem, const TileShapes& tiles, Coverage coverage, const Device& device,
                           const Region& region_of_keys, GradientRings& result) {
  result = {};
  if (!can_have_ring(problem, coverage)) return {};
  RingLoads loads{};
  NATTEN_JAX_RETURN_IF_FAILED(find_ring_loads(loads));
  result.query_gradient = find_ring(problem, tiles.kv, tiles.query, Kernel::kQueryGradient, coverage, loads, device);
  const RingShape key_value_ring = find_gradient_ring(problem, coverage, loads, device);
  const double region_nanoseconds =
      nanoseconds_against_rings(region_of_keys, problem, Kernel::kKeyValueGradient, coverage);
  if (key_value_ring.nanoseconds < region_nanoseconds) result.key_value_gradient = key_value_ring;
  return {};
}

Status run_ring_forward(const Problem& problem, const RingShape& shape, const Arrays& arrays, cudaStream_t stream) {
  RingForwardParams p{};
  LaunchShape launch{};
  NATTEN_JAX_RETURN_IF_FAILED(prepare(problem, shape, arrays, stream, p, launch));
  p.sinks = arrays.sinks;
  p.are_sinks_shared = arrays.batch_of_sinks == 1;
  p.out = arrays.out;
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
  NATTEN_JAX_RETURN_IF_FAILED(encode_arrays(problem, p));
  return with_ring_kernels(problem, shape.loads, [&](auto type, auto loads) -> cudaError_t {
    const int head_dim = static_cast<int>(problem.head_dim);
    if (problem.has_relative_bias) {
      return with_boxes<loads>(
          [&] { return launch_ring_biased_forward<type>(head_dim, with_relative_bias(p, problem, arrays), launch); });
    }
    if (problem.has_key_bias) {
      return with_boxes<loads>(
          [&] { return launch_ring_key_biased_forward<type>(head_dim, with_key_bias(p, arrays), launch); });
    }
    return launch_ring_forward<type, loads>(head_dim, p, launch);
  });
}

Status run_ring_query_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays, float* statistics,
                               cudaStream_t stream) {
  RingQueryParams p{};
  LaunchShape launch{};
  NATTEN_JAX_RETURN_IF_FAILED(prepare(problem, shape, arrays, stream, p, launch));
  p.out_cotangent = arrays.out_cotangent;
  p.out = arrays.out;
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
  p.logsumexp_cotangent = arrays.logsumexp_cotangent;
  p.statistics = reinterpret_cast<float4*>(statistics);
  p.query_gradient = arrays.query_gradient;
  NATTEN_JAX_RETURN_IF_FAILED(encode_arrays(problem, p));
  return with_ring_kernels(problem, shape.loads, [&](auto type, auto loads) -> cudaError_t {
    const int head_dim = static_cast<int>(problem.head_dim);
    if (problem.has_key_bias) {
      return with_boxes<loads>(
          [&] { return launch_ring_key_biased_query_gradient<type>(head_dim, with_key_bias(p, arrays), launch); });
    }
    return launch_ring_query_gradient<type, loads>(head_dim, p, launch);
  });
}

Status run_ring_key_value_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays,
                                   const float* statistics, cudaStream_t stream) {
  RingGradientParams p{};
  LaunchShape launch{};
  NATTEN_JAX_RETURN_IF_FAILED(prepare(problem, shape, arrays, stream, p, launch));
  p.out_cotangent = arrays.out_cotangent;
  p.statistics = reinterpret_cast<const float4*>(statistics);
  p.key_gradient = arrays.key_gradient;
  p.value_gradient = arrays.value_gradient;
  NATTEN_JAX_RETURN_IF_FAILED(encode_arrays(problem, p));
  const int head_dim = static_cast<int>(problem.head_dim);
  return with_ring_kernels(problem, shape.loads, [&](auto type, auto loads) -> cudaError_t {
    if (problem.has_relative_bias) {
      return with_boxes<loads>([&] {
        return launch_ring_biased_key_value_gradient<type>(head_dim, with_relative_bias(p, problem, arrays), launch);
      });
    }
    if (problem.has_key_bias) {
      return with_boxes<loads>(
          [&] { return launch_ring_key_biased_key_value_gradient<type>(head_dim, with_key_bias(p, arrays), launch); });
    }
    return launch_ring_key_value_gradient<type, loads>(head_dim, p, launch);
  });
}

}  // namespace natten_jax::small
