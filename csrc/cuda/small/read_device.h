// Device properties that launches depend on.
#pragma once

#include "cuda/small/region.h"
#include "natten_jax/arrays.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Reads the device properties that determine a call's regions. With per-entry layouts, boxes are used only on Hopper,
/// because only the code for Hopper makes tensor maps per batch entry. On other devices, threads copy the columns, and
/// skip the padding.
Status read_device(const Arrays& arrays, Device& result);

/// Sets `result` to true if the device has compute capability 9.0 and this library has kernels for it, and to false
/// otherwise.
Status find_hopper(bool& result);

}  // namespace natten_jax::small
