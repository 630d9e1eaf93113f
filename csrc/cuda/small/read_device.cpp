#include "cuda/small/read_device.h"

#include "cuda/common/cuda_status.h"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

Status read_device(const Arrays& arrays, Device& result) {
  NATTEN_JAX_RETURN_IF_FAILED(
      read_attributes({{&result.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                       {&result.shared_memory_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                       {&result.shared_memory_reserved, cudaDevAttrReservedSharedMemoryPerBlock},
                       {&result.multiprocessors, cudaDevAttrMultiProcessorCount}}));
  NATTEN_JAX_RETURN_IF_FAILED(status_of(find_box_kernels<ElementType::kBFloat16, Feature::kNone>(result.has_boxes)));
  if (arrays.layouts == nullptr) return {};
  bool is_hopper = false;
  NATTEN_JAX_RETURN_IF_FAILED(find_hopper(is_hopper));
  result.has_boxes = result.has_boxes && is_hopper;
  return {};
}

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

}  // namespace natten_jax::small
