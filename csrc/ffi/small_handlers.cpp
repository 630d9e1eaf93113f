// Handlers of the CUDA kernels for small windows. Like the portable kernels, they run on all GPUs since compute
// capability 8.0.
#include <cuda_runtime_api.h>

#include "cuda/small/bias_table.h"
#include "cuda/small/forms.h"
#include "cuda/small/launch.h"
#include "cuda/small/sinks_gradient.h"
#include "ffi/biases.h"
#include "ffi/cuda_support.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

Error small_forward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer relative_bias, AnyBuffer key_bias,
                    AnyBuffer sinks, Result out, Result logsumexp, Result remainder, Result table_products,
                    Result entry_maps, cudaStream_t stream, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_forward(operands, {out, logsumexp, remainder}, dictionary, 0, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_layouts(layouts, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(small::check_arrays(call.problem)));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tables(relative_bias, table_products, call.tiles.query, call.tiles.kv, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_sinks(sinks, call));
  CUtensorMap* maps = nullptr;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_entry_maps(*entry_maps, small::entry_maps_of_forward(call.problem, call.arrays), maps));
  float* const products = static_cast<float*>(table_products->untyped_data());
  return error_of(small::run_forward(call.problem, call.tiles, call.arrays, products, maps, stream));
}

XLA_FFI_DEFINE_HANDLER(kSmallForward, on_problem(small_forward),
                       bind_forward(bind_problem()
                                        .Arg<AnyBuffer>()   // layouts
                                        .Arg<AnyBuffer>()   // relative_bias
                                        .Arg<AnyBuffer>()   // key_bias
                                        .Arg<AnyBuffer>())  // sinks
                           .Ret<AnyBuffer>()                // table_products
                           .Ret<AnyBuffer>()                // entry_maps
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

/// Checks the scratch results for the gradient of a relative bias. If the call has no relative bias, they must be
/// empty.
Error check_table_sums(const AnyBuffer& records, const AnyBuffer& sums, const Call& call) {
  const Problem& p = call.problem;
  const char* const rule = "it holds the contributions of query tiles to the gradient of relative_bias, or nothing";
  if (!p.has_relative_bias) {
    NATTEN_JAX_RETURN_IF_ERROR(check_array("result table_records", records, xffi::DataType::F32, {0}, rule));
    return check_array("result table_sums", sums, xffi::DataType::F32, {0}, rule);
  }
  const small::BiasSums sizes = small::bias_sums(p.axes, call.tiles.kv, call.tiles.query);
  NATTEN_JAX_RETURN_IF_ERROR(check_array("result table_records", records, xffi::DataType::F32,
                                         {p.batch, p.heads, sizes.tiles, sizes.record}, rule));
  return check_array(
      "result table_sums", sums, xffi::DataType::F32,
      {sizes.parts, p.batch, p.heads, small::BiasTable(p.axes, call.tiles.kv, call.tiles.query).gradients}, rule);
}

/// Checks the scratch result for the gradient of sinks.
Error check_sinks_parts(const AnyBuffer& parts, const Call& call) {
  const Arrays& arrays = call.arrays;
  const std::int64_t numbers =
      arrays.sinks == nullptr ? 0 : small::scratch_of_sinks(call.problem, call.tiles.kv, arrays.batch_of_sinks);
  return check_array("result sinks_parts", parts, xffi::DataType::F32, {numbers},
                     "it holds the contributions of parts of the queries to the gradient of sinks, or nothing");
}

Error small_backward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer relative_bias, AnyBuffer key_bias,
                     AnyBuffer sinks, AnyBuffer logsumexp, AnyBuffer remainder, AnyBuffer out, AnyBuffer out_cotangent,
                     AnyBuffer logsumexp_cotangent, Result query_gradient, Result key_gradient, Result value_gradient,
                     Result additional_keys_gradient, Result additional_values_gradient, Result statistics,
                     Result additional_sums, Result table_products, Result table_records, Result table_sums,
                     Result relative_bias_gradient, Result key_bias_gradient, Result sinks_parts, Result sinks_gradient,
                     Result entry_maps, cudaStream_t stream, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, layouts, {&logsumexp, &remainder, &out, &out_cotangent, &logsumexp_cotangent, nullptr},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      0, Memory::kDevice, call));
  const Problem& problem = call.problem;
  NATTEN_JAX_RETURN_IF_ERROR(error_of(small::check_arrays(problem)));
  NATTEN_JAX_RETURN_IF_ERROR(decode_tables(relative_bias, table_products, call.tiles.kv, call.tiles.query, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_sinks(sinks, call));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("result statistics", *statistics, xffi::DataType::F32,
                                         {problem.batch, problem.queries(), problem.heads, 4},
                                         "it holds four numbers for each query and head"));
  const std::int64_t parts = small::additional_parts(problem.queries() * problem.heads_per_kv(), problem.additional_kv);
  NATTEN_JAX_RETURN_IF_ERROR(check_array(
      "result additional_sums", *additional_sums, xffi::DataType::F32,
      {parts, problem.batch, problem.additional_kv, problem.heads_kv, problem.head_dim + problem.head_dim_v},
      "it holds the contributions of each part of the queries to the gradients of additional tokens"));
  NATTEN_JAX_RETURN_IF_ERROR(check_table_sums(*table_records, *table_sums, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_table_gradient(relative_bias_gradient, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_gradient(key_bias_gradient, call));
  NATTEN_JAX_RETURN_IF_ERROR(check_sinks_parts(*sinks_parts, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_sinks_gradient(sinks_gradient, call));
  const auto numbers = [](Result result) { return static_cast<float*>(result->untyped_data()); };
  small::Scratch scratch{numbers(statistics),
                         numbers(additional_sums),
                         numbers(table_products),
                         numbers(table_records),
                         numbers(table_sums),
                         numbers(sinks_parts),
                         nullptr};
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_entry_maps(*entry_maps, small::entry_maps_of_backward(problem, call.arrays), scratch.entry_maps));
  return error_of(small::run_backward(problem, call.tiles, call.arrays, scratch, stream));
}

XLA_FFI_DEFINE_HANDLER(kSmallBackward, on_problem(small_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // layouts
                                          .Arg<AnyBuffer>()   // relative_bias
                                          .Arg<AnyBuffer>()   // key_bias
                                          .Arg<AnyBuffer>()   // sinks
                                          .Arg<AnyBuffer>()   // logsumexp
                                          .Arg<AnyBuffer>()   // remainder
                                          .Arg<AnyBuffer>()   // out
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>())  // logsumexp_cotangent
                           .Ret<AnyBuffer>()                  // statistics
                           .Ret<AnyBuffer>()                  // additional_sums
                           .Ret<AnyBuffer>()                  // table_products
                           .Ret<AnyBuffer>()                  // table_records
                           .Ret<AnyBuffer>()                  // table_sums
                           .Ret<AnyBuffer>()                  // drelative_bias
                           .Ret<AnyBuffer>()                  // dkey_bias
                           .Ret<AnyBuffer>()                  // sinks_parts
                           .Ret<AnyBuffer>()                  // dsinks
                           .Ret<AnyBuffer>()                  // entry_maps
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> small_registrations() {
  return {
      {"natten_jax_sm80_small_forward", "CUDA", kSmallForward},
      {"natten_jax_sm80_small_backward", "CUDA", kSmallBackward},
  };
}

}  // namespace natten_jax::ffi
