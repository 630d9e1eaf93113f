// Shared code of the handlers for NVIDIA GPUs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Checks the first operands of every kernel of cuda/common/gradient_passes.h: the output and its cotangent, [batch, x,
/// y, z, heads, head_dim_v].
xffi::Error check_outputs(const xffi::AnyBuffer& out, const xffi::AnyBuffer& out_cotangent, ElementType& type);

/// Checks an array with a value for each query and head of `out`.
xffi::Error check_statistic_of_outputs(const char* name, const xffi::AnyBuffer& array, const xffi::AnyBuffer& out);

/// Decodes the cotangent of the logsumexp: a value for each query and head of `out`. An empty array, which means zeros,
/// gives null.
xffi::Error decode_logsumexp_cotangent(const xffi::AnyBuffer& array, const xffi::AnyBuffer& out, const float*& values);

/// Checks scratch memory for the `count` tensor maps of a launch.
xffi::Error decode_entry_maps(const xffi::AnyBuffer& array, std::int64_t count, CUtensorMap*& maps);

/// Checks that the current device has the compute capability that a family of kernels is compiled for.
xffi::Error check_compute_capability(int major, int minor);

}  // namespace natten_jax::ffi
