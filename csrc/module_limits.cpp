#include "module_limits.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "cuda/common/seam_boxes.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm90/forms.h"
#include "cuda/small/bias_table.h"
#include "cuda/small/region.h"
#include "cuda/small/ring_shape.h"
#include "natten_jax/offset_table.h"
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

/// By small::Kernel.
constexpr const char* kSmallKernels[] = {"forward", "query gradient", "key/value gradient", "whole gradient"};

small::RingLoads loads_of(bool ring_has_boxes) {
  return ring_has_boxes ? small::RingLoads::kBoxes : small::RingLoads::kChunks;
}

py::dict described(const small::RingShape& ring, const char* kernel) {
  const std::int64_t strips = std::int64_t{ring.strips[0]} * ring.strips[1];
  return py::dict("kernel"_a = kernel, "line_dimension"_a = -1, "regions"_a = strips, "columns"_a = ring.keys / strips,
                  "tiles"_a = ring.adjacent[0] * ring.adjacent[1] * ring.steps, "pairs"_a = ring.pairs,
                  "seconds"_a = ring.nanoseconds / 1e9);
}

}  // namespace

py::dict limits() {
  const std::vector<int> wide(std::begin(sm80::kWideFormCapabilities), std::end(sm80::kWideFormCapabilities));
  std::vector<int> additional_queries_at_once;
  for (const int head_dim : small::kHeadDims) {
    additional_queries_at_once.push_back(small::additional_pairs_at_once(head_dim) * 2 * small::kColumns);
  }
  return py::dict(
      "cpu"_a = py::dict("tile_tokens"_a = kMostTileTokens, "table_entries"_a = kMostTableEntries),
      "sm80"_a = py::dict("head_dim_step"_a = sm80::kHeadDimStep, "largest_head_dim"_a = sm80::kLargestHeadDim,
                          "forward"_a = described(sm80::kForwardForms), "backward"_a = described(sm80::kBackwardForms),
                          "least_shared_memory"_a = sm80::kLeastSharedMemory, "wide_form_capabilities"_a = wide),
      "small"_a = py::dict("row_tokens"_a = small::kRows, "column_tokens"_a = small::kColumns,
                           "head_dims"_a = std::vector<int>(std::begin(small::kHeadDims), std::end(small::kHeadDims)),
                           "largest_biased_head_dim"_a = small::kLargestBiasedHeadDim,
                           "additional_queries_at_once"_a = additional_queries_at_once),
      "sm90"_a =
          py::dict("head_dim_step"_a = sm90::kHeadDimStep, "largest_head_dim"_a = sm90::kLargestHeadDim,
                   "float8_head_dim_step"_a = sm90::kFloat8HeadDimStep,
                   "float8_forward"_a = described(sm90::kFloat8ForwardForms),
                   "forward"_a = described(sm90::kForwardForms), "backward"_a = described(sm90::kBackwardForms),
                   "largest_continued_head_dim"_a = sm90::kLargestContinuedHeadDim,
                   "shared_memory"_a = sm90::kSharedMemory, "tiles_worth_counting"_a = sm90::kTilesWorthCounting));
}

namespace {

/// Sets a problem's axes from the numbers of the attribute `axes`. The arrays hold the whole layout.
void read_axes(const std::array<std::int64_t, kFieldsOfAxis * kRank>& numbers, Axis (&axes)[kRank]) {
  for (int i = 0; i < kRank; ++i) {
    for (std::size_t f = 0; f < kFieldsOfAxis; ++f) kAxisFields[f].set(axes[i], numbers[kFieldsOfAxis * i + f]);
    axes[i].query.local_extent = axes[i].query.extent;
    axes[i].kv.local_extent = axes[i].kv.extent;
  }
}

/// Makes a problem with the properties on which launches for small windows depend.
Problem small_problem(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                      const std::array<std::int64_t, 6>& sizes, bool has_relative_bias, bool has_key_bias) {
  Problem problem{ElementType::kBFloat16, sizes[0],     sizes[1],       sizes[2], sizes[3], sizes[4], sizes[5],
                  has_relative_bias,      has_key_bias, {1.f, nullptr}, {}};
  read_axes(axes, problem.axes);
  return problem;
}

small::Device small_device(int shared_memory, int multiprocessors, bool has_boxes) {
  // An SM has 1 KiB more shared memory than a CTA may use, and reserves 1 KiB for each CTA.
  constexpr int kReserved = 1024;
  return {shared_memory, shared_memory + kReserved, kReserved, multiprocessors, has_boxes};
}

/// The axes of a problem and the shapes of its tiles, for the functions on tables of relative biases.
struct TiledAxes {
  Axis axes[kRank]{};
  std::int64_t tile[kRank], group[kRank];

