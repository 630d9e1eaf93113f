#include "ffi/decode.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "natten_jax/axis_fields.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::DataType;
using xffi::Error;

constexpr std::int64_t kAttributes = 4;  // axes, q_tile_shape, kv_tile_shape, scale

template <typename Part>
std::string text(const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return std::string(std::string_view(part));
  }
}

template <typename... Parts>
Error invalid(const Parts&... parts) {
  std::string message = "natten_jax: ";
  ((message += text(parts)), ...);
  return Error::InvalidArgument(std::move(message));
}

template <typename Values>
std::string list(const Values& values) {
  std::string result = "[";
  for (const std::int64_t value : values) {
    if (result.size() > 1) result += ", ";
    result += std::to_string(value);
  }
  return result + "]";
}

const char* type_name(DataType type) {
  switch (type) {
    case DataType::F32:
      return "float32";
    case DataType::F16:
      return "float16";
    case DataType::BF16:
      return "bfloat16";
    case DataType::F64:
      return "float64";
    case DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case DataType::F8E5M2:
      return "float8_e5m2";
    case DataType::S32:
      return "int32";
    case DataType::S64:
      return "int64";
    default:
      return "another type";
  }
}

/// By ElementType.
constexpr DataType kDataTypes[] = {DataType::F32, DataType::F16, DataType::BF16, DataType::F8E4M3FN};
static_assert(std::size(kDataTypes) == kElementTypes);

/// Returns "NAME is [X, Y, Z]", which describes a field of the axes in an error message.
std::string described(const char* name, const Axis (&axes)[kRank]) {
  std::int64_t values[kRank] = {};
  for (const AxisField& field : kAxisFields) {
    if (std::string_view(field.name) != name) continue;
    for (int i = 0; i < kRank; ++i) values[i] = field.get(axes[i]);
  }
  return std::string(name) + " is " + list(values);
}

Error decode_axes(const xffi::Dictionary& dictionary, Axis (&axes)[kRank]) {
  const auto span = dictionary.get<xffi::Span<const std::int64_t>>("axes");
  if (!span.has_value()) {
    return invalid("attribute axes must be an int64 array of ", kRank * kFieldsOfAxis, " values (",
                   span.error().message(), ")");
  }
  if (span->size() != kRank * kFieldsOfAxis) {
    return invalid("attribute axes has ", span->size(), " values, but must have ", kRank * kFieldsOfAxis, " values, ",
                   kFieldsOfAxis, " for each of ", kRank, " token dimensions");
  }
  for (std::size_t f = 0; f < kFieldsOfAxis; ++f) {
    const AxisField& field = kAxisFields[f];
    std::int64_t values[kRank];
    for (int i = 0; i < kRank; ++i) values[i] = (*span)[i * kFieldsOfAxis + f];
    for (int i = 0; i < kRank; ++i) {
      if (values[i] < field.smallest || values[i] > field.largest) {
        return invalid("attribute axes: ", field.name, " is ", list(values), ", but its values must lie between ",
                       field.smallest, " and ", field.largest);
      }
      field.set(axes[i], values[i]);
    }
  }
  return Error::Success();
}

/// Decodes an attribute of three numbers between 1 and kLargestExtent.
Error decode_extents(const xffi::Dictionary& dictionary, const char* name, std::int64_t (&values)[kRank]) {
  const auto span = dictionary.get<xffi::Span<const std::int64_t>>(name);
  if (!span.has_value()) {
    return invalid("attribute ", name, " must be an int64 array of ", kRank, " values (", span.error().message(), ")");
  }
  if (span->size() != kRank) {
    return invalid("attribute ", name, " is ", list(*span), ", but must have ", kRank,
                   " values, one per token dimension");
  }
  for (int i = 0; i < kRank; ++i) {
    values[i] = (*span)[i];
    if (values[i] < 1 || values[i] > kLargestExtent) {
      return invalid("attribute ", name, " is ", list(*span), ", but its values must lie between 1 and ",
                     kLargestExtent);
    }
  }
  return Error::Success();
}

