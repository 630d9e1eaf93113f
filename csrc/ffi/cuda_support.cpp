#include "ffi/cuda_support.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/common/cuda_status.h"
#include "ffi/handler_support.h"

namespace natten_jax::ffi {

using xffi::AnyBuffer;
using xffi::Error;

Error check_outputs(const AnyBuffer& out, const AnyBuffer& out_cotangent, ElementType& type) {
  constexpr std::int64_t kStep = 8, kLargestHeadDim = 256;  // limits of cuda/common/gradient_passes.h
  NATTEN_JAX_RETURN_IF_ERROR(decode_element_type("out", out, type));
  const auto shape = out.dimensions();
  if (shape.size() != 6) {
    return Error::InvalidArgument("natten_jax: out has " + std::to_string(shape.size()) +
                                  " dimensions, but must have 6 [batch, x, y, z, heads, head_dim_v]");
  }
  if (shape[5] % kStep != 0 || shape[5] > kLargestHeadDim || shape[5] == 0) {
    return Error::InvalidArgument("natten_jax: head_dim_v is " + std::to_string(shape[5]) +
                                  ", but must be a multiple of " + std::to_string(kStep) + " and at most " +
                                  std::to_string(kLargestHeadDim));
  }
  return check_array("out_cotangent", out_cotangent, data_type(type),
                     {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]}, "it looks like out");
}

Error check_statistic_of_outputs(const char* name, const AnyBuffer& array, const AnyBuffer& out) {
  const auto shape = out.dimensions();
  return check_array(name, array, xffi::DataType::F32, {shape[0], shape[1], shape[2], shape[3], shape[4]},
                     "one value per query and head");
}

Error decode_logsumexp_cotangent(const AnyBuffer& array, const AnyBuffer& out, const float*& values) {
  values = nullptr;
  if (array.element_count() == 0) {
    return check_array("logsumexp_cotangent", array, xffi::DataType::F32, {0},
                       "it is empty, or one value per query and head");
  }
  values = static_cast<const float*>(array.untyped_data());
  return check_statistic_of_outputs("logsumexp_cotangent", array, out);
}

Error decode_entry_maps(const AnyBuffer& array, std::int64_t count, CUtensorMap*& maps) {
  maps = count == 0 ? nullptr : static_cast<CUtensorMap*>(array.untyped_data());
  return check_array("result entry_maps", array, xffi::DataType::U8,
                     {count, static_cast<std::int64_t>(sizeof(CUtensorMap))},
                     "it is scratch for the tensor maps of batch entries with separate layouts");
}

Error check_compute_capability(int major, int minor) {
  int actual_major = 0, actual_minor = 0;
  NATTEN_JAX_RETURN_IF_ERROR(error_of(read_attributes(
      {{&actual_major, cudaDevAttrComputeCapabilityMajor}, {&actual_minor, cudaDevAttrComputeCapabilityMinor}})));
  if (actual_major == major && actual_minor == minor) return Error::Success();
  return Error::InvalidArgument("natten_jax: the device has compute capability " + std::to_string(actual_major) + "." +
                                std::to_string(actual_minor) + ", but must have " + std::to_string(major) + "." +
                                std::to_string(minor));
}

}  // namespace natten_jax::ffi
