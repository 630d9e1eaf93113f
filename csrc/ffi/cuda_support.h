// What the handlers for NVIDIA GPUs have in common.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace natten_jax::ffi {

/// Checks that the current device is of the compute capability that a family of kernels is compiled for.
xla::ffi::Error check_compute_capability(int major, int minor);

}  // namespace natten_jax::ffi
