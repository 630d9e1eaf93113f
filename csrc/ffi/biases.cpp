#include "ffi/biases.h"

#include <string>

#include "cuda/small/bias_table.h"
#include "natten_jax/offset_table.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::DataType;
using xffi::Error;

/// Checks an array with one number per batch entry, head and offset. If `is_given` is false, the array must be empty.
Error check_relative_bias(const char* name, const AnyBuffer& array, const Problem& p, bool is_given) {
  const char* const rule = "it holds a number for each batch entry, head and offset, or nothing";
  if (!is_given) return check_array(name, array, DataType::F32, {0}, rule);
  return check_array(name, array, DataType::F32, {p.batch, p.heads, offset_table(p.axes).entries}, rule);
}

/// Checks that queries and keys are tokens of one layout, which a relative bias requires.
Error check_offsets(const Problem& p) {
  for (const Axis& axis : p.axes) {
    if (axis.query.extent == axis.kv.extent) continue;
    return Error::InvalidArgument("natten_jax: relative_bias was given and query_extent is " +
                                  std::to_string(axis.query.extent) + ", but it must be kv_extent, which is " +
                                  std::to_string(axis.kv.extent));
  }
  return Error::Success();
}

/// Checks an array with one number per batch entry, key and each of `heads` heads. If `is_given` is false, the array
/// must be empty.
Error check_key_bias(const char* name, const AnyBuffer& array, const Problem& p, bool is_given, std::int64_t heads) {
  const char* const rule = "it holds a number for each key and query head, or nothing";
  if (!is_given) return check_array(name, array, DataType::F32, {0}, rule);
  const Axis* axes = p.axes;
  return check_array(name, array, DataType::F32,
                     {p.batch, axes[0].kv.local_extent, axes[1].kv.local_extent, axes[2].kv.local_extent, heads}, rule);
}

}  // namespace

Error decode_biases(const AnyBuffer& relative_bias, const AnyBuffer& key_bias, Call& call) {
  const Problem& p = call.problem;
  const bool has_table = relative_bias.element_count() > 0, has_keys = key_bias.element_count() > 0;
  if (has_table) {
    if (p.heads_per_kv() * offset_table(p.axes).entries > kMostTableEntries) {
      return Error::InvalidArgument(
          "natten_jax: the windows are too large for relative_bias: query heads that share keys must have at most " +
          std::to_string(kMostTableEntries) + " entries in total, one per head and offset");
    }
    NATTEN_JAX_RETURN_IF_ERROR(check_offsets(p));
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_relative_bias("relative_bias", relative_bias, p, has_table));
  NATTEN_JAX_RETURN_IF_ERROR(check_key_bias("key_bias", key_bias, p, has_keys, p.heads));
  if (has_table) call.arrays.relative_bias = static_cast<const float*>(relative_bias.untyped_data());
  if (has_keys) call.arrays.key_bias = static_cast<const float*>(key_bias.untyped_data());
  call.arrays.key_bias_heads = p.heads;
  return Error::Success();
}

Error decode_bias_gradients(xffi::Result<AnyBuffer> relative_bias, xffi::Result<AnyBuffer> key_bias, Call& call) {
  const Problem& p = call.problem;
  Arrays& arrays = call.arrays;
  NATTEN_JAX_RETURN_IF_ERROR(
      check_relative_bias("result drelative_bias", *relative_bias, p, arrays.relative_bias != nullptr));
  NATTEN_JAX_RETURN_IF_ERROR(check_key_bias("result dkey_bias", *key_bias, p, arrays.key_bias != nullptr, p.heads));
  arrays.relative_bias_gradient = static_cast<float*>(relative_bias->untyped_data());
  arrays.key_bias_gradient = static_cast<float*>(key_bias->untyped_data());
  return Error::Success();
}

