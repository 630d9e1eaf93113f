// Shared code of the handlers for NVIDIA GPUs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Checks the output and its cotangent, [batch, x, y, z, heads, head_dim_v], which are operands of launch_statistics
/// and launch_delta (cuda/common/gradient_passes.h). Sets `type` to their element type.
xffi::Error check_outputs(const xffi::AnyBuffer& out, const xffi::AnyBuffer& out_cotangent, ElementType& type);

/// Checks an array that must have one number per query and head of `out`.
xffi::Error check_statistic_of_outputs(const char* name, const xffi::AnyBuffer& array, const xffi::AnyBuffer& out);

/// Decodes the cotangent of the logsumexp: one number per query and head of `out`. If the array is empty, which means
/// zeros, `values` becomes null.
xffi::Error decode_logsumexp_cotangent(const xffi::AnyBuffer& array, const xffi::AnyBuffer& out, const float*& values);

/// Checks scratch memory for the `count` tensor maps of a launch.
xffi::Error decode_entry_maps(const xffi::AnyBuffer& array, std::int64_t count, CUtensorMap*& maps);

/// Checks that the current device has the compute capability for which a family of kernels is compiled.
xffi::Error check_compute_capability(int major, int minor);

}  // namespace natten_jax::ffi
