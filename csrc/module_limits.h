// What the kernels of every backend take, for Python. Every build has all of it: tiles are chosen for absent GPUs, too.
#pragma once

#include <pybind11/pybind11.h>

namespace natten_jax {

/// By folder of kernels (cpu, sm80, sm90), limits by name; forms of kernels are lists of such dictionaries, in the
/// order of the tables that they come from.
pybind11::dict limits();

}  // namespace natten_jax
