#include "cuda/small/launch.h"

#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/padding.h"
#include "cuda/common/problem_checks.h"
#include "cuda/small/bias_launch.h"
#include "cuda/small/kernels.h"
#include "cuda/small/read_device.h"
#include "cuda/small/region_launch.h"
#include "cuda/small/region_maps.h"
#include "cuda/small/ring_launch.h"
#include "cuda/small/sinks_gradient.h"

namespace natten_jax::small {
namespace {

/// Returns the feature that a problem's kernels are compiled for.
Feature feature_of(const Problem& problem) {
  if (problem.has_relative_bias) return Feature::kRelativeBias;
  if (problem.has_key_bias) return Feature::kKeyBias;
  return wraps(problem) ? Feature::kWraps : Feature::kNone;
}

/// Calls `call` with a problem's element type and feature as compile-time constants.
template <class Call>
Status with_kernels(const Problem& problem, const Call& call) {
  return status_of(with_half_type(problem.element_type, cudaErrorInvalidValue, [&](auto type) {
    return with_constant<Feature::kNone, Feature::kRelativeBias, Feature::kKeyBias, Feature::kWraps>(
        feature_of(problem), cudaErrorInvalidValue, [&](auto feature) { return call(type, feature); });
  }));
}

/// Fills in the parameters for the gradients of additional tokens. Sets `ctas` to the number of CTAs: 0 without
/// additional tokens.
Status prepare_additional(const Problem& problem, const Arrays& arrays, const Scratch& scratch, AdditionalParams& p,
                          int& ctas) {
  ctas = 0;
  if (problem.additional_kv == 0) return {};
  p.query = arrays.query;
  p.keys = arrays.additional_keys;
  p.values = arrays.additional_values;
  p.out_cotangent = arrays.out_cotangent;
  p.statistics = reinterpret_cast<const float4*>(scratch.statistics);
  p.sums = scratch.additional_sums;
  p.keys_gradient = arrays.additional_keys_gradient;
  p.values_gradient = arrays.additional_values_gradient;
  fill_sizes(problem, p);
  p.batch = static_cast<int>(problem.batch);
  const std::int64_t columns = problem.queries() * problem.heads_per_kv(),
                     parts = additional_parts(columns, problem.additional_kv);
  p.parts = static_cast<int>(parts);
  p.columns_of_part = static_cast<int>(divide_up(divide_up(columns, parts), 2 * kColumns) * 2 * kColumns);
  const std::int64_t splits = divide_up(parts, kAdditionalWarps), tiles = divide_up(problem.additional_kv, kRows);
  const std::int64_t all = splits * tiles * problem.batch * problem.heads_kv;
  if (all > kMostTiles) return Status::invalid_argument("there are more than 2^30 tiles of additional tokens");
  p.by_splits = cutlass::FastDivmod(static_cast<int>(splits));
  p.by_tiles = cutlass::FastDivmod(static_cast<int>(tiles));
  p.by_heads_kv = cutlass::FastDivmod(p.heads_kv);
  ctas = static_cast<int>(all);
  return {};
}

/// If there are sinks, fills in the parameters of their gradient for a kernel that owns queries.
Status prepare_sinks(const Problem& problem, const std::int64_t (&tile)[kRank], const Arrays& arrays,
                     const Scratch& scratch, BackwardParams& p) {
  if (arrays.sinks == nullptr) return {};
  const std::int64_t tiles = p.region.count * p.region.warps;
  if (tiles > most_tiles_of_regions(problem.axes, tile)) {
    return Status::internal("the kernels' regions have more tiles than the gradient of sinks has memory for");
  }
  SinksParams& sinks = p.sinks;
  sinks.sinks = arrays.sinks;
  sinks.parts = scratch.sinks;
  sinks.are_shared = arrays.batch_of_sinks == 1;
  sinks.tiles = static_cast<int>(tiles);
  sinks.count = static_cast<int>(arrays.batch_of_sinks * problem.heads);
  const std::int64_t parts = problem.batch / arrays.batch_of_sinks * tiles;
  sinks.parts_of_sink = static_cast<int>(parts);
  sinks.next_sink = filled_to_chunks(parts);
  return {};
}

/// Launches all kernels of a backward pass, except kernels that complete the gradient of sinks, which the caller may
/// have to launch.
///
/// Args:
///   sinks: set to the partial gradients of sinks that the caller has to add up; stays empty without sinks, or if the
///     launched kernels add them up.
///   uses_statistics: set to true if the caller has to compute the whole gradient of sinks from the statistics of
///     queries.
Status run_gradients(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     const Device& device, cudaStream_t stream, SinksParams& sinks, bool& uses_statistics) {
  BackwardParams p{};
  fill_arrays(arrays, p);
  p.out_cotangent = arrays.out_cotangent;
  p.logsumexp_cotangent = arrays.logsumexp_cotangent;
  p.statistics = reinterpret_cast<float4*>(scratch.statistics);
  p.query_gradient = arrays.query_gradient;
  p.key_gradient = arrays.key_gradient;
  p.value_gradient = arrays.value_gradient;
  const int head_dim = compiled_head_dim(problem);
  BackwardParams key_params = p;
  WholeBiasParams whole{};
  static_cast<BackwardParams&>(whole) = p;
  LaunchShape shape{}, shape_of_keys{}, shape_of_whole{};
  // Kernels whose rows are queries also use the tile shape of keys, because windows of queries and of keys have similar
  // shapes.
  NATTEN_JAX_RETURN_IF_FAILED(
      prepare_regions(problem, tiles.kv, tiles.query, Kernel::kQueryGradient, arrays, device, stream, p, shape));
  NATTEN_JAX_RETURN_IF_FAILED(prepare_regions(without_additional(problem), tiles.kv, tiles.query,
                                              Kernel::kKeyValueGradient, arrays, device, stream, key_params,
                                              shape_of_keys));
  GradientRings rings{};
  NATTEN_JAX_RETURN_IF_FAILED(
      find_gradient_rings(problem, tiles, coverage_of(arrays), device, key_params.region, rings));
  TableParams table{};
  LaunchShape shape_of_table{};
  LastSumsParams last{};
  const int tables = static_cast<int>(arrays.relative_bias_tables * problem.heads);
  bool is_whole = !prepare_regions(problem, tiles.kv, tiles.query, Kernel::kWholeGradient, arrays, device, stream,
                                   whole, shape_of_whole)
                       .failed() &&
                  whole.region.nanoseconds <= p.region.nanoseconds + key_params.region.nanoseconds;
  if (is_whole && problem.has_relative_bias) {
    is_whole = prepare_whole_bias(problem, tiles, arrays, scratch, whole, shape_of_whole, last);
  }
  if (is_whole) {
    NATTEN_JAX_RETURN_IF_FAILED(encode_whole(problem, whole));
    NATTEN_JAX_RETURN_IF_FAILED(prepare_sinks(problem, tiles.kv, arrays, scratch, whole));
    sinks = whole.sinks;
    return with_kernels(problem, [&](auto type, auto feature) {
      const cudaError_t error = launch_whole_gradient<type, feature>(head_dim, whole, shape_of_whole);
      if (error != cudaSuccess || !problem.has_relative_bias) return error;
      return launch_last_sums(last, tables, stream);
    });
  }
  NATTEN_JAX_RETURN_IF_FAILED(prepare_table(problem, tiles, arrays, scratch, stream, p, table, shape_of_table, last));
  NATTEN_JAX_RETURN_IF_FAILED(make_products(problem, tiles.kv, tiles.query, arrays, scratch.table_products, stream, p));
  key_params.relative_bias = p.relative_bias;
  key_params.is_table_shared = p.is_table_shared;
  NATTEN_JAX_RETURN_IF_FAILED(encode_keys(problem, p.key, p.value, p));
  NATTEN_JAX_RETURN_IF_FAILED(encode_queries(problem, p, key_params));
  CUtensorMap* const maps_of_queries = scratch.entry_maps + (arrays.layouts ? problem.batch * kEntryMaps : 0);
  NATTEN_JAX_RETURN_IF_FAILED(make_entry_maps(problem, true, maps_of_queries, stream, key_params));
  NATTEN_JAX_RETURN_IF_FAILED(
      make_entry_maps(problem, false, scratch.entry_maps, stream, p, key_params.entry_maps != nullptr));
  shape.overlaps = p.entry_maps != nullptr;
  AdditionalParams additional{};
  int additional_ctas = 0;
  NATTEN_JAX_RETURN_IF_FAILED(prepare_additional(problem, arrays, scratch, additional, additional_ctas));
  // Launch the kernel that fills padding before the gradient kernels, which may start while it writes. If it were
  // launched between the gradient kernels, it would delay the second one.
  if (arrays.layouts != nullptr) {
    NATTEN_JAX_RETURN_IF_FAILED(status_of(fill_padding_of_gradients(
        problem, arrays, true, stream, p.entry_maps != nullptr ? FillTime::kBetween : FillTime::kAfter)));
    uses_statistics = true;
  } else {
    NATTEN_JAX_RETURN_IF_FAILED(prepare_sinks(problem, tiles.kv, arrays, scratch, p));
    // Kernels with a ring (ring_shape.h) neither write partial gradients of sinks nor add them up.
    if (has_ring(rings.query_gradient)) {
      uses_statistics = true;
    } else if (has_ring(rings.key_value_gradient)) {
      sinks = p.sinks;
    } else {
      key_params.sinks = p.sinks;
      key_params.sinks.gradient = arrays.sinks_gradient;
    }
  }
  if (has_ring(rings.query_gradient)) {
    NATTEN_JAX_RETURN_IF_FAILED(
        run_ring_query_gradient(problem, rings.query_gradient, arrays, scratch.statistics, stream));
    shape_of_keys.overlaps = false;  // kernels with a ring do not allow the next kernel to start early
  } else {
    NATTEN_JAX_RETURN_IF_FAILED(with_kernels(
        problem, [&](auto type, auto feature) { return launch_query_gradient<type, feature>(head_dim, p, shape); }));
  }
  const auto add_up_table = [&]() -> Status {
    if (!problem.has_relative_bias) return {};
    NATTEN_JAX_RETURN_IF_FAILED(status_of(launch_table_gradient(table, shape_of_table)));
    return status_of(launch_last_sums(last, tables, stream));
  };
  if (has_ring(rings.key_value_gradient)) {
    // Add up the records for the gradient of the relative bias before the launch of the kernel with a ring, while some
    // of them are in L2. Another launch before the kernel with a ring is possible, because that kernel does not start
    // early (PDL).
    NATTEN_JAX_RETURN_IF_FAILED(add_up_table());
    NATTEN_JAX_RETURN_IF_FAILED(
        run_ring_key_value_gradient(problem, rings.key_value_gradient, arrays, scratch.statistics, stream));
  } else {
    NATTEN_JAX_RETURN_IF_FAILED(with_kernels(problem, [&](auto type, auto feature) {
      return launch_key_value_gradient<type, feature>(head_dim, key_params, shape_of_keys);
    }));
    NATTEN_JAX_RETURN_IF_FAILED(add_up_table());
  }
  if (additional_ctas == 0) return {};
  return with_kernels(problem, [&](auto type, auto) {
    return launch_additional_gradient<type>(head_dim, additional, additional_ctas, stream);
  });
}

}  // namespace

Status check_arrays(const Problem& problem) {
  NATTEN_JAX_RETURN_IF_FAILED(check_half_elements(problem));
  NATTEN_JAX_RETURN_IF_FAILED(check_head_dims(problem, kHeadDimStep, kLargestHeadDim));
  NATTEN_JAX_RETURN_IF_FAILED(check_token_bytes(problem, kLargestHeadDim, sizeof(std::uint16_t)));
  return check_rows(problem);
}

std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays) {
  return arrays.layouts == nullptr ? 0 : problem.batch * kEntryMaps;
}

