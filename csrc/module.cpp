// The Python module natten_jax._native: contents of the native library, and the window arithmetic for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>

#include "cuda/small/forms.h"
#include "library.h"
#include "module_limits.h"
#include "natten_jax/windows.h"

namespace py = pybind11;

namespace {

py::dict registrations() {
  py::dict targets;
  for (const natten_jax::Target& target : natten_jax::targets()) {
    targets[target.name] = py::make_tuple(target.platform, py::capsule(target.handler));
  }
  return targets;
}

py::dict build_info() {
  const natten_jax::BuildInfo info = natten_jax::build_info();
  py::dict dict;
  dict["ffi_api_version"] = py::make_tuple(info.ffi_api_major, info.ffi_api_minor);
  dict["sources"] = info.sources;
  dict["compiler"] = info.compiler;
  dict["host_isa"] = info.host_isa;
  dict["host_isas"] = info.host_isas;
  dict["cuda_version"] = info.cuda_version.empty() ? py::object(py::none()) : py::object(py::str(info.cuda_version));
  dict["cuda_architectures"] = info.cuda_architectures;
  return dict;
}

std::pair<std::int64_t, std::int64_t> pair(natten_jax::Range<std::int64_t> range) {
  return {range.begin, range.end};
}

}  // namespace

// The module does not need the GIL. Its functions share no state: they build their results from arguments and
// constants. Kernel launches share caches. They run on threads of XLA, so mutexes protect these caches.
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.doc() = "Native part of natten_jax.";
  module.def("registrations", &registrations, "XLA FFI targets: name -> (platform, handler capsule).");
  module.def("build_info", &build_info, "Build information, and the instruction set of the host kernels.");
  module.def("limits", &natten_jax::limits,
             "Limits of the kernels of all backends, also of backends that are not built.");
  module.def("estimate_of_small_windows", &natten_jax::estimate_of_small_windows, py::arg("axes"), py::arg("sizes"),
             py::arg("q_tile"), py::arg("kv_tile"), py::arg("is_backward"), py::arg("shared_memory"),
             py::arg("multiprocessors"), py::arg("has_boxes"), py::arg("has_ring"), py::arg("ring_has_boxes"),
             py::arg("has_relative_bias"), py::arg("has_key_bias"),
             "Predicted launches and time of a pass of the kernels for small windows; see natten_jax.native.");
  module.def("gradient_ring_of_small_windows", &natten_jax::gradient_ring_of_small_windows, py::arg("axes"),
             py::arg("sizes"), py::arg("shared_memory"), py::arg("multiprocessors"), py::arg("ring_has_boxes"),
             py::arg("has_relative_bias"), py::arg("has_key_bias"),
             "Predicted launch of a ring kernel for key and value gradients; see natten_jax.native.");
  module.def("seam_factor", &natten_jax::seam_factor, py::arg("axes"), py::arg("inner"), py::arg("outer"),
             "Time of a pass relative to a pass without dimensions that wrap; see natten_jax.native.");
  module.def("bias_line", &natten_jax::bias_line, py::arg("axes"), py::arg("tile"), py::arg("group"),
             "Number of entries per line of a relative bias in memory; see natten_jax.native.");
  module.def("bias_sums", &natten_jax::bias_sums, py::arg("axes"), py::arg("queries"), py::arg("tile"),
             py::arg("group"), "Sizes of scratch arrays for the gradient of a relative bias; see natten_jax.native.");
  module.def("additional_parts", &natten_jax::small::additional_parts, py::arg("columns"), py::arg("additional_kv"),
             "Number of partial sums of the gradients of additional tokens; see natten_jax.native.");
  module.def(
      "window_bounds",
      [](std::int64_t index, std::int64_t length, std::int64_t kernel_size, std::int64_t stride, int ends) {
        const natten_jax::Window window{kernel_size, stride, 1, static_cast<natten_jax::Ends>(ends)};
        return pair(natten_jax::window_bounds(window, index, length));
      },
      py::arg("index"), py::arg("length"), py::arg("kernel_size"), py::arg("stride"), py::arg("ends"),
      "Half-open range of key indices that a query sees; see natten_jax.windows.");
  module.def(
      "inverse_window_bounds",
      [](std::int64_t index, std::int64_t query_length, std::int64_t key_length, std::int64_t kernel_size,
         std::int64_t stride, int ends) {
        const natten_jax::Window window{kernel_size, stride, 1, static_cast<natten_jax::Ends>(ends)};
        return pair(natten_jax::inverse_window_bounds(window, index, query_length, key_length));
      },
      py::arg("index"), py::arg("query_length"), py::arg("key_length"), py::arg("kernel_size"), py::arg("stride"),
      py::arg("ends"), "Half-open range of query indices that see a key; see natten_jax.windows.");
  module.def(
      "group_length",
      [](std::int64_t extent, std::int64_t dilation, std::int64_t group) {
        return natten_jax::group_length(natten_jax::Window{1, 1, dilation, natten_jax::Ends::kShift}, extent, group);
      },
      py::arg("extent"), py::arg("dilation"), py::arg("group"),
      "Number of tokens in a dilation group; see natten_jax.windows.");
#if defined(NATTEN_JAX_CUDA)
  module.def(
      "cuda_devices",
      [] {
        py::list devices;
        for (const natten_jax::CudaDevice& device : natten_jax::cuda_devices()) {
          py::dict dict;
          dict["name"] = device.name;
          dict["compute_capability"] = py::make_tuple(device.compute_major, device.compute_minor);
          dict["multiprocessors"] = device.multiprocessors;
          dict["shared_memory_per_block"] = device.shared_memory_per_block;
          dict["global_memory"] = device.global_memory;
          devices.append(std::move(dict));
        }
        return devices;
      },
      "CUDA devices of this machine; empty without a driver.");
#endif
}
