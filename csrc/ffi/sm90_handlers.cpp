// Handlers of the Hopper kernels. Operands are in device memory, so only the kernels read their contents.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/common/cuda_status.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/sm90/launch.h"
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

/// Results of the forward handlers.
struct Results : ForwardResults {
  Result next_tile;
};

/// Operands of a call that continues earlier calls. `first_query` is the start of the box of queries that the call
/// processes. The other operands are the results of the earlier calls, which this call updates in place.
struct Earlier {
  AnyBuffer first_query, out, logsumexp, remainder;
};

Error check_in_place(const char* name, const AnyBuffer& operand, Result result) {
  if (operand.untyped_data() == result->untyped_data()) return Error::Success();
  return Error::InvalidArgument("natten_jax: the result " + std::string(name) + " must have the memory of the operand");
}

Error decode_continuation(const Earlier& earlier, Results results, const xffi::Dictionary& dictionary,
                          const Problem& problem, sm90::Continuation& continuation) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_queries(dictionary, problem, continuation.queries));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("first_query", earlier.first_query, xffi::DataType::S32, {kRank},
                                         "it holds the first query of the box that the call processes"));
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("earlier_out", earlier.out, problem, false));
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("earlier_logsumexp", earlier.logsumexp, problem, true));
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("earlier_remainder", earlier.remainder, problem, true));
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result remainder", *results.remainder, problem, true));
  NATTEN_JAX_RETURN_IF_ERROR(check_in_place("out", earlier.out, results.out));
  NATTEN_JAX_RETURN_IF_ERROR(check_in_place("logsumexp", earlier.logsumexp, results.logsumexp));
  NATTEN_JAX_RETURN_IF_ERROR(check_in_place("remainder", earlier.remainder, results.remainder));
  continuation.first_query = static_cast<const std::int32_t*>(earlier.first_query.untyped_data());
  return Error::Success();
}

/// Checks that the output of a call with 8-bit operands has 16 bits, and decodes the factors of the output.
Error decode_output(const AnyBuffer& out_scales, Call& call) {
  const Problem& p = call.problem;
  if (p.out_type == ElementType::kFloat32) {
    return Error::InvalidArgument("natten_jax: result out has dtype float32, but must have float16 or bfloat16");
  }
  const char* const rule = "it holds the factors of the output for each head, or nothing";
  if (out_scales.element_count() == 0) return check_array("out_scales", out_scales, xffi::DataType::F32, {0}, rule);
  call.arrays.out_scales = static_cast<const float*>(out_scales.untyped_data());
  return check_array("out_scales", out_scales, xffi::DataType::F32, {p.batch, p.heads}, rule);
}

/// Arguments of the target that supports key biases and separate layouts of batch entries. `entry_maps` is scratch
/// memory for the tensor maps of these layouts.
struct WholePassArguments {
  AnyBuffer layouts, key_bias;
  Result entry_maps;
};

/// Runs a forward pass.
///
/// Args:
///   whole: null if the target does not support key biases and separate layouts of batch entries.
///   earlier: null if the call does not continue earlier calls.
///   out_scales: null if elements have more than 8 bits.
Error run_forward(const ProblemOperands& operands, WholePassArguments* whole, const Earlier* earlier,
                  const AnyBuffer* out_scales, Results results, cudaStream_t stream,
                  const xffi::Dictionary& dictionary) {
  std::int64_t is_ping_pong = 0, is_persistent = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_forward(operands, results, dictionary, earlier == nullptr ? 2 : 3, Memory::kDevice,
                                            call, out_scales == nullptr ? Elements::kWide : Elements::kFloat8));
  if (out_scales != nullptr) NATTEN_JAX_RETURN_IF_ERROR(decode_output(*out_scales, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_ping_pong", 1, is_ping_pong));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_persistent", 1, is_persistent));
  NATTEN_JAX_RETURN_IF_ERROR(
      check_array("result next_tile", *results.next_tile, xffi::DataType::S32, {1}, "it is scratch for one number"));
  sm90::ForwardScratch scratch{static_cast<std::int32_t*>(results.next_tile->untyped_data()), nullptr};
  if (whole != nullptr) {
    NATTEN_JAX_RETURN_IF_ERROR(decode_layouts(whole->layouts, Memory::kDevice, call));
    NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(whole->key_bias, call));
    NATTEN_JAX_RETURN_IF_ERROR(decode_entry_maps(
        *whole->entry_maps, sm90::entry_maps_of_forward(call.problem, call.arrays), scratch.entry_maps));
  }
  sm90::Continuation continuation{};
  if (earlier != nullptr) {
    NATTEN_JAX_RETURN_IF_ERROR(decode_continuation(*earlier, results, dictionary, call.problem, continuation));
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_compute_capability(9, 0));
  return error_of(sm90::run_forward(call.problem, call.tiles, call.arrays, earlier == nullptr ? nullptr : &continuation,
                                    {is_ping_pong == 1, is_persistent == 1}, scratch, stream));
}

