#include "cuda/sm80/launch.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/common/counts.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/forward.h"

namespace natten_jax::sm80 {
namespace {

constexpr std::int64_t kHeadDimStep = 8;
constexpr std::int64_t kLargestHeadDim = 256;
constexpr std::int64_t kLargestKvTile = 128;
constexpr std::int64_t kLargestBackwardTile = 128;
constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max() / 2;  // of a launch
/// Keys and values of the heads that run side by side should stay in the second-level cache.
constexpr std::int64_t kCacheBytes = 8 << 20;

std::int64_t product(const std::int64_t (&values)[kRank]) {
  return values[0] * values[1] * values[2];
}

std::int64_t element_bytes(const Problem& problem) {
  return problem.element_type == ElementType::kFloat32 ? 4 : 2;
}

/// Head dimension that the kernel is compiled for.
int compiled_head_dim(const Problem& problem) {
  const std::int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
  return wider <= 64 ? 64 : wider <= 128 ? 128 : 256;
}

/// Query rows that the forward kernel is compiled for.
std::int64_t compiled_rows(const Problem& problem, const SharedMemory& memory) {
  const int head_dim = compiled_head_dim(problem);
  const bool has_wide_form = head_dim == kWideFormHeadDim && element_bytes(problem) == 2;
  if (has_wide_form && memory.block >= kWideFormSharedMemory) return kWideFormRows;
  return head_dim * element_bytes(problem) <= 256 ? 128 : 64;
}

std::string check_arrays(const Problem& problem) {
  for (const std::int64_t head_dim : {problem.head_dim, problem.head_dim_v}) {
    if (head_dim % kHeadDimStep != 0 || head_dim > kLargestHeadDim) {
      return "a head dimension is " + std::to_string(head_dim) + ", but must be a multiple of " +
             std::to_string(kHeadDimStep) + " and at most " + std::to_string(kLargestHeadDim);
    }
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (problem.queries() > kMost || problem.keys() > kMost) return "a batch entry has more than 2^31 tokens";
  if (problem.heads * kLargestHeadDim * 4 > kMost) return "a token has more than 2^31 bytes";
  return {};
}

std::string check_tile(const char* name, const std::int64_t (&tile)[kRank], std::int64_t largest) {
  if (product(tile) <= largest) return {};
  return std::string(name) + " has " + std::to_string(product(tile)) + " tokens, but must have at most " +
         std::to_string(largest) + " at this head dimension and dtype";
}

/// Most heads whose keys and values fit into the cache together, if their tiles differ in length.
int heads_per_block(const Problem& problem) {
  const auto [x, y, z] = problem.axes;
  const bool is_causal = x.window.is_causal || y.window.is_causal || z.window.is_causal;
  if (!is_causal) return 1;
  const std::int64_t bytes = problem.keys() * (problem.head_dim + problem.head_dim_v) * element_bytes(problem);
  int best = 1;
  for (std::int64_t heads = 1; heads <= problem.heads; ++heads) {
    const std::int64_t kv_heads = (heads + problem.heads_per_kv() - 1) / problem.heads_per_kv();
    if (problem.heads % heads == 0 && kv_heads * bytes <= kCacheBytes) best = static_cast<int>(heads);
  }
  return best;
}

/// What a device says of its shared memory.
cudaError_t read_shared_memory(SharedMemory& memory) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  for (const auto& [value, attribute] : {std::pair{&memory.block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                         std::pair{&memory.multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                                         std::pair{&memory.reserved, cudaDevAttrReservedSharedMemoryPerBlock}}) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  }
  return error;
}

/// A form of the backward kernel: the keys that it works on at a time, and the bytes of shared memory that it needs.
struct BackwardForm {
  int keys;
  int shared_memory;
};

/// The form with the most keys that fits.
BackwardForm compiled_backward(const Problem& problem, int shared_memory) {
  const int head_dim = compiled_head_dim(problem);
  const auto first = [&](BackwardForm large, BackwardForm small) {
    return large.shared_memory <= shared_memory ? large : small;
  };
  if (problem.element_type == ElementType::kFloat32) {
    if (head_dim == 64) return {64, 96 << 10};
    if (head_dim == 128) return {32, 80 << 10};
    return first({32, 148 << 10}, {16, 80 << 10});
  }
  if (head_dim == 64) return {128, 96 << 10};
  if (head_dim == 128) return first({128, 226 << 10}, {64, 80 << 10});
  return first({64, 120 << 10}, {32, 84 << 10});
}

constexpr char kTooLittleSharedMemory[] = "the device has too little shared memory for heads of this width";

std::string describe(cudaError_t error) {
  if (error == cudaErrorInvalidConfiguration) return kTooLittleSharedMemory;
  return error == cudaSuccess ? std::string() : std::string("CUDA: ") + cudaGetErrorString(error);
}

}  // namespace

std::string run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                        cudaStream_t stream) {
  SharedMemory memory{};
  if (const auto error = read_shared_memory(memory)) return describe(error);
  for (const std::string& error :
       {check_arrays(problem), check_tile("q_tile_shape", tiles.query, compiled_rows(problem, memory)),
        check_tile("kv_tile_shape", tiles.kv, kLargestKvTile)}) {
    if (!error.empty()) return error;
  }
  ForwardParams p{};
  std::int64_t groups = 1, tiles_per_group = 1;
  for (int d = 0; d < kRank; ++d) {
    p.axis[d] = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    groups = saturating_product(groups, p.axis[d].dilation);
    tiles_per_group = saturating_product(tiles_per_group, p.axis[d].q_tiles);
  }
  const std::int64_t heads = saturating_product(problem.batch, problem.heads);
  const std::int64_t all_tiles = saturating_product(heads, saturating_product(groups, tiles_per_group));
  if (all_tiles > kMostTiles) return "the problem has more than 2^30 query tiles";
  p.query = arrays.query;
  p.key = arrays.key;
  p.value = arrays.value;
  p.additional_keys = arrays.additional_keys;
  p.additional_values = arrays.additional_values;
  p.origins = arrays.origins;
  p.out = arrays.out;
  p.logsumexp = arrays.logsumexp;
  p.remainder = arrays.remainder;
  p.queries = problem.queries();
  p.keys = problem.keys();
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.additional_kv = static_cast<int>(problem.additional_kv);
  p.scale = problem.scale;
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.heads_per_block = heads_per_block(problem);
  p.by_tiles_per_group = cutlass::FastDivmod(static_cast<int>(tiles_per_group));
  p.by_groups = cutlass::FastDivmod(static_cast<int>(groups));
  p.by_heads_per_block = cutlass::FastDivmod(p.heads_per_block);
  p.by_head_blocks = cutlass::FastDivmod(p.heads / p.heads_per_block);
  p.by_heads_per_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_per_kv()));
  const auto launch = problem.element_type == ElementType::kFloat16    ? launch_forward<Arithmetic::kFloat16>
                      : problem.element_type == ElementType::kBFloat16 ? launch_forward<Arithmetic::kBFloat16>
                      : is_accurate                                    ? launch_forward<Arithmetic::kFloat32>
                                                                       : launch_forward<Arithmetic::kTensorFloat32>;
  return describe(launch(p, compiled_head_dim(problem), memory, static_cast<int>(all_tiles), stream));
}

