// What the kernels of every backend take, for Python. Every build has all of it: tiles are chosen for absent GPUs, too.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "natten_jax/axis_fields.h"

namespace natten_jax {

/// By folder of kernels (cpu, sm80, small, sm90), limits by name; forms of kernels are lists of such dictionaries, in
/// the order of the tables that they come from.
pybind11::dict limits();

/// What the kernels for small windows launch for a pass with tiles, by a model: "seconds" and "launches", each with the
/// "kernel", the "line_dimension" of three, and of a batch entry and head the "regions", and each one's "columns" and
/// "tiles"; None where they do not take it.
///
/// Args:
///   axes: as the attribute of that name of every target.
///   sizes: batch, heads, heads_kv, head_dim, head_dim_v and additional_kv.
///   q_tile, kv_tile: shapes of tiles.
///   is_backward: which pass.
///   shared_memory: bytes that a CTA may have.
///   multiprocessors: of the device.
///   has_boxes: whether it has the engine that copies boxes.
///   has_ring: whether kernels may have rings, and ring_has_boxes: whether that engine loads theirs.
///   has_relative_bias, has_key_bias: whether the problem has one.
pybind11::object estimate_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                           const std::array<std::int64_t, 6>& sizes,
                                           const std::array<std::int64_t, kRank>& q_tile,
                                           const std::array<std::int64_t, kRank>& kv_tile, bool is_backward,
                                           int shared_memory, int multiprocessors, bool has_boxes, bool has_ring,
                                           bool ring_has_boxes, bool has_relative_bias, bool has_key_bias);

/// The launch for key and value gradients with a ring of queries, as one of estimate_of_small_windows; None where the
/// kernels take no such problem. Arguments as there.
pybind11::object gradient_ring_of_small_windows(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                                                const std::array<std::int64_t, 6>& sizes, int shared_memory,
                                                int multiprocessors, bool ring_has_boxes, bool has_relative_bias,
                                                bool has_key_bias);

/// How many times as long a pass takes on Hopper as if seams cost nothing, with the boxes that launches choose.
///
/// Args:
///   axes: as the attribute of that name of every target.
///   inner, outer: shapes of tiles that are walked over, and of those that walk.
double seam_factor(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                   const std::array<std::int64_t, kRank>& inner, const std::array<std::int64_t, kRank>& outer);

/// Entries of a line of a relative bias in the memory of the kernels for small windows.
///
/// Args:
///   axes: as the attribute of that name of every target.
///   tile, group: shapes of a tile of rows, and of a group of columns.
std::int64_t bias_line(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                       const std::array<std::int64_t, kRank>& tile, const std::array<std::int64_t, kRank>& group);

/// What the gradient of a relative bias takes of each batch entry and head: "tiles", of which each has a "record" of
/// numbers, and "parts" in which these are added up.
///
/// Args:
///   axes: as the attribute of that name of every target.
///   queries: extents of the arrays.
///   tile, group: shapes of a tile of queries, and of a group of keys.
pybind11::dict bias_sums(const std::array<std::int64_t, kFieldsOfAxis * kRank>& axes,
                         const std::array<std::int64_t, kRank>& queries, const std::array<std::int64_t, kRank>& tile,
                         const std::array<std::int64_t, kRank>& group);

}  // namespace natten_jax
