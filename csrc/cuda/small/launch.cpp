#include "cuda/small/launch.h"

#include <algorithm>
#include <utility>

#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/common/padding.h"
#include "cuda/common/problem_checks.h"
#include "cuda/small/bias_launch.h"
#include "cuda/small/kernels.h"
#include "cuda/small/region_cache.h"
#include "cuda/small/region_time.h"
#include "cuda/small/ring_launch.h"
#include "cuda/small/sinks_gradient.h"
#include "cuda/tma/entry_maps.h"
#include "cuda/tma/tensor_map.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {
namespace {

Status read_device(Device& result) {
  NATTEN_JAX_RETURN_IF_FAILED(
      read_attributes({{&result.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                       {&result.shared_memory_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                       {&result.shared_memory_reserved, cudaDevAttrReservedSharedMemoryPerBlock},
                       {&result.multiprocessors, cudaDevAttrMultiProcessorCount}}));
  return status_of(find_box_kernels<ElementType::kBFloat16, Feature::kNone>(result.has_boxes));
}

/// Whether the device has compute capability 9.0, and this library kernels for it.
Status find_hopper(bool& result) {
  result = false;
#if defined(NATTEN_JAX_SM90)
  int major = 0, minor = 0;
  NATTEN_JAX_RETURN_IF_FAILED(
      read_attributes({{&major, cudaDevAttrComputeCapabilityMajor}, {&minor, cudaDevAttrComputeCapabilityMinor}}));
  result = major == 9 && minor == 0;
#endif
  return {};
}

/// The same for a call. Maps of batch entries are made by code for Hopper; elsewhere, threads leave the padding out.
Status read_device(const Arrays& arrays, Device& result) {
  NATTEN_JAX_RETURN_IF_FAILED(read_device(result));
  if (arrays.layouts == nullptr) return {};
  bool is_hopper = false;
  NATTEN_JAX_RETURN_IF_FAILED(find_hopper(is_hopper));
  result.has_boxes = result.has_boxes && is_hopper;
  return {};
}

/// What the kernels of a problem are compiled for.
Feature feature_of(const Problem& problem) {
  if (problem.has_relative_bias) return Feature::kRelativeBias;
  if (problem.has_key_bias) return Feature::kKeyBias;
  return wraps(problem) ? Feature::kWraps : Feature::kNone;
}

/// Calls `call` with a problem's element type and feature as constants.
template <class Call>
Status with_kernels(const Problem& problem, const Call& call) {
  return status_of(with_half_type(problem.element_type, cudaErrorInvalidValue, [&](auto type) {
    return with_constant<Feature::kNone, Feature::kRelativeBias, Feature::kKeyBias, Feature::kWraps>(
        feature_of(problem), cudaErrorInvalidValue, [&](auto feature) { return call(type, feature); });
  }));
}

/// Where the tokens of a call's arrays may be.
Places places_of(const Arrays& arrays) {
  if (arrays.layouts != nullptr) return Places::kOfEntries;
  return arrays.origins != nullptr ? Places::kParts : Places::kWhole;
}

/// How slabs come into the rings of a call's kernels on the device at hand.
Status find_ring_loads(RingLoads& result) {
  bool is_hopper = false;
  NATTEN_JAX_RETURN_IF_FAILED(find_hopper(is_hopper));
  result = is_hopper ? RingLoads::kBoxes : RingLoads::kChunks;
  return {};
}

/// Tokens between neighbors of a dimension of an array.
std::int64_t pitch_of(const Problem& problem, int dimension, bool is_query) {
  std::int64_t pitch = 1;
  for (int d = dimension + 1; d < kRank; ++d) {
    const Axis& axis = problem.axes[d];
    pitch *= is_query ? axis.query.local_extent : axis.kv.local_extent;
  }
  return pitch;
}

/// How many tiles further neighbors of a dimension are, where tiles of all dilation groups are counted.
std::int64_t tile_pitch_of(const Problem& problem, const std::int64_t (&rows)[kRank], int dimension) {
  std::int64_t pitch = 1;
  for (int d = dimension + 1; d < kRank; ++d) pitch *= query_tiles(problem.axes[d], rows[d]);
  return pitch;
}

/// Fills in what all kernels have of a problem's sizes.
template <class Params>
void fill_sizes(const Problem& problem, Params& p) {
  p.queries = static_cast<int>(problem.queries());
  fill_heads(problem, p);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
}

/// Fills in what CTAs have of batch entries with layouts of their own. Returns how many CTAs a region has.
std::int64_t share_entries(const Problem& problem, Kernel kernel, const Device& device, CommonParams& p) {
  p.batch = static_cast<int>(problem.batch);
  p.entries_of_cta = static_cast<int>(std::min<std::int64_t>(problem.batch, kEntriesOfCta));
  // Heads that a plan has all of, or none.
  const std::int64_t together = kernel == Kernel::kKeyValueGradient ? problem.heads_per_kv() : 1;
  const std::int64_t items = std::int64_t{p.entries_of_cta} * p.heads,
                     looks = divide_up(problem.batch, p.entries_of_cta);
  const std::int64_t most = std::min(
      items, items_of_plan(kernel, compiled_head_dim(problem), p.region, device, p.region.count * looks * items));
  p.region.items_of_cta = static_cast<int>(divide_up(most, together) * together);
  // The last pieces of groups are smaller: there are more of them than if all entries were alike.
  constexpr std::int64_t kEntriesOfGroup = 8;
  std::int64_t pieces = divide_up(items, p.region.items_of_cta);
  if (pieces > 1) pieces += divide_up(p.entries_of_cta, kEntriesOfGroup);
  p.by_pieces = cutlass::FastDivmod(static_cast<int>(pieces));
  p.by_items = cutlass::FastDivmod(p.region.items_of_cta);
  return looks * pieces;
}

/// Fills in what the kernels of regions have, and how they are launched.
Status prepare(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
               Kernel kernel, const Arrays& arrays, const Device& device, cudaStream_t stream, CommonParams& p,
               LaunchShape& shape) {
  const bool has_layouts = arrays.layouts != nullptr;
  const Places places = places_of(arrays);
  if (has_layouts && problem.has_relative_bias) {
    return Status::invalid_argument("relative_bias and layouts were both given, but the kernels take either");
  }
  if (has_layouts && problem.has_key_bias) {
    return Status::invalid_argument("key_bias and layouts were both given, but the kernels take either");
  }
  if (wraps(problem) && (has_layouts || problem.has_relative_bias || problem.has_key_bias)) {
    return Status::invalid_argument(
        "the form for small windows takes dimensions that wrap, or else layouts, relative_bias or key_bias");
  }
  NATTEN_JAX_RETURN_IF_FAILED(find_region(problem, rows, columns, kernel, places, device, p.region));
  const std::int64_t items = problem.batch * problem.heads;
  p.exponent_scale = problem.scale.of_all * kLog2E;
  p.is_plain = arrays.origins == nullptr;
  for (int i = 0; i < kRank; ++i) {
    const int d = p.region.dimension[i];
    p.axis[i] = device_axis(problem.axes[d], rows[d], columns[d]);
    p.query_pitch[i] = static_cast<int>(pitch_of(problem, d, true));
    p.kv_pitch[i] = static_cast<int>(pitch_of(problem, d, false));
    p.tile_pitch[i] = static_cast<int>(tile_pitch_of(problem, rows, d));
    for (const Tokens& tokens : {problem.axes[d].query, problem.axes[d].kv}) {
      p.is_plain &= tokens.extent == problem.axes[d].kv.extent && tokens.local_extent == tokens.extent;
    }
  }
  if (p.region.count > kMostTiles) return Status::invalid_argument("the problem has more than 2^30 regions");
  p.origins = arrays.origins;
  p.layouts = arrays.layouts;
  p.key_bias = {arrays.key_bias, arrays.key_bias_heads == 1, cutlass::FastDivmod(static_cast<int>(problem.heads_kv)),
                arrays.key_bias_gradient};
  fill_sizes(problem, p);
  p.keys = static_cast<int>(problem.keys());
  p.by_heads = cutlass::FastDivmod(p.heads);
  for (int i = 0; i < kRank; ++i) {
    // Layouts of batch entries have the token, too, or no queries: but in the last dimension, that of sequences, whose
    // queries and keys have lengths of their own.
    p.is_single[i] = p.is_plain && p.axis[i].query_extent == 1 && (!has_layouts || p.region.dimension[i] < kRank - 1);
    p.by_regions[i] = cutlass::FastDivmod(p.region.regions[i]);
    p.by_tiles[i] = cutlass::FastDivmod(p.region.tiles[i]);
    p.seam_regions[i] =
        seam_regions(problem.axes[p.region.dimension[i]], std::int64_t{p.region.tile[i]} * p.region.tiles[i],
                     p.region.regions[i], kernel == Kernel::kKeyValueGradient);
  }
  p.items = static_cast<int>(items);
  std::int64_t ctas = divide_up(items, p.region.items_of_cta);
  if (has_layouts) {
    ctas = share_entries(problem, kernel, device, p);
  }
  constexpr std::int64_t kMostCtas = 65535;  // of a region
  if (ctas > kMostCtas) {
    return Status::invalid_argument("the form for small windows takes at most 65535 batch entries with own layouts");
  }
  shape = {dim3(static_cast<unsigned>(p.region.count), static_cast<unsigned>(ctas)), 32 * p.region.warps,
           p.region.shared.bytes, stream};
  // It plans while the kernel of query gradients runs. Code for older architectures would not wait.
  shape.overlaps = kernel == Kernel::kKeyValueGradient && device.has_boxes;
  return {};
}

/// Encodes the map of an array of columns, where the copy engine loads them.
Status encode_columns(const Problem& problem, const void* array, ElementType element_type, std::int64_t head_dim,
                      bool are_queries, CommonParams& p, CUtensorMap& map) {
  if (!p.region.has_boxes) return {};
  TokenBoxes tokens{};
  tokens.data = array;
  tokens.element_type = element_type;
  tokens.batch = problem.batch;
  tokens.heads = are_queries ? problem.heads : problem.heads_kv;
  tokens.head_dim = head_dim;
  for (int i = 0; i < kRank; ++i) {
    const Axis& axis = problem.axes[p.region.dimension[i]];
    tokens.extent[i] = (are_queries ? axis.query : axis.kv).local_extent;
    tokens.pitch[i] = (are_queries ? p.query_pitch : p.kv_pitch)[i];
    tokens.dilation[i] = axis.window.dilation;
  }
  return encode_box_map(tokens, p.region.extent, map);
}

/// The same for the keys and values that queries see.
Status encode_keys(const Problem& problem, const void* key, const void* value, CommonParams& p) {
  const auto encode = [&](const void* array, CUtensorMap& map) {
    return encode_columns(problem, array, problem.element_type, problem.head_dim, false, p, map);
  };
  NATTEN_JAX_RETURN_IF_FAILED(encode(key, p.columns[0]));
  return encode(value, p.columns[1]);
}

/// The same for the queries that see keys, and what is known of them.
Status encode_queries(const Problem& problem, const BackwardParams& arrays, CommonParams& p) {
  const auto encode = [&](const void* array, CUtensorMap& map, ElementType type, std::int64_t head_dim) {
    return encode_columns(problem, array, type, head_dim, true, p, map);
  };
  NATTEN_JAX_RETURN_IF_FAILED(encode(arrays.query, p.columns[0], problem.element_type, problem.head_dim));
  NATTEN_JAX_RETURN_IF_FAILED(encode(arrays.out_cotangent, p.columns[1], problem.element_type, problem.head_dim));
  constexpr std::int64_t kFloats = kStatisticsBytes / sizeof(float);
  return encode(arrays.statistics, p.columns[2], ElementType::kFloat32, kFloats);
}

/// Makes the maps of batch entries with layouts of their own from those of all: the columns are keys, or else queries.
/// `overlaps`: others are made right before.
template <bool kColumnsAreQueries>
Status make_entry_maps(const Problem& problem, CUtensorMap* result, cudaStream_t stream, CommonParams& p,
                       bool overlaps = false) {
  if (p.layouts == nullptr || !p.region.has_boxes) return {};
#if defined(NATTEN_JAX_SM90)
  EntryMaps maps{};
  maps.layouts = p.layouts;
  maps.batch = static_cast<int>(problem.batch);
  maps.arrays = kEntryMaps;
  maps.classes = 1;
  std::copy_n(p.axis, kRank, maps.axis);
  std::copy_n(p.region.dimension, kRank, maps.dimension);
  maps.are_queries = kColumnsAreQueries ? ~0u : 0u;
  std::copy_n(p.columns, kEntryMaps, maps.of_all);
  p.entry_maps = maps.result = result;
  return status_of(launch_entry_maps(maps, stream, overlaps));
#else
  static_cast<void>(overlaps);
  static_cast<void>(result);
  static_cast<void>(problem);
  static_cast<void>(stream);
  return Status::internal("regions have boxes, but this build has no code for maps of batch entries");
#endif
}

/// The same for the kernel of whole layouts, in the order of WholeBox.
Status encode_whole(const Problem& problem, BackwardParams& p) {
  int number = 0;
  for (const void* array : {p.key, p.value, p.query, p.out_cotangent, p.out}) {
    // Heads are as wide and as many on both sides.
    NATTEN_JAX_RETURN_IF_FAILED(
        encode_columns(problem, array, problem.element_type, problem.head_dim, true, p, p.columns[number++]));
  }
  return {};
}

/// Fills in what the kernels of additional tokens' gradients have; there are no CTAs where there are no such tokens.
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

/// Fills in what a kernel that owns queries has of the gradient of sinks, where there are any.
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
  sinks.are_of_all = arrays.batch_of_sinks == 1;
  sinks.tiles = static_cast<int>(tiles);
  sinks.count = static_cast<int>(arrays.batch_of_sinks * problem.heads);
  const std::int64_t parts = problem.batch / arrays.batch_of_sinks * tiles;
  sinks.parts_of_sink = static_cast<int>(parts);
  sinks.next_sink = filled_to_chunks(parts);
  return {};
}

/// Launches both kernels of a backward pass, one of them or both with a ring.
Status run_rings(const Problem& problem, const Arrays& arrays, const Scratch& scratch, const RingShape& ring,
                 const RingShape& ring_of_keys, const BackwardParams& p, const LaunchShape& shape,
                 const BackwardParams& of_keys, LaunchShape shape_of_keys, cudaStream_t stream) {
  const int head_dim = compiled_head_dim(problem);
  if (ring.warps > 0) {
    NATTEN_JAX_RETURN_IF_FAILED(run_ring_query_gradient(problem, ring, arrays, scratch.statistics, stream));
    shape_of_keys.overlaps = false;  // it does not say when
  } else {
    NATTEN_JAX_RETURN_IF_FAILED(status_of(with_half_type(problem.element_type, cudaErrorInvalidValue, [&](auto type) {
      return launch_query_gradient<type, Feature::kNone>(head_dim, p, shape);
    })));
  }
  if (ring_of_keys.warps > 0) {
    return run_ring_key_value_gradient(problem, ring_of_keys, arrays, scratch.statistics, stream);
  }
  return status_of(with_half_type(problem.element_type, cudaErrorInvalidValue, [&](auto type) {
    return launch_key_value_gradient<type, Feature::kNone>(head_dim, of_keys, shape_of_keys);
  }));
}

/// Launches all kernels of a backward pass but, at most, the last ones of the gradient of sinks.
///
/// Args:
///   sinks: what is left of these: parts to be added up, unless there are none or the pass has done so.
///   is_of_statistics: that all of it is left, and follows from what is known of queries.
Status run_gradients(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     const Device& device, cudaStream_t stream, SinksParams& sinks, bool& is_of_statistics) {
  BackwardParams p{};
  fill_arrays(arrays, p);
  p.out_cotangent = arrays.out_cotangent;
  p.logsumexp_cotangent = arrays.logsumexp_cotangent;
  p.statistics = reinterpret_cast<float4*>(scratch.statistics);
  p.query_gradient = arrays.query_gradient;
  p.key_gradient = arrays.key_gradient;
  p.value_gradient = arrays.value_gradient;
  const int head_dim = compiled_head_dim(problem);
  BackwardParams of_keys = p;
  WholeBiasParams whole{};
  static_cast<BackwardParams&>(whole) = p;
  LaunchShape shape{}, shape_of_keys{}, shape_of_whole{};
  // Windows of queries and those of keys are alike: queries take the shapes of tiles that keys have.
  NATTEN_JAX_RETURN_IF_FAILED(
      prepare(problem, tiles.kv, tiles.query, Kernel::kQueryGradient, arrays, device, stream, p, shape));
  NATTEN_JAX_RETURN_IF_FAILED(prepare(without_additional(problem), tiles.kv, tiles.query, Kernel::kKeyValueGradient,
                                      arrays, device, stream, of_keys, shape_of_keys));
  RingShape ring{}, ring_of_keys{};
  if (const Places places = places_of(arrays); can_have_ring(problem, places)) {
    RingLoads loads{};
    NATTEN_JAX_RETURN_IF_FAILED(find_ring_loads(loads));
    ring = find_ring(problem, tiles.kv, tiles.query, Kernel::kQueryGradient, places, loads, device);
    ring_of_keys = find_gradient_ring(problem, places, loads, device);
    const double of_region = nanoseconds_beside_rings(of_keys.region, problem, Kernel::kKeyValueGradient, places);
    if (ring_of_keys.nanoseconds >= of_region) ring_of_keys = {};
  }
  TableParams table{};
  LaunchShape shape_of_table{};
  LastSumsParams last{};
  const int tables = static_cast<int>(arrays.relative_bias_tables * problem.heads);
  bool is_whole =
      !prepare(problem, tiles.kv, tiles.query, Kernel::kWholeGradient, arrays, device, stream, whole, shape_of_whole)
           .failed() &&
      whole.region.nanoseconds <= p.region.nanoseconds + of_keys.region.nanoseconds;
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
  of_keys.relative_bias = p.relative_bias;
  of_keys.is_table_of_all = p.is_table_of_all;
  NATTEN_JAX_RETURN_IF_FAILED(encode_keys(problem, p.key, p.value, p));
  NATTEN_JAX_RETURN_IF_FAILED(encode_queries(problem, p, of_keys));
  CUtensorMap* const maps_of_queries = scratch.entry_maps + (arrays.layouts ? problem.batch * kEntryMaps : 0);
  NATTEN_JAX_RETURN_IF_FAILED(make_entry_maps<true>(problem, maps_of_queries, stream, of_keys));
  NATTEN_JAX_RETURN_IF_FAILED(
      make_entry_maps<false>(problem, scratch.entry_maps, stream, p, of_keys.entry_maps != nullptr));
  shape.overlaps = p.entry_maps != nullptr;
  AdditionalParams additional{};
  int additional_ctas = 0;
  NATTEN_JAX_RETURN_IF_FAILED(prepare_additional(problem, arrays, scratch, additional, additional_ctas));
  if (ring.warps > 0 || ring_of_keys.warps > 0) {
    is_of_statistics = ring.warps > 0;
    NATTEN_JAX_RETURN_IF_FAILED(prepare_sinks(problem, tiles.kv, arrays, scratch, p));
    sinks = p.sinks;
    return run_rings(problem, arrays, scratch, ring, ring_of_keys, p, shape, of_keys, shape_of_keys, stream);
  }
  // First: the kernels of gradients begin while it writes. Between these two, it would hold up the second one.
  if (arrays.layouts != nullptr) {
    NATTEN_JAX_RETURN_IF_FAILED(status_of(fill_padding_of_gradients(
        problem, arrays, true, stream, p.entry_maps != nullptr ? FillTime::kBetween : FillTime::kAfter)));
    is_of_statistics = true;
  } else {
    NATTEN_JAX_RETURN_IF_FAILED(prepare_sinks(problem, tiles.kv, arrays, scratch, p));
    of_keys.sinks = p.sinks;
    of_keys.sinks.gradient = arrays.sinks_gradient;
  }
  return with_kernels(problem, [&](auto type, auto feature) {
    cudaError_t error = launch_query_gradient<type, feature>(head_dim, p, shape);
    if (error == cudaSuccess) error = launch_key_value_gradient<type, feature>(head_dim, of_keys, shape_of_keys);
    if (error != cudaSuccess) return error;
    if (problem.has_relative_bias) {
      error = launch_table_gradient(table, shape_of_table);
      return error == cudaSuccess ? launch_last_sums(last, tables, stream) : error;
    }
    return additional_ctas == 0 ? error
                                : launch_additional_gradient<type>(head_dim, additional, additional_ctas, stream);
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
  if (const Places places = places_of(arrays); can_have_ring(problem, places)) {
    RingLoads loads{};
    NATTEN_JAX_RETURN_IF_FAILED(find_ring_loads(loads));
    const RingShape ring = find_ring(problem, tiles.query, tiles.kv, Kernel::kForward, places, loads, device);
    if (ring.warps > 0) return run_ring_forward(problem, ring, arrays, stream);
  }
  ForwardParams p{};
  LaunchShape shape{};
  NATTEN_JAX_RETURN_IF_FAILED(
      prepare(problem, tiles.query, tiles.kv, Kernel::kForward, arrays, device, stream, p, shape));
  fill_arrays(arrays, p);
  p.sinks = arrays.sinks;
  p.are_sinks_of_all = arrays.batch_of_sinks == 1;
  NATTEN_JAX_RETURN_IF_FAILED(encode_keys(problem, p.key, p.value, p));
  NATTEN_JAX_RETURN_IF_FAILED(make_entry_maps<false>(problem, entry_maps, stream, p));
  NATTEN_JAX_RETURN_IF_FAILED(make_products(problem, tiles.query, tiles.kv, arrays, table_products, stream, p));
  shape.overlaps = p.entry_maps != nullptr;
  NATTEN_JAX_RETURN_IF_FAILED(with_kernels(problem, [&](auto type, auto feature) {
    return launch_forward<type, feature>(compiled_head_dim(problem), p, shape);
  }));
  if (arrays.layouts == nullptr) return {};
  return status_of(
      fill_padding_of_output(problem, arrays, stream, device.has_boxes ? FillTime::kBeside : FillTime::kAfter));
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                    cudaStream_t stream) {
  Device device{};
  NATTEN_JAX_RETURN_IF_FAILED(read_device(arrays, device));
  SinksParams sinks{};
  bool is_of_statistics = false;
  NATTEN_JAX_RETURN_IF_FAILED(run_gradients(problem, tiles, arrays, scratch, device, stream, sinks, is_of_statistics));
  if (arrays.sinks == nullptr) return {};
  if (is_of_statistics) return run_sinks_gradient(problem, arrays, scratch.statistics, scratch.sinks, stream);
  if (sinks.parts == nullptr) return {};
  sinks.gradient = arrays.sinks_gradient;
  return status_of(launch_sums_of_sinks(sinks, device.has_boxes, stream));
}

}  // namespace natten_jax::small
