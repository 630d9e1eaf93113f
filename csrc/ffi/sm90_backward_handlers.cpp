// The handlers of the Hopper backward pass. Operands lie in device memory: their contents are the kernels' to read.
#include <cuda_runtime_api.h>

#include "cuda/common/cuda_status.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/sm90/launch.h"
#include "ffi/cuda_support.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::DataType;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

Error check_statistics(const char* name, const AnyBuffer& array, const Problem& p) {
  return check_array(
      name, array, DataType::F32,
      {p.batch, p.heads, p.axes[0].query.local_extent, p.axes[1].query.local_extent, p.axes[2].query.local_extent, 2},
      "it holds two values per head and query");
}

Error sm90_backward(const ProblemOperands& operands, AnyBuffer out_cotangent, AnyBuffer statistics, AnyBuffer remainder,
                    Result query_gradient, Result key_gradient, Result value_gradient, Result additional_keys_gradient,
                    Result additional_values_gradient, Result scratch, cudaStream_t stream,
                    xffi::Dictionary dictionary) {
  std::int64_t is_deterministic = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, {nullptr, &remainder, nullptr, &out_cotangent, nullptr, nullptr},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      1, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_deterministic", 1, is_deterministic));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(sm90::check_backward(call.problem, call.tiles)));
  NATTEN_JAX_RETURN_IF_ERROR(check_statistics("statistics", statistics, call.problem));
  NATTEN_JAX_RETURN_IF_ERROR(
      check_array("result scratch", *scratch, DataType::F32,
                  {sm90::backward_scratch_elements(call.problem, call.tiles, is_deterministic == 1)},
                  "the query gradient is summed up in it"));
  NATTEN_JAX_RETURN_IF_ERROR(check_compute_capability(9, 0));
  return error_of(sm90::run_backward(call.problem, call.tiles, call.arrays,
                                     static_cast<const float*>(statistics.untyped_data()),
                                     static_cast<float*>(scratch->untyped_data()), is_deterministic == 1, stream));
}

/// What the backward pass needs to know of every query, from [batch, x, y, z, heads, head_dim_v] arrays.
Error sm90_statistics(AnyBuffer out, AnyBuffer out_cotangent, AnyBuffer logsumexp, AnyBuffer logsumexp_cotangent,
                      Result statistics, cudaStream_t stream) {
  return guarded([&]() -> Error {
    ElementType type{};
    NATTEN_JAX_RETURN_IF_ERROR(check_outputs(out, out_cotangent, type));
    if (type == ElementType::kFloat32) {
      return Error::InvalidArgument("natten_jax: out has dtype float32, but must have float16 or bfloat16");
    }
    NATTEN_JAX_RETURN_IF_ERROR(check_statistic_of_outputs("logsumexp", logsumexp, out));
    NATTEN_JAX_RETURN_IF_ERROR(check_statistic_of_outputs("logsumexp_cotangent", logsumexp_cotangent, out));
    const auto shape = out.dimensions();
    NATTEN_JAX_RETURN_IF_ERROR(check_array("result statistics", *statistics, DataType::F32,
                                           {shape[0], shape[4], shape[1], shape[2], shape[3], 2},
                                           "two values per head and query"));
    if (statistics->element_count() == 0) return Error::Success();
    return error_of(status_of(launch_statistics(
        type, out.untyped_data(), out_cotangent.untyped_data(), static_cast<const float*>(logsumexp.untyped_data()),
        static_cast<const float*>(logsumexp_cotangent.untyped_data()), static_cast<float*>(statistics->untyped_data()),
        shape[0], shape[1] * shape[2] * shape[3], shape[4], shape[5], stream)));
  });
}

XLA_FFI_DEFINE_HANDLER(kSm90Backward, on_problem(sm90_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>()   // statistics
                                          .Arg<AnyBuffer>())  // remainder
                           .Ret<AnyBuffer>()                  // scratch
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSm90Statistics, sm90_statistics,
                       xffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // out
                           .Arg<AnyBuffer>()  // out_cotangent
                           .Arg<AnyBuffer>()  // logsumexp
                           .Arg<AnyBuffer>()  // logsumexp_cotangent
                           .Ret<AnyBuffer>()  // statistics
                           .Ctx<xffi::PlatformStream<cudaStream_t>>(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> sm90_backward_registrations() {
  return {{"natten_jax_sm90_backward", "CUDA", kSm90Backward},
          {"natten_jax_sm90_backward_statistics", "CUDA", kSm90Statistics}};
}

}  // namespace natten_jax::ffi