Error decode_tile(const xffi::Dictionary& dictionary, const char* name, std::int64_t (&values)[kRank]) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, name, values));
  std::int64_t tokens = 1;
  for (const std::int64_t value : values) {
    // Both factors fit into 31 bits, so the product cannot overflow.
    tokens *= value;
    if (tokens > kMostTileTokens) {
      return invalid("attribute ", name, " is ", list(values), ", but a tile must have at most ", kMostTileTokens,
                     " tokens");
    }
  }
  return Error::Success();
}

/// Alignment in bytes that the kernels' copies require. XLA aligns the start of a buffer to a multiple of this number.
constexpr std::uintptr_t kAlignment = 16;

Error check_rank_and_extents(const char* name, const AnyBuffer& array, std::size_t rank, const char* axes) {
  const auto shape = array.dimensions();
  if (shape.size() != rank) {
    return invalid(name, " has shape ", list(shape), ", but must have ", rank, " dimensions ", axes);
  }
  for (const std::int64_t extent : shape) {
    if (extent < 1) return invalid(name, " has shape ", list(shape), ", but every extent must be at least 1");
    if (extent > kLargestExtent) {
      return invalid(name, " has shape ", list(shape), ", but no extent may exceed ", kLargestExtent);
    }
  }
  return Error::Success();
}

/// Maximum extent of a dimension that wraps. It is below kLargestExtent, because kernels also use indices beyond both
/// ends of such a dimension.
constexpr std::int64_t kLargestExtentAround = kLargestExtent / 4;

Error check_windows(const Axis (&axes)[kRank]) {
  const auto value = [&](const char* name) { return described(name, axes); };
  for (const Axis& axis : axes) {
    const Window& w = axis.window;
    if (w.stride > w.kernel_size) {
      return invalid("attribute axes: ", value("stride"), " and ", value("kernel_size"),
                     ", but stride <= kernel_size must hold in every dimension");
    }
    if (w.kernel_size > axis.kv.extent / w.dilation) {
      return invalid("attribute axes: ", value("kernel_size"), ", ", value("dilation"), " and ", value("kv_extent"),
                     ", but kernel_size * dilation <= kv_extent must hold in every dimension");
    }
    if (w.ends == Ends::kWrap && (axis.kv.extent % w.dilation != 0 || axis.kv.extent > kLargestExtentAround)) {
      return invalid("attribute axes: ", value("ends"), ", ", value("dilation"), " and ", value("kv_extent"),
                     ", but dilation must divide the extent of a dimension that wraps, which has at most ",
                     kLargestExtentAround, " tokens");
    }
    if (w.ends == Ends::kCut && axis.query.extent != axis.kv.extent) {
      return invalid("attribute axes: ", value("ends"), ", ", value("query_extent"), " and ", value("kv_extent"),
                     ", but extents may differ only where windows are shifted or causal");
    }
    if (axis.query.extent != axis.kv.extent && w.kernel_size != axis.kv.extent) {
      return invalid("attribute axes: ", value("query_extent"), ", ", value("kv_extent"), " and ", value("kernel_size"),
                     ", but extents may differ only where kernel_size equals kv_extent");
    }
  }
  return Error::Success();
}

/// Decodes the scale of the logits. If the array is empty, all heads have the scale `uniform_scale`. Otherwise the
/// array has the factors of each batch entry and head.
Error decode_scales(const AnyBuffer& scales, Problem& p, float uniform_scale) {
  const char* const rule = "it holds the factors of the logits and of the query gradient for each head, or nothing";
  p.scale = {uniform_scale, nullptr};
  if (scales.element_count() == 0) return check_array("scales", scales, DataType::F32, {0}, rule);
  p.scale.heads = static_cast<const HeadScale*>(scales.untyped_data());
  return check_array("scales", scales, DataType::F32, {p.batch, p.heads, 2}, rule);
}

