#include "ffi/decode.h"

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::DataType;
using xffi::Error;

constexpr std::int64_t kLargestExtent = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kAttributes = 9;
constexpr std::int64_t kLargestTile = 4096;

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
    case DataType::S32:
      return "int32";
    case DataType::S64:
      return "int64";
    default:
      return "another type";
  }
}

Error decode_integers(const xffi::Dictionary& dictionary, const char* name, std::int64_t (&values)[kRank]) {
  const auto span = dictionary.get<xffi::Span<const std::int64_t>>(name);
  if (!span.has_value()) {
    return invalid("attribute ", name, " must be an int64 array of ", kRank, " values (", span.error().message(), ")");
  }
  if (span->size() != kRank) {
    return invalid("attribute ", name, " is ", list(*span), ", but must have ", kRank,
                   " values, one per token dimension");
  }
  for (int i = 0; i < kRank; ++i) values[i] = (*span)[i];
  return Error::Success();
}

Error decode_extents(const xffi::Dictionary& dictionary, const char* name, std::int64_t (&values)[kRank]) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_integers(dictionary, name, values));
  for (const std::int64_t value : values) {
    if (value < 1 || value > kLargestExtent) {
      return invalid("attribute ", name, " is ", list(values), ", but its values must lie between 1 and ",
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
    if (tokens > kLargestTile) {
      return invalid("attribute ", name, " is ", list(values), ", but a tile must have at most ", kLargestTile,
                     " tokens");
    }
  }
  return Error::Success();
}

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

Error check_windows(const Attributes& a) {
  for (int i = 0; i < kRank; ++i) {
    if (a.stride[i] > a.kernel_size[i]) {
      return invalid("attribute stride is ", list(a.stride), " and kernel_size is ", list(a.kernel_size),
                     ", but stride <= kernel_size must hold in every dimension");
    }
    if (a.kernel_size[i] > a.kv_layout[i] / a.dilation[i]) {
      return invalid("attribute kernel_size is ", list(a.kernel_size), " with dilation ", list(a.dilation),
                     " and kv_layout ", list(a.kv_layout),
                     ", but kernel_size * dilation <= kv_layout must hold in every dimension");
    }
    if (a.query_layout[i] != a.kv_layout[i] && a.kernel_size[i] != a.kv_layout[i]) {
      return invalid("attribute query_layout is ", list(a.query_layout), " and kv_layout is ", list(a.kv_layout),
                     ", but they may differ only where kernel_size (", list(a.kernel_size), ") equals kv_layout");
    }
  }
  return Error::Success();
}

Error decode_element_type(const AnyBuffer& query, ElementType& type) {
  switch (query.element_type()) {
    case DataType::F32:
      type = ElementType::kFloat32;
      return Error::Success();
    case DataType::F16:
      type = ElementType::kFloat16;
      return Error::Success();
    case DataType::BF16:
      type = ElementType::kBFloat16;
      return Error::Success();
    default:
      return invalid("query has dtype ", type_name(query.element_type()),
                     ", but must have float32, float16 or bfloat16");
  }
}

Error decode_axes(const AnyBuffer& query, const AnyBuffer& key, const Attributes& a, const std::int32_t* origins,
                  Problem& problem) {
  for (int i = 0; i < kRank; ++i) {
    Dimension& dim = problem.dims[i];
    dim.query = {a.query_layout[i], query.dimensions()[i + 1], origins ? origins[i] : 0};
    dim.kv = {a.kv_layout[i], key.dimensions()[i + 1], origins ? origins[kRank + i] : 0};
    dim.kernel_size = a.kernel_size[i];
    dim.stride = a.stride[i];
    dim.dilation = a.dilation[i];
    dim.is_causal = a.is_causal[i];
    // Keys outside the layout are never seen, so halos may reach beyond it; queries must have a window.
    if (dim.query.origin < 0 || dim.query.origin + dim.query.extent > dim.query.layout) {
      return invalid("origins place the query tokens of dimension ", i, " at ", dim.query.origin, " to ",
                     dim.query.origin + dim.query.extent, ", but they must lie inside query_layout ",
                     list(a.query_layout));
    }
  }
  return Error::Success();
}

}  // namespace

