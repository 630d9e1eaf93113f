#include "cuda/sm90/launch.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/common/padding.h"
#include "cuda/sm90/forms.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch_support.h"

namespace natten_jax::sm90 {
namespace {

constexpr std::int64_t kSwizzledRowBytes = 128;

/// For each warpgroup, computes the bounding box of its rows in the query tile.
void bound_warpgroups(ForwardParams& p) {
  constexpr int kRowsOfWarpgroup = 64;
  for (int warpgroup = 0; warpgroup < kMostWarpgroups; ++warpgroup) {
    int first = std::min(kRowsOfWarpgroup * warpgroup, p.q_tile_tokens - 1);
    int last = std::min(kRowsOfWarpgroup * (warpgroup + 1), p.q_tile_tokens) - 1;
    int tokens = p.q_tile_tokens;
    bool is_line = true;  // true while first and last row have equal coordinates in all previous dimensions
    for (int d = 0; d < kRank; ++d) {
      tokens /= p.axis[d].q_tile;
      int* corner = p.corner + 6 * warpgroup + d;
      corner[0] = is_line ? first / tokens : 0;
      corner[3] = is_line ? last / tokens : p.axis[d].q_tile - 1;
      is_line = is_line && corner[0] == corner[3];
      first %= tokens;
      last %= tokens;
    }
  }
}

/// Returns a copy of the problem in which all arrays have the output's element type.
Problem with_output_type(const Problem& problem) {
  Problem result = problem;
  result.element_type = problem.out_type;
  return result;
}

/// Chooses the form of the forward kernel for the problem's element type, head dimensions and tiles.
Status choose_forward_form(const Problem& problem, const TileShapes& tiles, int& number, Form& form) {
  const auto choose = [&](const auto& forms) -> Status {
    NATTEN_JAX_RETURN_IF_FAILED(choose_form(forms, std::size(forms), problem, tiles, "", number));
    form = forms[number];
    return {};
  };
  return problem.element_type == ElementType::kFloat8E4M3 ? choose(kFloat8ForwardForms) : choose(kForwardForms);
}

}  // namespace

Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays,
                   const Continuation* continuation, Schedule schedule, const ForwardScratch& scratch,
                   cudaStream_t stream) {
  NATTEN_JAX_RETURN_IF_FAILED(check_arrays(problem));
  const bool is_float8 = problem.element_type == ElementType::kFloat8E4M3;
  int number = 0;
  Form form{};
  NATTEN_JAX_RETURN_IF_FAILED(choose_forward_form(problem, tiles, number, form));
  NATTEN_JAX_RETURN_IF_FAILED(check_seams(problem, arrays));
  if (arrays.key_bias != nullptr && !schedule.is_ping_pong) {
    return Status::invalid_argument("kernels that add a key_bias require ping-pong scheduling: is_ping_pong must be 1");
  }
  Geometry geometry = geometry_of(problem, tiles);
  ForwardParams p{};
  p.kv_boxes = boxes_of_tiles(problem, tiles.kv, tiles.query);
  std::int64_t kv_box[kRank];
  std::copy_n(p.kv_boxes.extent, kRank, kv_box);
  if (continuation != nullptr) {
    if (is_float8) return Status::invalid_argument("no launch of 8-bit elements continues another");
    if (form.head_dim > kLargestContinuedHeadDim) {
      return Status::invalid_argument("a launch continues another only for heads of at most " +
                                      std::to_string(kLargestContinuedHeadDim) + " elements");
    }
    keep_queries(geometry, continuation->queries);
    if (arrays.key_bias != nullptr) {
      return Status::invalid_argument("no launch with biases of keys continues another");
    }
    p.continues = true;
    p.first_query = continuation->first_query;
  }
  std::copy_n(geometry.axis, kRank, p.axis);
  const std::int64_t heads = saturating_product(problem.batch, problem.heads);
  const std::int64_t all_tiles = saturating_product(heads, saturating_product(geometry.groups, geometry.q_tiles));
  if (all_tiles > kMostTiles) return Status::invalid_argument("the problem has more than 2^30 query tiles");
  for (const Status& status :
       {encode_classes(problem, Side::kQuery, {arrays.query, problem.head_dim}, tiles.query, p.query),
        encode_classes(with_output_type(problem), Side::kQuery, {arrays.out, problem.head_dim_v}, tiles.query, p.out),
        encode_classes(problem, Side::kKeyValue, {arrays.key, problem.head_dim}, kv_box, p.key),
        encode_classes(problem, Side::kKeyValue, {arrays.value, problem.head_dim_v}, kv_box, p.value)}) {
    if (status.failed()) return status;
  }
  const int kv_tile_tokens = static_cast<int>(product(tiles.kv));
  if (problem.additional_kv > 0) {
    for (const Status& status :
         {encode_additional(problem, {arrays.additional_keys, problem.head_dim}, kv_tile_tokens, p.additional_keys),
          encode_additional(problem, {arrays.additional_values, problem.head_dim_v}, kv_tile_tokens,
                            p.additional_values)}) {
      if (status.failed()) return status;
    }
  }
  p.origins = arrays.origins;
  p.layouts = arrays.layouts;
  p.is_plain = arrays.origins == nullptr && arrays.layouts == nullptr && !p.continues;
  for (const DeviceAxis& axis : p.axis) p.is_plain &= axis.ends == Ends::kShift || axis.is_causal();
  p.key_bias = arrays.key_bias;
  p.key_bias_heads = static_cast<int>(arrays.key_bias_heads);
  p.last_key = static_cast<int>(problem.batch * problem.keys() - 1);
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
  p.query_classes = group_classes(problem, Side::kQuery);
  p.kv_classes = group_classes(problem, Side::kKeyValue);
  p.queries = static_cast<int>(problem.queries());
  p.keys = static_cast<int>(problem.keys());
  fill_heads(problem, p);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.additional_tiles = (p.additional_kv + kv_tile_tokens - 1) / kv_tile_tokens;
  p.supply.tiles = static_cast<int>(all_tiles);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = kv_tile_tokens;
  p.schedule = schedule_query_tiles(problem, geometry);
  bound_warpgroups(p);
  p.clears_tiles = p.q_tile_tokens < form.queries || p.kv_tile_tokens < form.keys;
  // Products of 8-bit floats sum over all swizzled rows of the form's head dimension. If the problem's heads have fewer
  // swizzled rows, no load writes the remaining rows, so the kernel must clear them.
  if (is_float8 && problem.head_dim + kSwizzledRowBytes <= form.head_dim) p.clears_tiles = true;
  p.out_scales = arrays.out_scales;
  p.is_out_float16 = problem.out_type == ElementType::kFloat16;
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
  int multiprocessors = 0;
  NATTEN_JAX_RETURN_IF_FAILED(read_attributes({{&multiprocessors, cudaDevAttrMultiProcessorCount}}));
  const int ctas = schedule.is_persistent ? std::min(p.supply.tiles, multiprocessors) : p.supply.tiles;
  // If batch entries have separate layouts, tiles that consist of padding end at once. In a fixed order, some CTAs
  // would get more of these tiles than others, so CTAs take tiles from a counter.
  if (all_tiles >= kTilesWorthCounting * ctas || arrays.layouts != nullptr) {
    p.supply.next_tile = scratch.next_tile;
  }
  if (p.supply.next_tile != nullptr && arrays.layouts == nullptr) {
    NATTEN_JAX_RETURN_IF_FAILED(status_of(cudaMemsetAsync(scratch.next_tile, 0, sizeof(*scratch.next_tile), stream)));
  }
  if (is_float8) {
    return launch_float8_forward<ElementType::kFloat8E4M3>(p, number, schedule.is_ping_pong, ctas, stream);
  }
  if (arrays.layouts != nullptr) {
    p.entry_maps = scratch.entry_maps;
    EntryMaps maps = maps_of_entries(problem, arrays, kForwardArrays, scratch.entry_maps);
    maps.counter = p.supply.next_tile;
    maps.are_queries = 1u << kQueryOfEntry | 1u << kOutOfEntry;
    maps.base_maps[kQueryOfEntry] = p.query[0];
    maps.base_maps[kKeyOfEntry] = p.key[0];
    maps.base_maps[kValueOfEntry] = p.value[0];
    maps.base_maps[kOutOfEntry] = p.out[0];
    NATTEN_JAX_RETURN_IF_FAILED(status_of(launch_entry_maps(maps, stream)));
  }
  NATTEN_JAX_RETURN_IF_FAILED(
      with_half_type(problem.element_type, no_such_elements(problem.element_type), [&](auto type) {
        if (p.key_bias != nullptr) return launch_key_biased_forward<type>(p, number, ctas, stream);
        return p.is_plain && !is_narrow(p.head_dim, form.head_dim)
                   ? launch_plain_forward<type>(p, number, schedule.is_ping_pong, ctas, stream)
                   : launch_forward<type>(p, number, schedule.is_ping_pong, ctas, stream);
      }));
  // The kernel leaves undefined values in padding rows, so these are filled afterwards.
  return arrays.layouts == nullptr ? Status() : status_of(fill_padding_of_output(problem, arrays, stream));
}

}  // namespace natten_jax::sm90
