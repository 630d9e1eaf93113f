// Limits and estimates of the kernels of every backend, for Python. Every build has all of them, because tiles are also
// chosen for absent GPUs.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "natten_jax/axis_fields.h"

namespace natten_jax {

/// Returns limits by folder of kernels (cpu, sm80, small, sm90) and name. The forms of a kernel are a list of
/// dictionaries of limits, in the order of the table of forms.
pybind11::dict limits();

/// Returns the launches of the kernels for small windows in a pass with given tiles, and their estimated time, as
/// "launches" and "seconds". A launch has the "kernel"; the "line_dimension", 0 to 2, or -1 for a ring; the number of
/// "regions" per batch entry and head; the "columns" and "tiles" of a region; the number of "pairs" of queries and keys
/// that are multiplied, or 0 if it follows from the regions; and its "seconds". None if the kernels do not support the
/// problem.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   sizes: batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
///   q_tile, kv_tile: shapes of tiles.
///   is_backward: true for the backward pass.
///   shared_memory: maximum bytes of shared memory per CTA.
///   multiprocessors: number of SMs of the device.
///   has_boxes: true if the device has TMA, which copies boxes.
///   has_ring: true if kernels may have rings.
///   ring_has_boxes: true if TMA loads the boxes of rings.
///   has_relative_bias, has_key_bias: true if the problem has this bias.
pybind11::object estimate_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                           const std::array<std::int64_t, 6>& sizes,
                                           const std::array<std::int64_t, kRank>& q_tile,
                                           const std::array<std::int64_t, kRank>& kv_tile, bool is_backward,
                                           int shared_memory, int multiprocessors, bool has_boxes, bool has_ring,
                                           bool ring_has_boxes, bool has_relative_bias, bool has_key_bias);

/// Returns the launch for key and value gradients with a ring of queries, in the format of a launch of
/// estimate_of_small_windows, which documents the arguments. None if the kernels do not support the problem.
pybind11::object gradient_ring_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                                const std::array<std::int64_t, 6>& sizes, int shared_memory,
                                                int multiprocessors, bool ring_has_boxes, bool has_relative_bias,
                                                bool has_key_bias);

/// Returns the time of a pass on Hopper relative to a pass in which seams cost nothing, with the boxes that launches
/// choose.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   inner, outer: shapes of the inner and the outer tiles.
double seam_factor(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                   const std::array<std::int64_t, kRank>& inner, const std::array<std::int64_t, kRank>& outer);

/// Returns the number of entries of a line of a relative bias in the memory layout of the kernels for small windows.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   tile, group: shapes of a tile of rows, and of a group of columns.
std::int64_t bias_line(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                       const std::array<std::int64_t, kRank>& tile, const std::array<std::int64_t, kRank>& group);

/// Returns scratch sizes for the gradient of a relative bias, per batch entry and head: the number of "tiles", the
/// amount of numbers in the "record" of a tile, and the number of "parts" in which records are added up.
///
/// Args:
///   axes: the attribute `axes` of every target.
///   queries: extents of the arrays.
///   tile, group: shapes of a tile of queries, and of a group of keys.
pybind11::dict bias_sums(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                         const std::array<std::int64_t, kRank>& queries, const std::array<std::int64_t, kRank>& tile,
                         const std::array<std::int64_t, kRank>& group);

}  // namespace natten_jax