DataType data_type(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return DataType::F16;
    case ElementType::kBFloat16:
      return DataType::BF16;
    default:
      return DataType::F32;
  }
}

Error check_array(const char* name, const AnyBuffer& array, DataType type, std::initializer_list<std::int64_t> shape,
                  const char* rule) {
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

Error decode_origins(const AnyBuffer& origins, const std::int32_t*& values) {
  const bool is_empty = origins.element_count() == 0;
  NATTEN_JAX_RETURN_IF_ERROR(check_array("origins", origins, DataType::S32, {is_empty ? 0 : 2, kRank},
                                         "it holds the query origin and the key/value origin, or nothing"));
  values = is_empty ? nullptr : static_cast<const std::int32_t*>(origins.untyped_data());
  return Error::Success();
}

Error decode_attributes(const xffi::Dictionary& dictionary, Attributes& a, std::int64_t further) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "query_layout", a.query_layout));
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "kv_layout", a.kv_layout));
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "kernel_size", a.kernel_size));
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "stride", a.stride));
  NATTEN_JAX_RETURN_IF_ERROR(decode_extents(dictionary, "dilation", a.dilation));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tile(dictionary, "q_tile_shape", a.tiles.query));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tile(dictionary, "kv_tile_shape", a.tiles.kv));
  std::int64_t is_causal[kRank];
  NATTEN_JAX_RETURN_IF_ERROR(decode_integers(dictionary, "is_causal", is_causal));
  for (int i = 0; i < kRank; ++i) {
    if (is_causal[i] != 0 && is_causal[i] != 1) {
      return invalid("attribute is_causal is ", list(is_causal), ", but its values must be 0 or 1");
    }
    a.is_causal[i] = is_causal[i] == 1;
  }
  const auto scale = dictionary.get<float>("scale");
  if (!scale.has_value()) return invalid("attribute scale must be a float32 (", scale.error().message(), ")");
  if (!std::isfinite(*scale)) return invalid("attribute scale is ", *scale, ", but must be finite");
  a.scale = *scale;
  if (static_cast<std::int64_t>(dictionary.size()) != kAttributes + further) {
    return invalid("the call has ", dictionary.size(), " attributes, but must have ", kAttributes + further);
  }
  return check_windows(a);
}

Error decode_choice(const xffi::Dictionary& dictionary, const char* name, std::int64_t largest, std::int64_t& value) {
  const auto number = dictionary.get<std::int64_t>(name);
  if (!number.has_value()) return invalid("attribute ", name, " must be an int64 (", number.error().message(), ")");
  value = *number;
  if (value >= 0 && value <= largest) return Error::Success();
  return invalid("attribute ", name, " is ", value, ", but must lie between 0 and ", largest);
}

Error decode_problem(const ProblemOperands& operands, const Attributes& a, const std::int32_t* origins, Call& call) {
  const AnyBuffer& query = operands.query;
  const AnyBuffer& key = operands.key;
  const AnyBuffer& value = operands.value;
  Problem& p = call.problem;
  call.tiles = a.tiles;
  p.scale = a.scale;
  NATTEN_JAX_RETURN_IF_ERROR(decode_element_type(query, p.element_type));
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
  NATTEN_JAX_RETURN_IF_ERROR(check_array("additional_keys", operands.additional_keys, type,
                                         {p.batch, p.additional_kv, p.heads_kv, p.head_dim},
                                         "dtype, batch, heads and head_dim are those of key"));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("additional_values", operands.additional_values, type,
                                         {p.batch, p.additional_kv, p.heads_kv, p.head_dim_v},
                                         "it has as many tokens as additional_keys and otherwise looks like value"));
  return decode_axes(query, key, a, origins, p);
}

}  // namespace natten_jax::ffi
