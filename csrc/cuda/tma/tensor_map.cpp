#include "cuda/tma/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <iterator>
#include <limits>
#include <string>

#include "cuda/common/cuda_status.h"

namespace natten_jax {
namespace {

constexpr std::int64_t kRowBytes = 128;
constexpr std::int64_t kLargestBox = 256;

/// Finds the driver's encoder at run time, because the library does not link against the driver. Failures are not
/// cached: a later call may find a working driver.
Status find_encoder(PFN_cuTensorMapEncodeTiled_v12000& result) {
  static std::atomic<PFN_cuTensorMapEncodeTiled_v12000> found{nullptr};
  result = found.load(std::memory_order_relaxed);
  if (result != nullptr) return {};
  void* address = nullptr;
  cudaDriverEntryPointQueryResult answer;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &answer);
#else
  // CUDA before 12.5 has only this lookup. It does not take a version, but the function has only one version in these
  // releases. CUDA 13 does not have this lookup.
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &address, cudaEnableDefault, &answer);
#endif
  if (error != cudaSuccess) return status_of(error);
  if (answer != cudaDriverEntryPointSuccess) {
    return Status::internal("the CUDA driver has no tensor maps (cuTensorMapEncodeTiled)");
  }
  result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(address);
  found.store(result, std::memory_order_relaxed);
  return {};
}

/// By ElementType.
constexpr CUtensorMapDataType kDataTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                              CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8};
static_assert(std::size(kDataTypes) == kElementTypes);

/// Dimensions of a 5-D map, innermost first. Along dimension 0, a box has one row, which may be swizzled.
struct MapDimensions {
  std::int64_t sizes[5];
  std::int64_t strides[4];  // of dimensions 1 to 4, in elements
  std::int64_t box[4];      // tokens of a box along dimensions 1 to 4
  std::int64_t steps[4];    // distance between neighboring tokens of a box, in tokens, along dimensions 1 to 4
};

Status encode_map(const void* data, ElementType type, std::int64_t row_bytes, const MapDimensions& dimensions,
                  CUtensorMap& map) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  NATTEN_JAX_RETURN_IF_FAILED(find_encoder(encode));
  const std::int64_t bytes = element_bytes(type);
  cuuint64_t extents[5], pitches[4];
  cuuint32_t boxes[5] = {static_cast<cuuint32_t>(row_bytes / bytes)}, steps[5] = {1};
  for (int i = 0; i < 5; ++i) extents[i] = static_cast<cuuint64_t>(dimensions.sizes[i]);
  for (int i = 0; i < 4; ++i) {
    const std::int64_t span = dimensions.box[i] * dimensions.steps[i];
    if (span > kLargestBox) {
      return Status::invalid_argument("a tile extent of " + std::to_string(span) + " exceeds the " +
                                      std::to_string(kLargestBox) + " tokens that a tensor copy takes");
    }
    pitches[i] = static_cast<cuuint64_t>(dimensions.strides[i] * bytes);
    boxes[i + 1] = static_cast<cuuint32_t>(span);
    steps[i + 1] = static_cast<cuuint32_t>(dimensions.steps[i]);
  }
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result = encode(&map, kDataTypes[static_cast<int>(type)], 5, const_cast<void*>(data), extents, pitches,
                                 boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return Status::internal("the CUDA driver refused a tensor map (error " + std::to_string(static_cast<int>(result)) +
                          ")");
}

}  // namespace

Status encode_head_map(const TokenGrid& grid, const std::int64_t (&box)[3], CUtensorMap& map) {
  const std::int64_t token = grid.heads * grid.head_dim;
  const std::int64_t pitch[3] = {grid.extent[1] * grid.extent[2] * token, grid.extent[2] * token, token};
  const std::int64_t heads = grid.batch * grid.extent[0] * grid.extent[1] * grid.extent[2] * grid.heads;
  if (heads > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid_argument("an array has " + std::to_string(heads) +
                                    " heads of all its tokens, but must have fewer than 2^31");
  }
  return encode_map(
      grid.data, grid.element_type, kRowBytes,
      {{grid.head_dim, grid.tokens[2], grid.tokens[1], grid.tokens[0], heads},
       {pitch[2] * grid.dilation[2], pitch[1] * grid.dilation[1], pitch[0] * grid.dilation[0], grid.head_dim},
       {box[2], box[1], box[0], 1},
       {1, 1, 1, 1}},
      map);
}

Status encode_box_map(const TokenBoxes& tokens, const int (&box)[3], CUtensorMap& map) {
  const std::int64_t token = tokens.heads * tokens.head_dim;
  MapDimensions dimensions{};
  dimensions.sizes[0] = token;
  std::int64_t batch_pitch = token;
  for (int i = 0; i < 3; ++i) {
    dimensions.sizes[i + 1] = tokens.extent[i];
    dimensions.strides[i] = token * tokens.pitch[i];
    dimensions.box[i] = box[i];
    dimensions.steps[i] = tokens.dilation[i];
    batch_pitch *= tokens.extent[i];
  }
  dimensions.sizes[4] = tokens.batch;
  dimensions.strides[3] = batch_pitch;
  dimensions.box[3] = dimensions.steps[3] = 1;
  return encode_map(tokens.data, tokens.element_type, tokens.head_dim * element_bytes(tokens.element_type), dimensions,
                    map);
}

}  // namespace natten_jax