HeadBlock head_block(const Problem& problem, std::int64_t scratch_elements) {
  const std::int64_t of_head = problem.queries() * problem.heads_per_kv() * problem.head_dim;
  const std::int64_t heads = scratch_elements / of_head;
  if (heads == 0 || scratch_elements % of_head != 0) return {0, 0};
  if (heads < problem.heads_kv) return {1, heads};
  if (heads % problem.heads_kv != 0 || heads / problem.heads_kv > problem.batch) return {0, 0};
  return {heads / problem.heads_kv, problem.heads_kv};
}

std::string run_backward(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays,
                         const HeadBlock& block, std::int64_t kv_splits, bool is_accurate, cudaStream_t stream) {
  SharedMemory memory{};
  if (const auto error = read_shared_memory(memory)) return describe(error);
  const BackwardForm form = compiled_backward(problem, memory.block);
  for (const std::string& sentence :
       {check_arrays(problem), check_tile("q_tile_shape", tiles.query, kLargestBackwardTile),
        check_tile("kv_tile_shape", tiles.kv, kLargestBackwardTile)}) {
    if (!sentence.empty()) return sentence;
  }
  if (form.shared_memory > memory.block) return kTooLittleSharedMemory;

  const bool is_float32 = problem.element_type == ElementType::kFloat32;
  BackwardParams p{};
  std::int64_t groups = 1, tiles_per_group = 1;
  for (int d = 0; d < kRank; ++d) {
    p.axis[d] = device_axis(problem.axes[d], tiles.query[d], tiles.kv[d]);
    groups = saturating_product(groups, p.axis[d].dilation);
    tiles_per_group = saturating_product(tiles_per_group, p.axis[d].kv_tiles);
  }
  p.origins = arrays.origins;
  p.queries = problem.queries();
  p.query_gradient_token = is_float32 ? problem.heads * problem.head_dim : problem.head_dim;
  p.query_gradient_head = is_float32 ? problem.head_dim : p.queries * problem.head_dim;
  p.heads = static_cast<int>(problem.heads);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.scale = problem.scale;
  p.query_gradient_scale = is_float32 ? problem.scale : 1.f;
  p.q_tile_tokens = static_cast<int>(product(tiles.query));
  p.kv_tile_tokens = static_cast<int>(product(tiles.kv));
  p.parts = (p.kv_tile_tokens + form.keys - 1) / form.keys;

  const auto launch = problem.element_type == ElementType::kFloat16    ? launch_backward<Arithmetic::kFloat16>
                      : problem.element_type == ElementType::kBFloat16 ? launch_backward<Arithmetic::kBFloat16>
                      : is_accurate                                    ? launch_backward<Arithmetic::kFloat32>
                                                                       : launch_backward<Arithmetic::kTensorFloat32>;
  const auto run = [&](std::int64_t all_tiles, std::int64_t all_groups, std::int64_t heads) -> std::string {
    const std::int64_t splits = kv_splits == 0 ? all_tiles : std::min(kv_splits, all_tiles);
    const std::int64_t ctas = saturating_product(heads, saturating_product(splits, all_groups));
    if (all_tiles > kMostTiles || ctas > kMostTiles) return "the problem has more than 2^30 key/value tiles";
    p.tiles = static_cast<int>(all_tiles);
    p.splits = static_cast<int>(splits);
    p.by_splits = cutlass::FastDivmod(p.splits);
    p.by_groups = cutlass::FastDivmod(static_cast<int>(all_groups));
    return describe(launch(p, compiled_head_dim(problem), form.keys, static_cast<int>(ctas), stream));
  };

  // The heads of a block, from a head of a batch entry on: arrays start there, and their strides stay the same.
  const auto run_block = [&](std::int64_t batch, std::int64_t head_kv, const HeadBlock& size) -> std::string {
    const std::int64_t of_query = batch * p.queries * problem.heads + head_kv * problem.heads_per_kv();
    const std::int64_t of_key = batch * problem.keys() * problem.heads_kv + head_kv;
    const std::int64_t of_additional = batch * problem.additional_kv * problem.heads_kv + head_kv;
    const auto at = [&](auto* data, std::int64_t head, std::int64_t head_dim) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>, const char, char>;
      return static_cast<Byte*>(data) + head * head_dim * element_bytes(problem);
    };
    const std::int64_t heads = size.heads_kv * problem.heads_per_kv();
    char* query_gradient = at(arrays.query_gradient, of_query, problem.head_dim);
    p.query = at(arrays.query, of_query, problem.head_dim);
    p.out_cotangent = at(arrays.out_cotangent, of_query, problem.head_dim_v);
    p.logsumexp = arrays.logsumexp + of_query;
    p.remainder = arrays.remainder == nullptr ? nullptr : arrays.remainder + of_query;
    p.delta = arrays.delta + of_query;
    p.query_gradient = is_float32 ? reinterpret_cast<float*>(query_gradient) : arrays.query_gradient_sums;
    p.query_gradient_batch = p.queries * (is_float32 ? problem.heads : heads) * problem.head_dim;
    p.by_heads_kv = cutlass::FastDivmod(static_cast<int>(size.heads_kv));
    if (const auto cleared =
            cudaMemsetAsync(p.query_gradient, 0, size.batch * p.query_gradient_batch * sizeof(float), stream)) {
      return describe(cleared);
    }
    if (problem.additional_kv > 0) {
      p.is_additional = true;
      p.key = at(arrays.additional_keys, of_additional, problem.head_dim);
      p.value = at(arrays.additional_values, of_additional, problem.head_dim_v);
      p.key_gradient = at(arrays.additional_keys_gradient, of_additional, problem.head_dim);
      p.value_gradient = at(arrays.additional_values_gradient, of_additional, problem.head_dim_v);
      p.keys = problem.additional_kv;
      const std::int64_t all_tiles = (problem.additional_kv + form.keys - 1) / form.keys;
      if (std::string sentence = run(all_tiles, 1, size.batch * size.heads_kv); !sentence.empty()) return sentence;
    }
    p.is_additional = false;
    p.key = at(arrays.key, of_key, problem.head_dim);
    p.value = at(arrays.value, of_key, problem.head_dim_v);
    p.key_gradient = at(arrays.key_gradient, of_key, problem.head_dim);
    p.value_gradient = at(arrays.value_gradient, of_key, problem.head_dim_v);
    p.keys = problem.keys();
    std::string sentence = run(saturating_product(tiles_per_group, p.parts), groups, size.batch * size.heads_kv);
    if (!sentence.empty() || is_float32) return sentence;
    return describe(launch_convert_gradient(problem.element_type == ElementType::kBFloat16, arrays.query_gradient_sums,
                                            problem.scale, query_gradient, size.batch, p.queries, heads, problem.heads,
                                            problem.head_dim, false, stream));
  };
  for (std::int64_t batch = 0; batch < problem.batch; batch += block.batch) {
    for (std::int64_t head_kv = 0; head_kv < problem.heads_kv; head_kv += block.heads_kv) {
      const HeadBlock size{std::min(block.batch, problem.batch - batch),
                           std::min(block.heads_kv, problem.heads_kv - head_kv)};
      if (std::string sentence = run_block(batch, head_kv, size); !sentence.empty()) return sentence;
    }
  }
  return {};
}

}  // namespace natten_jax::sm80
