// The handlers of the CUDA kernels for small windows, a form of the portable ones.
#include <cuda_runtime_api.h>

#include "cuda/small/forms.h"
#include "cuda/small/launch.h"
#include "ffi/cuda_support.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

Error small_forward(const ProblemOperands& operands, Result out, Result logsumexp, Result remainder,
                    cudaStream_t stream, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_forward(operands, {out, logsumexp, remainder}, dictionary, 0, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(small::check_arrays(call.problem)));
  return error_of(small::run_forward(call.problem, call.tiles, call.arrays, stream));
}

XLA_FFI_DEFINE_HANDLER(kSmallForward, on_problem(small_forward),
                       bind_forward().Ctx<xffi::PlatformStream<cudaStream_t>>().Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

Error small_backward(const ProblemOperands& operands, AnyBuffer logsumexp, AnyBuffer remainder, AnyBuffer out,
                     AnyBuffer out_cotangent, AnyBuffer logsumexp_cotangent, Result query_gradient, Result key_gradient,
                     Result value_gradient, Result additional_keys_gradient, Result additional_values_gradient,
                     Result statistics, Result additional_sums, cudaStream_t stream, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, {&logsumexp, &remainder, &out, &out_cotangent, &logsumexp_cotangent, nullptr},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      0, Memory::kDevice, call));
  const Problem& problem = call.problem;
  NATTEN_JAX_RETURN_IF_ERROR(error_of(small::check_arrays(problem)));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("result statistics", *statistics, xffi::DataType::F32,
                                         {problem.batch, problem.queries(), problem.heads, 4},
                                         "it is four numbers for each query and head"));
  const std::int64_t parts = small::additional_parts(problem.queries() * problem.heads_per_kv(), problem.additional_kv);
  NATTEN_JAX_RETURN_IF_ERROR(check_array(
      "result additional_sums", *additional_sums, xffi::DataType::F32,
      {parts, problem.batch, problem.additional_kv, problem.heads_kv, problem.head_dim + problem.head_dim_v},
      "it is what each part of the queries adds to gradients"));
  const small::Scratch scratch{static_cast<float*>(statistics->untyped_data()),
                               static_cast<float*>(additional_sums->untyped_data())};
  return error_of(small::run_backward(problem, call.tiles, call.arrays, scratch, stream));
}

XLA_FFI_DEFINE_HANDLER(kSmallBackward, on_problem(small_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // logsumexp
                                          .Arg<AnyBuffer>()   // remainder
                                          .Arg<AnyBuffer>()   // out
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>())  // logsumexp_cotangent
                           .Ret<AnyBuffer>()                  // statistics
                           .Ret<AnyBuffer>()                  // additional_sums
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
