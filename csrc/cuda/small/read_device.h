// What launches ask of the device at hand.
#pragma once

#include "cuda/small/region.h"
#include "natten_jax/arrays.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// What a call's regions are chosen for. Maps of batch entries are made by code for Hopper: where they have layouts of
/// their own, other devices have no boxes, and threads leave the padding out.
Status read_device(const Arrays& arrays, Device& result);

/// Whether the device has compute capability 9.0, and this library kernels for it.
Status find_hopper(bool& result);

}  // namespace natten_jax::small