Error sm90_forward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer key_bias, Result out, Result logsumexp,
                   Result remainder, Result next_tile, Result entry_maps, cudaStream_t stream,
                   xffi::Dictionary dictionary) {
  WholePassArguments whole{layouts, key_bias, entry_maps};
  return run_forward(operands, &whole, nullptr, nullptr, {{out, logsumexp, remainder}, next_tile}, stream, dictionary);
}

Error sm90_forward_float8(const ProblemOperands& operands, AnyBuffer out_scales, Result out, Result logsumexp,
                          Result remainder, Result next_tile, cudaStream_t stream, xffi::Dictionary dictionary) {
  return run_forward(operands, nullptr, nullptr, &out_scales, {{out, logsumexp, remainder}, next_tile}, stream,
                     dictionary);
}

Error sm90_forward_continued(const ProblemOperands& operands, AnyBuffer first_query, AnyBuffer earlier_out,
                             AnyBuffer earlier_logsumexp, AnyBuffer earlier_remainder, Result out, Result logsumexp,
                             Result remainder, Result next_tile, cudaStream_t stream, xffi::Dictionary dictionary) {
  const Earlier earlier{first_query, earlier_out, earlier_logsumexp, earlier_remainder};
  return run_forward(operands, nullptr, &earlier, nullptr, {{out, logsumexp, remainder}, next_tile}, stream,
                     dictionary);
}

XLA_FFI_DEFINE_HANDLER(kSm90Forward, on_problem(sm90_forward),
                       bind_forward(bind_problem()
                                        .Arg<AnyBuffer>()   // layouts
                                        .Arg<AnyBuffer>())  // key_bias
                           .Ret<AnyBuffer>()                // next_tile
                           .Ret<AnyBuffer>()                // entry_maps
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSm90ForwardFloat8, on_problem(sm90_forward_float8),
                       bind_forward(bind_problem().Arg<AnyBuffer>())  // out_scales
                           .Ret<AnyBuffer>()                          // next_tile
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSm90ForwardContinued, on_problem(sm90_forward_continued),
                       bind_forward(bind_problem()
                                        .Arg<AnyBuffer>()   // first_query
                                        .Arg<AnyBuffer>()   // earlier_out
                                        .Arg<AnyBuffer>()   // earlier_logsumexp
                                        .Arg<AnyBuffer>())  // earlier_remainder
                           .Ret<AnyBuffer>()                // next_tile
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

Error check_statistics(const char* name, const AnyBuffer& array, const Problem& p) {
  return check_array(
      name, array, xffi::DataType::F32,
      {p.batch, p.heads, p.axes[0].query.local_extent, p.axes[1].query.local_extent, p.axes[2].query.local_extent, 2},
      "it holds two values per head and query");
}

Error sm90_backward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer key_bias, AnyBuffer out_cotangent,
                    AnyBuffer statistics, AnyBuffer remainder, Result query_gradient, Result key_gradient,
                    Result value_gradient, Result additional_keys_gradient, Result additional_values_gradient,
                    Result scratch, Result key_bias_gradient, Result entry_maps, cudaStream_t stream,
                    xffi::Dictionary dictionary) {
  std::int64_t is_deterministic = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, layouts, {nullptr, &remainder, nullptr, &out_cotangent, nullptr, nullptr},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      1, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_gradient(key_bias_gradient, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_deterministic", 1, is_deterministic));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(sm90::check_backward(call.problem, call.tiles)));
  NATTEN_JAX_RETURN_IF_ERROR(check_statistics("statistics", statistics, call.problem));
  NATTEN_JAX_RETURN_IF_ERROR(
      check_array("result scratch", *scratch, xffi::DataType::F32,
                  {sm90::backward_scratch_elements(call.problem, call.tiles, is_deterministic == 1)},
                  "the query gradient is summed up in it"));
  CUtensorMap* maps = nullptr;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_entry_maps(*entry_maps, sm90::entry_maps_of_backward(call.problem, call.arrays), maps));
  NATTEN_JAX_RETURN_IF_ERROR(check_compute_capability(9, 0));
  return error_of(
      sm90::run_backward(call.problem, call.tiles, call.arrays, static_cast<const float*>(statistics.untyped_data()),
                         static_cast<float*>(scratch->untyped_data()), maps, is_deterministic == 1, stream));
}

