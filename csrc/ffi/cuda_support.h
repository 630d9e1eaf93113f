// What the handlers for NVIDIA GPUs have in common.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Checks the operands that every kernel of cuda/common/gradient_passes.h starts with: the output and its cotangent,
/// [batch, x, y, z, heads, head_dim_v].
xffi::Error check_outputs(const xffi::AnyBuffer& out, const xffi::AnyBuffer& out_cotangent, ElementType& type);

/// Checks an array of one value for each of their queries and heads.
xffi::Error check_statistic_of_outputs(const char* name, const xffi::AnyBuffer& array, const xffi::AnyBuffer& out);

/// The same of the cotangent of the logsumexp, which is zero where the array is one of nothing: then null.
xffi::Error decode_logsumexp_cotangent(const xffi::AnyBuffer& array, const xffi::AnyBuffer& out, const float*& values);

/// Checks scratch memory for tensor maps, of which a launch makes so many.
xffi::Error decode_entry_maps(const xffi::AnyBuffer& array, std::int64_t count, CUtensorMap*& maps);

/// Checks that the current device is of the compute capability that a family of kernels is compiled for.
xffi::Error check_compute_capability(int major, int minor);

}  // namespace natten_jax::ffi
