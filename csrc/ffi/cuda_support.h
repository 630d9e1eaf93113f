// What the handlers for NVIDIA GPUs have in common.
#pragma once

#include <cstdint>

#include "ffi/decode.h"

namespace natten_jax::ffi {

/// Checks and describes a call; `origins` are device memory, or null where all are zero.
xffi::Error decode_device_call(const ProblemOperands& operands, const Attributes& attributes, Call& call,
                               const std::int32_t*& origins);

/// Checks that the current device is of the compute capability that a family of kernels is compiled for.
xffi::Error check_compute_capability(int major, int minor);

}  // namespace natten_jax::ffi