/// Sets the local extents and origins of the axes from the operands.
Error locate_axes(const AnyBuffer& query, const AnyBuffer& key, const std::int32_t* origins, Axis (&axes)[kRank]) {
  for (int i = 0; i < kRank; ++i) {
    Tokens& queries = axes[i].query;
    queries.local_extent = query.dimensions()[i + 1];
    queries.origin = origins ? origins[i] : 0;
    axes[i].kv.local_extent = key.dimensions()[i + 1];
    axes[i].kv.origin = origins ? origins[kRank + i] : 0;
    // Key arrays may reach beyond the layout, as they do with halos: no query sees keys outside of the layout. Query
    // arrays may not, because every query must have a window.
    if (queries.origin < 0 || queries.origin + queries.local_extent > queries.extent) {
      return invalid("origins place the query tokens of dimension ", i, " at ", queries.origin, " to ",
                     queries.origin + queries.local_extent, ", but ", described("query_extent", axes),
                     " and they must lie inside it");
    }
  }
  return Error::Success();
}

/// Checks that the arrays hold all tokens of every dimension that wraps. The GPU kernels require this.
Error check_seams(const Problem& problem) {
  for (const Axis& axis : problem.axes) {
    if (axis.window.ends != Ends::kWrap) continue;
    if (axis.query.local_extent == axis.query.extent && axis.kv.local_extent == axis.kv.extent) continue;
    return invalid("attribute axes: ", described("ends", problem.axes), ", ", described("query_extent", problem.axes),
                   " and ", described("kv_extent", problem.axes),
                   ", but arrays must hold all tokens of a dimension that wraps");
  }
  return Error::Success();
}

/// Checks the origins operand, and sets `values` to its six numbers. An empty operand means zeros; `values` is then
/// null.
Error decode_origins(const AnyBuffer& origins, const std::int32_t*& values) {
  const bool is_empty = origins.element_count() == 0;
  NATTEN_JAX_RETURN_IF_ERROR(check_array("origins", origins, DataType::S32, {is_empty ? 0 : 2, kRank},
                                         "it holds the query origin and the key/value origin, or nothing"));
  values = is_empty ? nullptr : static_cast<const std::int32_t*>(origins.untyped_data());
  return Error::Success();
}

}  // namespace

DataType data_type(ElementType type) {
  return kDataTypes[static_cast<int>(type)];
}

Error check_alignment(const char* name, const AnyBuffer& array) {
  const std::uintptr_t excess = reinterpret_cast<std::uintptr_t>(array.untyped_data()) % kAlignment;
  if (excess == 0) return Error::Success();
  return invalid(name, " begins ", excess, " bytes past a multiple of ", kAlignment,
                 " bytes, but must begin at such a multiple");
}

Error decode_element_type(const char* name, const AnyBuffer& array, ElementType& type, Elements elements) {
  NATTEN_JAX_RETURN_IF_ERROR(check_alignment(name, array));
  std::string known;
  const int first = elements == Elements::kWide ? 0 : kWideElementTypes;
  const int end = elements == Elements::kWide ? kWideElementTypes : kElementTypes;
  for (int i = first; i < end; ++i) {
    if (array.element_type() == kDataTypes[i]) {
      type = static_cast<ElementType>(i);
      return Error::Success();
    }
    known += std::string(i > first ? ", " : "") + type_name(kDataTypes[i]);
  }
  return invalid(name, " has dtype ", type_name(array.element_type()), ", but must have ",
                 end > first + 1 ? "one of " : "", known);
}

Error check_array(const char* name, const AnyBuffer& array, DataType type, std::initializer_list<std::int64_t> shape,
                  const char* rule) {
  NATTEN_JAX_RETURN_IF_ERROR(check_alignment(name, array));
  if (array.element_type() != type) {
    return invalid(name, " has dtype ", type_name(array.element_type()), ", but must have ", type_name(type), ": ",
                   rule);
  }
  const auto actual = array.dimensions();
  bool is_equal = actual.size() == shape.size();
  std::size_t i = 0;
  for (const std::int64_t extent : shape) is_equal = is_equal && actual[i++] == extent;
  if (!is_equal) return invalid(name, " has shape ", list(actual), ", but must have ", list(shape), ": ", rule);
  return Error::Success();
}