std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays) {
  return 2 * entry_maps_of_forward(problem, arrays);
}

Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* table_products,
                   CUtensorMap* entry_maps, cudaStream_t stream) {
  Device device{};
  NATTEN_JAX_RETURN_IF_FAILED(read_device(arrays, device));
  RingShape ring{};
  NATTEN_JAX_RETURN_IF_FAILED(find_forward_ring(problem, tiles, coverage_of(arrays), device, ring));
  if (has_ring(ring)) return run_ring_forward(problem, ring, arrays, stream);
  ForwardParams p{};
  LaunchShape shape{};
  NATTEN_JAX_RETURN_IF_FAILED(
      prepare_regions(problem, tiles.query, tiles.kv, Kernel::kForward, arrays, device, stream, p, shape));
  fill_arrays(arrays, p);
  p.sinks = arrays.sinks;
  p.are_sinks_shared = arrays.batch_of_sinks == 1;
  NATTEN_JAX_RETURN_IF_FAILED(encode_keys(problem, p.key, p.value, p));
  NATTEN_JAX_RETURN_IF_FAILED(make_entry_maps(problem, false, entry_maps, stream, p));
  NATTEN_JAX_RETURN_IF_FAILED(make_products(problem, tiles.query, tiles.kv, arrays, table_products, stream, p));
  shape.overlaps = p.entry_maps != nullptr;
  NATTEN_JAX_RETURN_IF_FAILED(with_kernels(problem, [&](auto type, auto feature) {
    return launch_forward<type, feature>(compiled_head_dim(problem), p, shape);
  }));
  if (arrays.layouts == nullptr) return {};
  return status_of(
      fill_padding_of_output(problem, arrays, stream, device.has_boxes ? FillTime::kOverlapping : FillTime::kAfter));
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                    cudaStream_t stream) {
  Device device{};
  NATTEN_JAX_RETURN_IF_FAILED(read_device(arrays, device));
  SinksParams sinks{};
  bool uses_statistics = false;
  NATTEN_JAX_RETURN_IF_FAILED(run_gradients(problem, tiles, arrays, scratch, device, stream, sinks, uses_statistics));
  if (arrays.sinks == nullptr) return {};
  if (uses_statistics) return run_sinks_gradient(problem, arrays, scratch.statistics, scratch.sinks, stream);
  if (sinks.parts == nullptr) return {};
  sinks.gradient = arrays.sinks_gradient;
  return status_of(launch_sums_of_sinks(sinks, device.has_boxes, stream));
}

}  // namespace natten_jax::small
