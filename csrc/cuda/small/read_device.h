// Device properties that launches depend on.
#pragma once

#include "cuda/small/region.h"
#include "natten_jax/arrays.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Reads the device properties that the choice of a call's regions depends on. With per-entry layouts, boxes are used
/// only on Hopper, because only its code makes the tensor maps; on other devices, threads copy columns and skip the
/// padding.
Status read_device(const Arrays& arrays, Device& result);

/// Checks if the device has compute capability 9.0, and this library has kernels for it.
Status find_hopper(bool& result);

}  // namespace natten_jax::small
