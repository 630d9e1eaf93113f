// Table of the numbers that describe a token dimension. Calls pass these numbers in the attribute `axes`, and caches
// use them in their keys.
//
// If a field is added to Axis, Tokens or Window, this header does not compile until the field is in the table, or is
// explicitly excluded in `tabulated_fields`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "natten_jax/problem.h"

namespace natten_jax {

/// A number that a call passes for each token dimension.
struct AxisField {
  const char* name;
  std::int64_t smallest, largest;
  std::int64_t (*get)(const Axis&);
  void (*set)(Axis&, std::int64_t);
};

inline constexpr std::int64_t kLargestExtent = std::numeric_limits<std::int32_t>::max();

/// The fields, in their order in a row of the attribute `axes`.
inline constexpr AxisField kAxisFields[] = {
    {"query_extent", 1, kLargestExtent, [](const Axis& a) { return a.query.extent; },
     [](Axis& a, std::int64_t value) { a.query.extent = value; }},
    {"kv_extent", 1, kLargestExtent, [](const Axis& a) { return a.kv.extent; },
     [](Axis& a, std::int64_t value) { a.kv.extent = value; }},
    {"kernel_size", 1, kLargestExtent, [](const Axis& a) { return a.window.kernel_size; },
     [](Axis& a, std::int64_t value) { a.window.kernel_size = value; }},
    {"stride", 1, kLargestExtent, [](const Axis& a) { return a.window.stride; },
     [](Axis& a, std::int64_t value) { a.window.stride = value; }},
    {"dilation", 1, kLargestExtent, [](const Axis& a) { return a.window.dilation; },
     [](Axis& a, std::int64_t value) { a.window.dilation = value; }},
    {"ends", static_cast<std::int64_t>(Ends::kShift), static_cast<std::int64_t>(Ends::kWrap),
     [](const Axis& a) { return static_cast<std::int64_t>(a.window.ends); },
     [](Axis& a, std::int64_t value) { a.window.ends = static_cast<Ends>(value); }},
};

inline constexpr std::size_t kFieldsOfAxis = std::size(kAxisFields);

/// Number of fields of an axis that the table must have: both extents and all fields of the window. The other fields of
/// an axis locate its local tokens, and follow from the operands.
constexpr std::size_t tabulated_fields(const Axis& axis) {
  const auto& [query, kv, window] = axis;
  const auto& [extent, local_extent, origin] = query;
  const auto& [kernel_size, stride, dilation, ends] = window;
  const std::int64_t window_fields[] = {kernel_size, stride, dilation, static_cast<std::int64_t>(ends)},
                     side_fields[] = {extent, kv.extent};
  static_cast<void>(local_extent);
  static_cast<void>(origin);
  return std::size(window_fields) + std::size(side_fields);
}
static_assert(kFieldsOfAxis == tabulated_fields(Axis{}), "a field of Window is missing from the table");

}  // namespace natten_jax
