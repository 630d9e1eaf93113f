// The CUDA devices of this machine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace natten_jax {

struct CudaDevice {
  std::string name;
  int compute_major;
  int compute_minor;
  int multiprocessors;
  int shared_memory_per_block;  ///< Maximum per block, with opt-in (larger than the default maximum), in bytes.
  std::size_t global_memory;    ///< Bytes.
};

/// Lists the devices. The list is empty if there are none, or if the driver is missing.
std::vector<CudaDevice> list_cuda_devices();

}  // namespace natten_jax