Error decode_attributes(const xffi::Dictionary& dictionary, Attributes& a, std::int64_t further) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_axes(dictionary, a.axes));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tile(dictionary, "q_tile_shape", a.tiles.query));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tile(dictionary, "kv_tile_shape", a.tiles.kv));
  const auto scale = dictionary.get<float>("scale");
  if (!scale.has_value()) return invalid("attribute scale must be a float32 (", scale.error().message(), ")");
  if (!std::isfinite(*scale) || *scale <= 0.0f) {
    return invalid("attribute scale is ", *scale, ", but must be positive and finite");
  }
  a.scale = *scale;
  if (static_cast<std::int64_t>(dictionary.size()) != kAttributes + further) {
    return invalid("the call has ", dictionary.size(), " attributes, but must have ", kAttributes + further);
  }
  return check_windows(a.axes);
}

Error decode_choice(const xffi::Dictionary& dictionary, const char* name, std::int64_t largest, std::int64_t& value) {
  const auto number = dictionary.get<std::int64_t>(name);
  if (!number.has_value()) return invalid("attribute ", name, " must be an int64 (", number.error().message(), ")");
  value = *number;
  if (value >= 0 && value <= largest) return Error::Success();
  return invalid("attribute ", name, " is ", value, ", but must lie between 0 and ", largest);
}

Error decode_queries(const xffi::Dictionary& dictionary, const Problem& p, std::int64_t (&queries)[kRank]) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "queries", queries));
  for (int i = 0; i < kRank; ++i) {
    if (queries[i] <= p.axes[i].query.local_extent) continue;
    return invalid("attribute queries is ", list(queries), ", but dimension ", i, " of query has ",
                   p.axes[i].query.local_extent, " tokens");
  }
  return Error::Success();
}

Error decode_problem(const ProblemOperands& operands, const Attributes& a, const std::int32_t* origins, Call& call,
                     Elements elements) {
  const AnyBuffer& query = operands.query;
  const AnyBuffer& key = operands.key;
  const AnyBuffer& value = operands.value;
  Problem& p = call.problem;
  call.tiles = a.tiles;
  NATTEN_JAX_RETURN_IF_ERROR(decode_element_type("query", query, p.element_type, elements));
  p.out_type = p.element_type;
  NATTEN_JAX_RETURN_IF_ERROR(check_rank_and_extents("query", query, 6, "[batch, x, y, z, heads, head_dim]"));
  NATTEN_JAX_RETURN_IF_ERROR(check_rank_and_extents("key", key, 6, "[batch, x, y, z, heads_kv, head_dim]"));
  NATTEN_JAX_RETURN_IF_ERROR(check_rank_and_extents("value", value, 6, "[batch, x, y, z, heads_kv, head_dim_v]"));
  const auto q = query.dimensions();
  const auto k = key.dimensions();
  p.batch = q[0];
  p.heads = q[4];
  p.head_dim = q[5];
  p.heads_kv = k[4];
  p.head_dim_v = value.dimensions()[5];
  if (p.heads % p.heads_kv != 0) {
    return invalid("query has ", p.heads, " heads and key has ", p.heads_kv,
                   ", but the heads of query must be a multiple of those of key");
  }
  const DataType type = data_type(p.element_type);
  NATTEN_JAX_RETURN_IF_ERROR(check_array("key", key, type, {p.batch, k[1], k[2], k[3], k[4], p.head_dim},
                                         "dtype, batch and head_dim are those of query"));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("value", value, type, {p.batch, k[1], k[2], k[3], k[4], p.head_dim_v},
                                         "dtype, batch, tokens and heads are those of key"));
  const auto additional = operands.additional_keys.dimensions();
  if (additional.size() != 4 || additional[1] > kLargestExtent) {
    return invalid("additional_keys has shape ", list(additional),
                   ", but must have 4 dimensions [batch, n, heads_kv, head_dim] with n at most ", kLargestExtent);
  }
  p.additional_kv = additional[1];
  p.has_relative_bias = false;
  p.has_key_bias = false;
  NATTEN_JAX_RETURN_IF_ERROR(check_array("additional_keys", operands.additional_keys, type,
                                         {p.batch, p.additional_kv, p.heads_kv, p.head_dim},
                                         "dtype, batch, heads and head_dim are those of key"));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("additional_values", operands.additional_values, type,
                                         {p.batch, p.additional_kv, p.heads_kv, p.head_dim_v},
                                         "it has as many tokens as additional_keys and otherwise looks like value"));
  NATTEN_JAX_RETURN_IF_ERROR(decode_scales(operands.scales, p, a.scale));
  std::copy_n(a.axes, kRank, p.axes);
  call.arrays.query = query.untyped_data();
  call.arrays.key = key.untyped_data();
  call.arrays.value = value.untyped_data();
  call.arrays.additional_keys = operands.additional_keys.untyped_data();
  call.arrays.additional_values = operands.additional_values.untyped_data();
  return locate_axes(query, key, origins, p.axes);
}

