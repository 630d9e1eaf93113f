// Limits and estimates of the kernels of every backend, for Python. Every build includes all of them, because Python
// also chooses tiles for GPUs that are not present.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "natten_jax/axis_fields.h"

namespace natten_jax {

/// Returns a dictionary with one entry per folder of kernels (cpu, sm80, small, sm90): a dictionary of limits by name.
/// For a kernel with several forms, its value is a list with one dictionary of limits per form, in the order of the
/// table of forms.
pybind11::dict limits();

/// Estimates a pass of the kernels for small windows with given tiles. Returns None if the kernels do not support the
/// problem. Otherwise returns a dictionary with two items. "seconds" is the estimated time of the pass. "launches" is a
/// list of dictionaries, one per launch, with these items:
///
/// - "kernel": name of the kernel.
/// - "line_dimension": dimension in which a warp's groups of columns are adjacent, 0 to 2; -1 for a ring.
/// - "regions": number of regions per batch entry and head.
/// - "columns", "tiles": numbers of columns and tiles of a region.
/// - "pairs": number of query-key pairs that a ring kernel multiplies; 0 for other kernels.
/// - "seconds": estimated time of the launch.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   sizes: batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
///   q_tile, kv_tile: shapes of tiles.
///   is_backward: true for the backward pass.
///   shared_memory: maximum bytes of shared memory per CTA.
///   multiprocessors: number of SMs of the device.
///   has_boxes: true if the device has TMA, which copies boxes.
///   has_ring: true if ring kernels may be launched.
///   ring_has_boxes: true if TMA loads the boxes of rings.
///   has_relative_bias, has_key_bias: true if the problem has this bias.
pybind11::object estimate_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                           const std::array<std::int64_t, 6>& sizes,
                                           const std::array<std::int64_t, kRank>& q_tile,
                                           const std::array<std::int64_t, kRank>& kv_tile, bool is_backward,
                                           int shared_memory, int multiprocessors, bool has_boxes, bool has_ring,
                                           bool ring_has_boxes, bool has_relative_bias, bool has_key_bias);

/// Returns the launch of the ring kernel for key and value gradients, or None if the kernel does not support the
/// problem. See estimate_of_small_windows for the arguments, and for the items of the returned dictionary.
pybind11::object gradient_ring_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                                const std::array<std::int64_t, 6>& sizes, int shared_memory,
                                                int multiprocessors, bool ring_has_boxes, bool has_relative_bias,
                                                bool has_key_bias);

/// Returns the estimated time of a pass on Hopper, relative to its time if seams had no cost. A seam is an edge at
/// which a dimension wraps. The estimate is for the boxes that launches choose.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   inner, outer: shapes of the inner and the outer tiles.
double seam_factor(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                   const std::array<std::int64_t, kRank>& inner, const std::array<std::int64_t, kRank>& outer);

/// Returns the length of a line in the relative bias tables of the kernels for small windows. A line has the entries
/// along the last dimension. Its length is a number of entries and includes padding.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   tile, group: shapes of a tile of rows, and of a group of columns.
std::int64_t bias_line(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                       const std::array<std::int64_t, kRank>& tile, const std::array<std::int64_t, kRank>& group);

/// Returns sizes of scratch memory for the gradient of a relative bias, per batch entry and head, as a dictionary:
///
/// - "tiles": number of query tiles. Each tile has a record.
/// - "record": number of float32 values in a record.
/// - "parts": number of parts into which the tiles are divided. One CTA adds up the records of a part.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   queries: extents of the arrays.
///   tile, group: shapes of a tile of queries, and of a group of keys.
pybind11::dict bias_sums(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                         const std::array<std::int64_t, kRank>& queries, const std::array<std::int64_t, kRank>& tile,
                         const std::array<std::int64_t, kRank>& group);

}  // namespace natten_jax