Error decode_tables(const AnyBuffer& relative_bias, xffi::Result<AnyBuffer> products, const std::int64_t (&rows)[kRank],
                    const std::int64_t (&columns)[kRank], Call& call) {
  Problem& p = call.problem;
  if (relative_bias.element_count() == 0) {
    NATTEN_JAX_RETURN_IF_ERROR(check_relative_bias("result table_products", *products, p, false));
    return check_relative_bias("relative_bias", relative_bias, p, false);
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_offsets(p));
  if (p.additional_kv > 0) {
    return Error::InvalidArgument("natten_jax: relative_bias was given and there are " +
                                  std::to_string(p.additional_kv) +
                                  " additional tokens, but the kernels for small windows do not support both");
  }
  const auto dimensions = relative_bias.dimensions();
  const bool is_shared = dimensions.size() > 0 && dimensions.front() == 1;
  call.arrays.relative_bias_tables = is_shared ? 1 : p.batch;
  NATTEN_JAX_RETURN_IF_ERROR(check_array("relative_bias", relative_bias, DataType::F32,
                                         {call.arrays.relative_bias_tables, p.heads, offset_table(p.axes).entries},
                                         "it holds one number per head and offset, in one table for all batch "
                                         "entries or in one table per entry"));
  NATTEN_JAX_RETURN_IF_ERROR(check_array(
      "result table_products", *products, DataType::F32,
      {small::tables_of_products(p, call.arrays), p.heads, small::BiasTable(p.axes, rows, columns).entries},
      "it holds one number per head and offset, in one table if all batch entries share a table and scales, or in one "
      "table per entry; lines are padded as described in bias_table.h"));
  p.has_relative_bias = true;
  call.arrays.relative_bias = static_cast<const float*>(relative_bias.untyped_data());
  return Error::Success();
}

Error decode_table_gradient(xffi::Result<AnyBuffer> relative_bias, Call& call) {
  const Problem& p = call.problem;
  const char* const name = "result drelative_bias";
  call.arrays.relative_bias_gradient = static_cast<float*>(relative_bias->untyped_data());
  if (!p.has_relative_bias) return check_relative_bias(name, *relative_bias, p, false);
  return check_array(name, *relative_bias, DataType::F32,
                     {call.arrays.relative_bias_tables, p.heads, offset_table(p.axes).entries},
                     "it has the shape of relative_bias");
}

Error decode_key_bias_of_kernels(const AnyBuffer& key_bias, Call& call) {
  Problem& p = call.problem;
  p.has_key_bias = key_bias.element_count() > 0;
  const auto dimensions = key_bias.dimensions();
  const bool is_shared = p.has_key_bias && dimensions.size() > 0 && dimensions.back() == 1;
  call.arrays.key_bias_heads = is_shared ? 1 : p.heads;
  NATTEN_JAX_RETURN_IF_ERROR(check_key_bias("key_bias", key_bias, p, p.has_key_bias, call.arrays.key_bias_heads));
  if (p.has_key_bias) call.arrays.key_bias = static_cast<const float*>(key_bias.untyped_data());
  return Error::Success();
}

namespace {

/// Checks an array that must have the shape of the sinks. If the call has no sinks, the array must be empty.
Error check_sinks(const char* name, const AnyBuffer& buffer, const Call& call) {
  const char* const rule = "it holds one number per head, for all batch entries or for each entry, or nothing";
  if (call.arrays.sinks == nullptr) return check_array(name, buffer, DataType::F32, {0}, rule);
  return check_array(name, buffer, DataType::F32, {call.arrays.batch_of_sinks, call.problem.heads, 1}, rule);
}

}  // namespace

Error decode_sinks(const AnyBuffer& sinks, Call& call) {
  const auto dimensions = sinks.dimensions();
  if (sinks.element_count() > 0) {
    call.arrays.sinks = static_cast<const float*>(sinks.untyped_data());
    call.arrays.batch_of_sinks = dimensions.size() > 0 && dimensions.front() == 1 ? 1 : call.problem.batch;
  }
  return check_sinks("sinks", sinks, call);
}

Error decode_sinks_gradient(xffi::Result<AnyBuffer> sinks, Call& call) {
  call.arrays.sinks_gradient = static_cast<float*>(sinks->untyped_data());
  return check_sinks("result dsinks", *sinks, call);
}

Error decode_key_bias_gradient(xffi::Result<AnyBuffer> key_bias, Call& call) {
  const Problem& p = call.problem;
  NATTEN_JAX_RETURN_IF_ERROR(check_key_bias("result dkey_bias", *key_bias, p, p.has_key_bias, p.heads));
  call.arrays.key_bias_gradient = static_cast<float*>(key_bias->untyped_data());
  return Error::Success();
}

}  // namespace natten_jax::ffi