/// Computes the statistics that the backward pass needs: for each query and head, the logsumexp in base 2 and delta.
/// `out` and `out_cotangent`: [batch, x, y, z, heads, head_dim_v].
Error sm90_statistics(AnyBuffer out, AnyBuffer out_cotangent, AnyBuffer logsumexp, AnyBuffer logsumexp_cotangent,
                      AnyBuffer layouts, Result statistics, cudaStream_t stream) {
  return guarded([&]() -> Error {
    ElementType type{};
    NATTEN_JAX_RETURN_IF_ERROR(check_outputs(out, out_cotangent, type));
    if (type == ElementType::kFloat32) {
      return Error::InvalidArgument("natten_jax: out has dtype float32, but must have float16 or bfloat16");
    }
    NATTEN_JAX_RETURN_IF_ERROR(check_statistic_of_outputs("logsumexp", logsumexp, out));
    const float* cotangents = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(decode_logsumexp_cotangent(logsumexp_cotangent, out, cotangents));
    const auto shape = out.dimensions();
    NATTEN_JAX_RETURN_IF_ERROR(check_array("result statistics", *statistics, xffi::DataType::F32,
                                           {shape[0], shape[4], shape[1], shape[2], shape[3], 2},
                                           "two values per head and query"));
    const bool is_padded = layouts.element_count() > 0;
    NATTEN_JAX_RETURN_IF_ERROR(check_array("layouts", layouts, xffi::DataType::S32,
                                           {is_padded ? shape[0] : 0, kRank, kRank},
                                           "it is as the backward pass takes it, or nothing"));
    if (statistics->element_count() == 0) return Error::Success();
    return error_of(status_of(launch_statistics(
        type, out.untyped_data(), out_cotangent.untyped_data(), static_cast<const float*>(logsumexp.untyped_data()),
        cotangents, static_cast<float*>(statistics->untyped_data()), shape[0], shape[1] * shape[2] * shape[3], shape[4],
        shape[5], is_padded, stream)));
  });
}

XLA_FFI_DEFINE_HANDLER(kSm90Backward, on_problem(sm90_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // layouts
                                          .Arg<AnyBuffer>()   // key_bias
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>()   // statistics
                                          .Arg<AnyBuffer>())  // remainder
                           .Ret<AnyBuffer>()                  // scratch
                           .Ret<AnyBuffer>()                  // dkey_bias
                           .Ret<AnyBuffer>()                  // entry_maps
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSm90Statistics, sm90_statistics,
                       xffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // out
                           .Arg<AnyBuffer>()  // out_cotangent
                           .Arg<AnyBuffer>()  // logsumexp
                           .Arg<AnyBuffer>()  // logsumexp_cotangent
                           .Arg<AnyBuffer>()  // layouts
                           .Ret<AnyBuffer>()  // statistics
                           .Ctx<xffi::PlatformStream<cudaStream_t>>(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> sm90_registrations() {
  return {
      {"natten_jax_sm90_forward", "CUDA", kSm90Forward},
      {"natten_jax_sm90_forward_float8", "CUDA", kSm90ForwardFloat8},
      {"natten_jax_sm90_forward_continued", "CUDA", kSm90ForwardContinued},
      {"natten_jax_sm90_backward", "CUDA", kSm90Backward},
      {"natten_jax_sm90_backward_statistics", "CUDA", kSm90Statistics},
  };
}

}  // namespace natten_jax::ffi
