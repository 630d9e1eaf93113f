#include "module_limits.h"

#include <pybind11/stl.h>

#include <iterator>
#include <vector>

#include "cuda/sm80/forms.h"
#include "cuda/sm90/forms.h"
#include "natten_jax/problem.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace natten_jax {
namespace {

py::dict described(const sm80::ForwardForm& form) {
  return py::dict("head_dim"_a = form.head_dim, "element_bytes"_a = form.element_bytes,
                  "q_tile_tokens"_a = form.queries, "kv_tile_tokens"_a = form.keys,
                  "shared_memory"_a = form.shared_memory);
}

py::dict described(const sm80::BackwardForm& form) {
  return py::dict("head_dim"_a = form.head_dim, "element_bytes"_a = form.element_bytes,
                  "q_tile_tokens"_a = sm80::kLargestTile, "kv_tile_tokens"_a = sm80::kLargestTile,
                  "keys_at_once"_a = form.keys, "shared_memory"_a = form.shared_memory);
}

py::dict described(const sm90::Form& form) {
  return py::dict("head_dim"_a = form.head_dim, "q_tile_tokens"_a = form.queries, "kv_tile_tokens"_a = form.keys);
}

template <class Form, std::size_t kForms>
py::list described(const Form (&forms)[kForms]) {
  py::list result;
  for (const Form& form : forms) result.append(described(form));
  return result;
}

}  // namespace

py::dict limits() {
  const std::vector<int> wide(std::begin(sm80::kWideFormCapabilities), std::end(sm80::kWideFormCapabilities));
  return py::dict(
      "cpu"_a = py::dict("tile_tokens"_a = kMostTileTokens),
      "sm80"_a = py::dict("head_dim_step"_a = sm80::kHeadDimStep, "largest_head_dim"_a = sm80::kLargestHeadDim,
                          "forward"_a = described(sm80::kForwardForms), "backward"_a = described(sm80::kBackwardForms),
                          "least_shared_memory"_a = sm80::kLeastSharedMemory, "wide_form_capabilities"_a = wide),
      "sm90"_a =
          py::dict("head_dim_step"_a = sm90::kHeadDimStep, "largest_head_dim"_a = sm90::kLargestHeadDim,
                   "forward"_a = described(sm90::kForwardForms), "backward"_a = described(sm90::kBackwardForms),
                   "shared_memory"_a = sm90::kSharedMemory, "tiles_worth_counting"_a = sm90::kTilesWorthCounting));
}

}  // namespace natten_jax
