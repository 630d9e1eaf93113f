#include <algorithm>
#include <iterator>

#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/common/padding.h"
#include "cuda/sm90/forms.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/launch_support.h"
#include "cuda/tma/tensor_map.h"

namespace natten_jax::sm90 {
namespace {

/// The problem with a dilation of 1, for additional tokens. The whole layout is then one dilation group.
Problem undilated(const Problem& problem) {
  Problem result = problem;
  for (Axis& axis : result.axes) axis.window.dilation = 1;
  return result;
}

/// The problem whose query array is the array of dQ sums: float32, with every head as a separate batch entry.
Problem heads_as_batch(const Problem& problem) {
  Problem result = problem;
  result.element_type = ElementType::kFloat32;
  result.batch *= problem.heads;
  result.heads = 1;
  return result;
}

/// Encodes the tensor maps of a query array: one per class of dilation groups (kGroupClasses) and, if there are
/// additional tokens, one of the undilated layout.
Status encode_query_maps(const Problem& problem, Array array, const std::int64_t (&tile)[kRank],
                         CUtensorMap (&maps)[kQueryMaps]) {
  CUtensorMap classes[kGroupClasses];
  if (problem.additional_kv > 0) {
    NATTEN_JAX_RETURN_IF_FAILED(encode_classes(undilated(problem), Side::kQuery, array, tile, classes));
    maps[kWholeLayout] = classes[0];
  }
  NATTEN_JAX_RETURN_IF_FAILED(encode_classes(problem, Side::kQuery, array, tile, classes));
  std::copy_n(classes, kGroupClasses, maps);
  return {};
}

Status encode_maps(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* scratch,
                   BackwardParams& p) {
  std::int64_t q_box[kRank];
  std::copy_n(p.q_boxes.extent, kRank, q_box);
  for (const Status& status :
       {encode_query_maps(problem, {arrays.query, problem.head_dim}, q_box, p.query),
        encode_query_maps(problem, {arrays.out_cotangent, problem.head_dim_v}, q_box, p.out_cotangent),
        encode_query_maps(heads_as_batch(problem), {scratch, problem.head_dim}, q_box, p.query_gradient),
        encode_classes(problem, Side::kKeyValue, {arrays.key, problem.head_dim}, tiles.kv, p.key),
        encode_classes(problem, Side::kKeyValue, {arrays.value, problem.head_dim_v}, tiles.kv, p.value),
        encode_classes(problem, Side::kKeyValue, {arrays.key_gradient, problem.head_dim}, tiles.kv, p.key_gradient),
        encode_classes(problem, Side::kKeyValue, {arrays.value_gradient, problem.head_dim_v}, tiles.kv,
                       p.value_gradient)}) {
    if (status.failed()) return status;
  }
  if (problem.additional_kv == 0) return {};
  const int keys = static_cast<int>(product(tiles.kv));
  for (const Status& status :
       {encode_additional(problem, {arrays.additional_keys, problem.head_dim}, keys, p.additional_keys),
        encode_additional(problem, {arrays.additional_values, problem.head_dim_v}, keys, p.additional_values),
        encode_additional(problem, {arrays.additional_keys_gradient, problem.head_dim}, keys,
                          p.additional_keys_gradient),
        encode_additional(problem, {arrays.additional_values_gradient, problem.head_dim_v}, keys,
                          p.additional_values_gradient)}) {
    if (status.failed()) return status;
  }
  return {};
}

/// Launches a kernel that builds the tensor maps of each batch entry from the tensor maps of the launch.
Status make_entry_maps(const Problem& problem, const Arrays& arrays, const BackwardParams& p, cudaStream_t stream) {
  EntryMaps maps = maps_of_entries(problem, arrays, kBackwardArrays, p.entry_maps);
  maps.are_queries = 1u << kQueriesOfEntry | 1u << kOutCotangentsOfEntry | 1u << kQueryGradientsOfEntry;
  maps.base_maps[kQueriesOfEntry] = p.query[0];
  maps.base_maps[kOutCotangentsOfEntry] = p.out_cotangent[0];
  maps.base_maps[kQueryGradientsOfEntry] = p.query_gradient[0];
  maps.base_maps[kKeysOfEntry] = p.key[0];
  maps.base_maps[kValuesOfEntry] = p.value[0];
  maps.base_maps[kKeyGradientsOfEntry] = p.key_gradient[0];
  maps.base_maps[kValueGradientsOfEntry] = p.value_gradient[0];
  return status_of(launch_entry_maps(maps, stream));
}

/// Number of elements of the dQ sums.
std::int64_t sums(const Problem& problem) {
  return problem.batch * problem.heads * problem.queries() * problem.head_dim;
}

/// Number of counters of a launch. The first one counts the key/value tiles that CTAs have taken. If
/// `is_deterministic`, there is also a counter for each query tile of each query head (KeyTileSchedule::additions).
std::int64_t counters(const Problem& problem, const TileShapes& tiles, bool is_deterministic) {
  if (!is_deterministic) return 1;
  const Geometry geometry = geometry_of(problem, tiles);
  const std::int64_t heads = saturating_product(problem.batch, problem.heads);
  return 1 + saturating_product(heads, saturating_product(geometry.groups, geometry.q_tiles));
}

Status choose_backward_form(const Problem& problem, const TileShapes& tiles, int& form) {
  return choose_form(kBackwardForms, std::size(kBackwardForms), problem, tiles, "backward ", form);
}

}  // namespace

Status check_backward(const Problem& problem, const TileShapes& tiles) {
  NATTEN_JAX_RETURN_IF_FAILED(check_arrays(problem));
  int form = 0;
  return choose_backward_form(problem, tiles, form);
}

std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic) {
  return sums(problem) + counters(problem, tiles, is_deterministic);
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const float* statistics,
                    float* scratch, CUtensorMap* entry_maps, bool is_deterministic, cudaStream_t stream) {
  int number = 0;
  NATTEN_JAX_RETURN_IF_FAILED(choose_backward_form(problem, tiles, number));
  const Form& form = kBackwardForms[number];
  NATTEN_JAX_RETURN_IF_FAILED(check_seams(problem, arrays));
  if (is_deterministic && wraps(problem)) {
    return Status::invalid_argument("a dimension wraps, but the deterministic backward pass does not support this");
  }
  const Geometry geometry = geometry_of(problem, tiles);
  BackwardParams p{};
  std::copy_n(geometry.axis, kRank, p.axis);
  p.q_boxes = boxes_of_tiles(problem, tiles.query, tiles.kv);
  KeyTileSchedule& schedule = p.schedule;
  // Tiles of additional tokens have as many tokens as other tiles, even if more fit into shared memory. So no load ever
  // writes the rows past these tokens, and the keys and values in these rows stay finite (zero).
  const std::int64_t kv_tile_tokens = product(tiles.kv);
  const std::int64_t additional_tiles_per_head = (problem.additional_kv + kv_tile_tokens - 1) / kv_tile_tokens;
  int multiprocessors = 0;
  NATTEN_JAX_RETURN_IF_FAILED(read_attributes({{&multiprocessors, cudaDevAttrMultiProcessorCount}}));
  NATTEN_JAX_RETURN_IF_FAILED(schedule_key_tiles(problem, tiles, geometry, additional_tiles_per_head, is_deterministic,
                                                 multiprocessors, schedule));
  NATTEN_JAX_RETURN_IF_FAILED(encode_maps(problem, tiles, arrays, scratch, p));
  p.origins = arrays.origins;
  p.layouts = arrays.layouts;
  p.is_plain = arrays.origins == nullptr && arrays.layouts == nullptr;
  for (const DeviceAxis& axis : p.axis) p.is_plain &= axis.ends == Ends::kShift || axis.is_causal();
  p.statistics = reinterpret_cast<const float2*>(statistics);
  p.remainder = arrays.remainder;
  p.key_bias = arrays.key_bias;
  p.key_bias_heads = static_cast<int>(arrays.key_bias_heads);
  p.key_bias_gradient = arrays.key_bias_gradient;
  p.queries = static_cast<int>(problem.queries());
  p.keys = static_cast<int>(problem.keys());
  fill_heads(problem, p);
  p.heads_per_kv = static_cast<int>(problem.heads_per_kv());
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(kv_tile_tokens);
  p.clears_tiles = p.q_tile_tokens < form.queries || p.kv_tile_tokens < form.keys;

  const std::int64_t first_counter = sums(problem), number_of_counters = counters(problem, tiles, is_deterministic);
  schedule.next_tile = reinterpret_cast<std::int32_t*>(scratch + first_counter);
  if (is_deterministic) schedule.additions = schedule.next_tile + 1;
  if (arrays.layouts != nullptr) {
    p.entry_maps = entry_maps;
    NATTEN_JAX_RETURN_IF_FAILED(make_entry_maps(problem, arrays, p, stream));
  }
  const float* const row_statistics = arrays.layouts == nullptr ? nullptr : statistics;
  NATTEN_JAX_RETURN_IF_FAILED(
      status_of(launch_clear(scratch, first_counter + number_of_counters, stream, row_statistics,
                             first_counter / problem.head_dim, problem.head_dim)));
  if (arrays.key_bias != nullptr && arrays.layouts != nullptr) {
    // No tile contains padding keys, so the kernel does not write the gradients of their biases.
    const std::int64_t numbers = problem.batch * problem.keys() * problem.heads;
    NATTEN_JAX_RETURN_IF_FAILED(
        status_of(cudaMemsetAsync(arrays.key_bias_gradient, 0, numbers * sizeof(float), stream)));
  }
  const auto launch = [&]() -> Status {
    return with_half_type(problem.element_type, no_such_elements(problem.element_type), [&](auto type) {
      return p.key_bias == nullptr ? launch_backward<type>(p, number, stream)
                                   : launch_key_biased_backward<type>(p, number, stream);
    });
  };
  if (is_deterministic && schedule.additional_tiles > 0) {
    // The query tiles for additional tokens are tiles of the undilated layout. They differ from the query tiles of
    // dilation groups, so `additions` cannot count both kinds of query tiles. Tiles of additional tokens therefore have
    // a separate launch, before the launch for the layout.
    const int all_tiles = schedule.tiles;
    schedule.tiles = schedule.additional_tiles;
    NATTEN_JAX_RETURN_IF_FAILED(launch());
    NATTEN_JAX_RETURN_IF_FAILED(status_of(launch_clear(scratch + first_counter, number_of_counters, stream)));
    schedule.first_taken = schedule.additional_tiles;
    schedule.tiles = all_tiles;
  }
  NATTEN_JAX_RETURN_IF_FAILED(launch());
  NATTEN_JAX_RETURN_IF_FAILED(status_of(launch_convert_gradient(
      problem.element_type, scratch, row_statistics, problem.scale, arrays.query_gradient, problem.batch,
      problem.queries(), problem.heads, problem.heads, problem.head_dim, true, stream)));
  return arrays.layouts == nullptr
             ? Status()
             : status_of(fill_padding_of_gradients(problem, arrays, false, stream, FillTime::kOverlapping));
}

}  // namespace natten_jax::sm90
