#include "cuda/sm80/launch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/common/padding.h"
#include "cuda/common/problem_checks.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm80/kernels.h"

namespace natten_jax::sm80 {
namespace {

Status check_tile(const char* name, const std::int64_t (&tile)[kRank], std::int64_t largest) {
  if (product(tile) <= largest) return {};
  return Status::invalid_argument(std::string(name) + " has " + std::to_string(product(tile)) +
                                  " tokens, but must have at most " + std::to_string(largest) +
                                  " at this head dimension and dtype");
}

/// Reads the sizes of the current device's shared memory.
Status read_shared_memory(SharedMemory& memory) {
  return read_attributes({{&memory.block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                          {&memory.multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                          {&memory.reserved, cudaDevAttrReservedSharedMemoryPerBlock}});
}

/// True if a form has the head dimension and element size for the problem, and the device has enough shared memory.
template <class Form, int kForms>
bool fits(const Form& form, const Form (&forms)[kForms], const Problem& problem, const SharedMemory& memory) {
  const int bytes = element_bytes(problem.element_type);
  const int head_dim = compiled_head_dim(forms, std::max(problem.head_dim, problem.head_dim_v), bytes);
  return form.head_dim == head_dim && form.element_bytes == bytes && form.shared_memory <= memory.block;
}

/// Chooses the first form that supports the problem and its tiles. Returns an error if no form does.
Status choose_forward_form(const Problem& problem, const TileShapes& tiles, const SharedMemory& memory,
                           ForwardForm& chosen) {
  const ForwardForm* largest = nullptr;
  for (const ForwardForm& form : kForwardForms) {
    if (!fits(form, kForwardForms, problem, memory)) continue;
    largest = &form;
    if (product(tiles.query) <= form.queries) break;
  }
  if (largest == nullptr) return Status::invalid_argument(kTooLittleSharedMemory);
  chosen = *largest;
  NATTEN_JAX_RETURN_IF_FAILED(check_tile("q_tile_shape", tiles.query, chosen.queries));
  return check_tile("kv_tile_shape", tiles.kv, chosen.keys);
}

/// Checks that the kernels support the problem's key biases, if it has any.
Status check_key_bias(const Problem& problem) {
  if (!problem.has_key_bias || problem.element_type != ElementType::kFloat32) return {};
  return Status::invalid_argument(
      "query has dtype float32, but must have float16 or bfloat16 in calls with a key_bias");
}

/// Scale of a launch whose first head is head `head` of the arrays.
Scale from_head(Scale scale, std::int64_t head) {
  if (scale.heads != nullptr) scale.heads += head;
  return scale;
}

/// Chooses the form that processes the most keys at a time, among the forms that fit the problem and the device.
/// Returns an error if no form fits.
Status choose_backward_form(const Problem& problem, const SharedMemory& memory, BackwardForm& chosen) {
  for (const BackwardForm& form : kBackwardForms) {
    if (!fits(form, kBackwardForms, problem, memory)) continue;
    chosen = form;
    return {};
  }
  return Status::invalid_argument(kTooLittleSharedMemory);
}

}  // namespace

Status check_arrays(const Problem& problem) {
  NATTEN_JAX_RETURN_IF_FAILED(check_no_seams(problem));
  NATTEN_JAX_RETURN_IF_FAILED(check_key_bias(problem));
  NATTEN_JAX_RETURN_IF_FAILED(check_head_dims(problem, kHeadDimStep, kLargestHeadDim));
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (problem.queries() > kMost || problem.keys() > kMost) {
    return Status::invalid_argument("a batch entry has 2^31 tokens or more");
  }
  return check_token_bytes(problem, kLargestHeadDim, sizeof(float));
}

Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                   cudaStream_t stream) {
  SharedMemory memory{};
  NATTEN_JAX_RETURN_IF_FAILED(read_shared_memory(memory));
  ForwardForm form{};
  NATTEN_JAX_RETURN_IF_FAILED(choose_forward_form(problem, tiles, memory, form));
  const Geometry geometry = geometry_of(problem, tiles);
  const std::int64_t heads = saturating_product(problem.batch, problem.heads);
  const std::int64_t all_tiles = saturating_product(heads, saturating_product(geometry.groups, geometry.q_tiles));
  if (all_tiles > kMostTiles) return Status::invalid_argument("the problem has more than 2^30 query tiles");
  ForwardParams p{};
  std::copy_n(geometry.axis, kRank, p.axis);
  fill_arrays(arrays, p);
  p.queries = problem.queries();
  p.keys = problem.keys();
  fill_heads(problem, p);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.schedule = schedule_query_tiles(problem, geometry);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
  p.key_bias = arrays.key_bias;
  p.key_bias_heads = static_cast<int>(arrays.key_bias_heads);
  NATTEN_JAX_RETURN_IF_FAILED(with_arithmetic(problem.element_type, is_accurate, [&](auto arithmetic) {
    const int ctas = static_cast<int>(all_tiles);
    if constexpr (is_half(arithmetic)) {
      if (p.key_bias != nullptr) return launch_key_biased_forward<arithmetic>(p, form, memory, ctas, stream);
    }
    return launch_forward<arithmetic>(p, form, memory, ctas, stream);
  }));
  return arrays.layouts == nullptr ? Status() : status_of(fill_padding_of_output(problem, arrays, stream));
}

HeadBlock head_block(const Problem& problem, std::int64_t scratch_elements) {
  const std::int64_t head_elements = problem.queries() * problem.heads_per_kv() * problem.head_dim;
  const std::int64_t heads = scratch_elements / head_elements;
  if (heads == 0 || scratch_elements % head_elements != 0) return {0, 0};
  if (heads < problem.heads_kv) return {1, heads};
  if (heads % problem.heads_kv != 0 || heads / problem.heads_kv > problem.batch) return {0, 0};
  return {heads / problem.heads_kv, problem.heads_kv};
}

Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* query_gradient_sums,
                    const HeadBlock& block, std::int64_t kv_splits, bool is_accurate, cudaStream_t stream) {
  SharedMemory memory{};
  NATTEN_JAX_RETURN_IF_FAILED(read_shared_memory(memory));
  BackwardForm form{};
  NATTEN_JAX_RETURN_IF_FAILED(check_tile("q_tile_shape", tiles.query, kLargestTile));
  NATTEN_JAX_RETURN_IF_FAILED(check_tile("kv_tile_shape", tiles.kv, kLargestTile));
  NATTEN_JAX_RETURN_IF_FAILED(choose_backward_form(problem, memory, form));

  const bool is_float32 = problem.element_type == ElementType::kFloat32;
  BackwardParams p{};
  const Geometry geometry = geometry_of(problem, tiles);
  std::copy_n(geometry.axis, kRank, p.axis);
  p.origins = arrays.origins;
  p.queries = problem.queries();
  p.query_gradient_token = is_float32 ? problem.heads * problem.head_dim : problem.head_dim;
  p.query_gradient_head = is_float32 ? problem.head_dim : p.queries * problem.head_dim;
  fill_heads(problem, p);
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.parts = (p.kv_tile_tokens + form.keys - 1) / form.keys;
  p.key_bias_heads = static_cast<int>(arrays.key_bias_heads);
  if (arrays.key_bias != nullptr && arrays.layouts != nullptr) {
    // No tile contains padding keys, so the kernel does not write the gradients of their biases.
    const std::int64_t numbers = problem.batch * problem.keys() * problem.heads;
    NATTEN_JAX_RETURN_IF_FAILED(
        status_of(cudaMemsetAsync(arrays.key_bias_gradient, 0, numbers * sizeof(float), stream)));
  }

  const auto run = [&](std::int64_t all_tiles, std::int64_t all_groups, std::int64_t heads) -> Status {
    const std::int64_t splits = kv_splits == 0 ? all_tiles : std::min(kv_splits, all_tiles);
    const std::int64_t ctas = saturating_product(heads, saturating_product(splits, all_groups));
    if (all_tiles > kMostTiles || ctas > kMostTiles) {
      return Status::invalid_argument("the problem has more than 2^30 key/value tiles");
    }
    p.tiles = static_cast<int>(all_tiles);
    p.splits = static_cast<int>(splits);
    p.by_splits = cutlass::FastDivmod(p.splits);
    p.by_groups = cutlass::FastDivmod(static_cast<int>(all_groups));
    return with_arithmetic(problem.element_type, is_accurate, [&](auto arithmetic) {
      if constexpr (is_half(arithmetic)) {
        if (p.key_bias != nullptr) {
          return launch_key_biased_backward<arithmetic>(p, form, static_cast<int>(ctas), stream);
        }
      }
      return launch_backward<arithmetic>(p, form, static_cast<int>(ctas), stream);
    });
  };

  // Launches the kernels for a block of heads that starts at key/value head `head_kv` of entry `batch`. Pointers to the
  // arrays are moved to this head. Strides are unchanged.
  const auto run_block = [&](std::int64_t batch, std::int64_t head_kv, const HeadBlock& size) -> Status {
    const std::int64_t first_query_head = batch * p.queries * problem.heads + head_kv * problem.heads_per_kv();
    const std::int64_t first_key_head = batch * problem.keys() * problem.heads_kv + head_kv;
    const std::int64_t first_additional_head = batch * problem.additional_kv * problem.heads_kv + head_kv;
    const auto at = [&](auto* data, std::int64_t head, std::int64_t head_dim) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>, const char, char>;
      return static_cast<Byte*>(data) + head * head_dim * element_bytes(problem.element_type);
    };
    const std::int64_t heads = size.heads_kv * problem.heads_per_kv();
    char* query_gradient = at(arrays.query_gradient, first_query_head, problem.head_dim);
    p.layouts = arrays.layouts == nullptr ? nullptr : arrays.layouts + batch * kRank * kRank;
    p.query = at(arrays.query, first_query_head, problem.head_dim);
    p.out_cotangent = at(arrays.out_cotangent, first_query_head, problem.head_dim_v);
    p.logsumexp = arrays.logsumexp + first_query_head;
    p.remainder = arrays.remainder == nullptr ? nullptr : arrays.remainder + first_query_head;
    p.delta = arrays.delta + first_query_head;
    p.scale = from_head(problem.scale, batch * problem.heads + head_kv * problem.heads_per_kv());
    p.query_gradient = is_float32 ? reinterpret_cast<float*>(query_gradient) : query_gradient_sums;
    p.query_gradient_batch = p.queries * (is_float32 ? problem.heads : heads) * problem.head_dim;
    p.by_heads_kv = cutlass::FastDivmod(static_cast<int>(size.heads_kv));
    NATTEN_JAX_RETURN_IF_FAILED(
        status_of(cudaMemsetAsync(p.query_gradient, 0, size.batch * p.query_gradient_batch * sizeof(float), stream)));
    if (problem.additional_kv > 0) {
      p.is_additional = true;
      p.key_bias = nullptr;  // additional keys have no biases
      p.key = at(arrays.additional_keys, first_additional_head, problem.head_dim);
      p.value = at(arrays.additional_values, first_additional_head, problem.head_dim_v);
      p.key_gradient = at(arrays.additional_keys_gradient, first_additional_head, problem.head_dim);
      p.value_gradient = at(arrays.additional_values_gradient, first_additional_head, problem.head_dim_v);
      p.keys = problem.additional_kv;
      const std::int64_t all_tiles = (problem.additional_kv + form.keys - 1) / form.keys;
      NATTEN_JAX_RETURN_IF_FAILED(run(all_tiles, 1, size.batch * size.heads_kv));
    }
    p.is_additional = false;
    if (arrays.key_bias != nullptr) {
      const std::int64_t first_head = head_kv * problem.heads_per_kv();
      const bool is_shared = arrays.key_bias_heads == 1;
      p.key_bias = arrays.key_bias + batch * problem.keys() * arrays.key_bias_heads + (is_shared ? 0 : first_head);
      p.key_bias_gradient = arrays.key_bias_gradient + batch * problem.keys() * problem.heads + first_head;
    }
    p.key = at(arrays.key, first_key_head, problem.head_dim);
    p.value = at(arrays.value, first_key_head, problem.head_dim_v);
    p.key_gradient = at(arrays.key_gradient, first_key_head, problem.head_dim);
    p.value_gradient = at(arrays.value_gradient, first_key_head, problem.head_dim_v);
    p.keys = problem.keys();
    Status status = run(saturating_product(geometry.kv_tiles, p.parts), geometry.groups, size.batch * size.heads_kv);
    if (status.failed() || is_float32) return status;
    return status_of(launch_convert_gradient(problem.element_type, query_gradient_sums, nullptr, p.scale,
                                             query_gradient, size.batch, p.queries, heads, problem.heads,
                                             problem.head_dim, false, stream));
  };
  for (std::int64_t batch = 0; batch < problem.batch; batch += block.batch) {
    for (std::int64_t head_kv = 0; head_kv < problem.heads_kv; head_kv += block.heads_kv) {
      const HeadBlock size{std::min(block.batch, problem.batch - batch),
                           std::min(block.heads_kv, problem.heads_kv - head_kv)};
      NATTEN_JAX_RETURN_IF_FAILED(run_block(batch, head_kv, size));
    }
  }
  return arrays.layouts == nullptr ? Status() : status_of(fill_padding_of_gradients(problem, arrays, false, stream));
}

}  // namespace natten_jax::sm80