Error decode_layouts(const AnyBuffer& layouts, Memory memory, Call& call) {
  const Problem& p = call.problem;
  const bool is_empty = layouts.element_count() == 0;
  NATTEN_JAX_RETURN_IF_ERROR(
      check_array("layouts", layouts, DataType::S32, {is_empty ? 0 : p.batch, kRank, kRank},
                  "it holds the query origin and the extents of queries and of keys for each batch entry, or nothing"));
  if (is_empty) return Error::Success();
  if (call.arrays.origins != nullptr) return invalid("origins and layouts were both given, but one must be empty");
  const auto* values = static_cast<const std::int32_t*>(layouts.untyped_data());
  call.arrays.layouts = values;
  if (memory == Memory::kDevice) return Error::Success();
  for (std::int64_t entry = 0; entry < p.batch; ++entry) {
    for (int i = 0; i < kRank; ++i) {
      const Axis& axis = p.axes[i];
      const std::int64_t origin = values[entry * kRank * kRank + i];
      const std::int64_t queries = values[(entry * kRank + 1) * kRank + i];
      const std::int64_t keys = values[(entry * kRank + 2) * kRank + i];
      const std::int64_t end = origin + axis.query.local_extent;
      if (origin < 0 || end > axis.query.extent) {
        return invalid("layouts place the query tokens of entry ", entry, " and dimension ", i, " at ", origin, " to ",
                       end, ", but ", described("query_extent", p.axes), " and they must lie inside it");
      }
      if (queries < 0 || queries > axis.query.extent || keys < 0 || keys > axis.kv.extent) {
        return invalid("layouts have ", queries, " queries and ", keys, " keys in entry ", entry, " and dimension ", i,
                       ", but ", described("query_extent", p.axes), " and ", described("kv_extent", p.axes),
                       ", which they must not exceed, and none may be negative");
      }
      if (p.additional_kv > 0 && end > queries) {
        return invalid("layouts have ", queries, " queries in entry ", entry, " and dimension ", i,
                       ", fewer than the array, but with additional keys all queries must be real");
      }
    }
  }
  return Error::Success();
}

Error decode_call(const ProblemOperands& operands, const xffi::Dictionary& dictionary, std::int64_t further,
                  Memory memory, Call& call, Elements elements) {
  Attributes attributes;
  call.arrays = {};
  NATTEN_JAX_RETURN_IF_ERROR(decode_attributes(dictionary, attributes, further));
  NATTEN_JAX_RETURN_IF_ERROR(decode_origins(operands.origins, call.arrays.origins));
  constexpr std::int32_t kNoOrigins[2 * kRank] = {};
  const std::int32_t* readable = memory == Memory::kHost ? call.arrays.origins : nullptr;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_problem(operands, attributes, call.arrays.origins == nullptr ? kNoOrigins : readable, call, elements));
  return memory == Memory::kHost ? Error::Success() : check_seams(call.problem);
}

}  // namespace natten_jax::ffi
