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
  int shared_memory_per_block;  ///< Bytes that a block may opt in to.
  std::size_t global_memory;    ///< Bytes.
};

/// Lists the devices. Empty without a driver or device.
std::vector<CudaDevice> list_cuda_devices();

}  // namespace natten_jax