  TiledAxes(const std::array<std::int64_t, kFieldsOfAxis * kRank>& numbers,
            const std::array<std::int64_t, kRank>& tile_shape, const std::array<std::int64_t, kRank>& group_shape) {
    read_axes(numbers, axes);
    std::copy(tile_shape.begin(), tile_shape.end(), tile);
    std::copy(group_shape.begin(), group_shape.end(), group);
  }
};

}  // namespace

double seam_factor(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                   const std::array<std::int64_t, kRank>& inner, const std::array<std::int64_t, kRank>& outer) {
  Problem problem{};
  read_axes(axes, problem.axes);
  std::int64_t walked[kRank], walking[kRank];
  std::copy(inner.begin(), inner.end(), walked);
  std::copy(outer.begin(), outer.end(), walking);
  return choose_seam_boxes(problem, walked, walking).times;
}

std::int64_t bias_line(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                       const std::array<std::int64_t, kRank>& tile, const std::array<std::int64_t, kRank>& group) {
  const TiledAxes tiled(axes, tile, group);
  return small::BiasTable(tiled.axes, tiled.tile, tiled.group).pitch[1];
}

py::dict bias_sums(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                   const std::array<std::int64_t, kRank>& queries, const std::array<std::int64_t, kRank>& tile,
                   const std::array<std::int64_t, kRank>& group) {
  TiledAxes tiled(axes, tile, group);
  for (int i = 0; i < kRank; ++i) tiled.axes[i].query.local_extent = queries[i];
  const small::BiasSums sums = small::bias_sums(tiled.axes, tiled.tile, tiled.group);
  return py::dict("tiles"_a = sums.tiles, "record"_a = sums.record, "parts"_a = sums.parts);
}

py::object estimate_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                     const std::array<std::int64_t, 6>& sizes,
                                     const std::array<std::int64_t, kRank>& q_tile,
                                     const std::array<std::int64_t, kRank>& kv_tile, bool is_backward,
                                     int shared_memory, int multiprocessors, bool has_boxes, bool has_ring,
                                     bool ring_has_boxes, bool has_relative_bias, bool has_key_bias) {
  const Problem problem = small_problem(axes, sizes, has_relative_bias, has_key_bias);
  TileShapes tiles{};
  std::copy(q_tile.begin(), q_tile.end(), tiles.query);
  std::copy(kv_tile.begin(), kv_tile.end(), tiles.kv);
  const small::Device device = small_device(shared_memory, multiprocessors, has_boxes);
  small::PassEstimate estimate{};
  if (small::estimate_pass(problem, tiles, is_backward, device, estimate).failed()) return py::none();
  py::list launches;
  for (const auto& [kernel, region] : estimate.launches) {
    small::RingShape ring{};
    const bool owns_queries = kernel == small::Kernel::kForward || kernel == small::Kernel::kQueryGradient;
    double nanoseconds = region.nanoseconds;
    if (has_ring) {
      constexpr auto kCoverage = small::Coverage::kComplete;
      const auto& rows = is_backward ? tiles.kv : tiles.query;
      const auto& columns = is_backward ? tiles.query : tiles.kv;
      if (owns_queries) {
        ring = small::choose_faster_ring(region, problem, rows, columns, kernel, kCoverage, loads_of(ring_has_boxes),
                                         device);
      }
      nanoseconds = small::nanoseconds_against_rings(region, problem, kernel, kCoverage);
    }
    if (ring.warps > 0) nanoseconds = ring.nanoseconds;
    estimate.seconds += (nanoseconds - region.nanoseconds) / 1e9;
    if (ring.warps > 0) {
      launches.append(described(ring, is_backward ? "query gradient with a ring" : "forward with a ring"));
      continue;
    }
    launches.append(py::dict("kernel"_a = kSmallKernels[static_cast<int>(kernel)],
                             "line_dimension"_a = region.dimension[1], "regions"_a = region.count,
                             "columns"_a = region.box, "tiles"_a = region.warps, "pairs"_a = 0,
                             "seconds"_a = nanoseconds / 1e9));
  }
  return py::dict("seconds"_a = estimate.seconds, "launches"_a = launches);
}

py::object gradient_ring_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                          const std::array<std::int64_t, 6>& sizes, int shared_memory,
                                          int multiprocessors, bool ring_has_boxes, bool has_relative_bias,
                                          bool has_key_bias) {
  const small::RingShape ring = small::choose_gradient_ring(small_problem(axes, sizes, has_relative_bias, has_key_bias),
                                                            small::Coverage::kComplete, loads_of(ring_has_boxes),
                                                            small_device(shared_memory, multiprocessors, false));
  if (ring.warps == 0) return py::none();
  return described(ring, "key/value gradient with a ring");
}

}  // namespace natten_jax
