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

Error small_forward(AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys,
                    AnyBuffer additional_values, AnyBuffer origins, AnyBuffer scales, Result out, Result logsumexp,
                    Result remainder, cudaStream_t stream, xffi::Dictionary dictionary) {
  return guarded([&]() -> Error {
    const ProblemOperands operands{query, key, value, additional_keys, additional_values, origins, scales};
    Attributes attributes;
    NATTEN_JAX_RETURN_IF_ERROR(decode_attributes(dictionary, attributes));
    Call call;
    const std::int32_t* origin_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(decode_device_call(operands, attributes, call, origin_values));
    if (const Status status = small::check_arrays(call.problem); status.failed()) return error_of(status);
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result out", *out, call.problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result logsumexp", *logsumexp, call.problem, true));
    float* remainder_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(check_remainder("result remainder", *remainder, call.problem, remainder_values));
    small::ForwardArrays arrays{};
    arrays.query = query.untyped_data();
    arrays.key = key.untyped_data();
    arrays.value = value.untyped_data();
    arrays.additional_keys = additional_keys.untyped_data();
    arrays.additional_values = additional_values.untyped_data();
    arrays.origins = origin_values;
    arrays.out = out->untyped_data();
    arrays.logsumexp = static_cast<float*>(logsumexp->untyped_data());
    arrays.remainder = remainder_values;
    return error_of(small::run_forward(call.problem, call.tiles, arrays, stream));
  });
}

XLA_FFI_DEFINE_HANDLER(kSmallForward, small_forward,
                       bind_problem()
                           .Ret<AnyBuffer>()  // out
                           .Ret<AnyBuffer>()  // logsumexp
                           .Ret<AnyBuffer>()  // remainder
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

Error small_backward(AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys,
                     AnyBuffer additional_values, AnyBuffer origins, AnyBuffer scales, AnyBuffer logsumexp,
                     AnyBuffer remainder, AnyBuffer out, AnyBuffer out_cotangent, AnyBuffer logsumexp_cotangent,
                     Result query_gradient, Result key_gradient, Result value_gradient, Result additional_keys_gradient,
                     Result additional_values_gradient, Result statistics, Result additional_sums, cudaStream_t stream,
                     xffi::Dictionary dictionary) {
  return guarded([&]() -> Error {
    const ProblemOperands operands{query, key, value, additional_keys, additional_values, origins, scales};
    Attributes attributes;
    NATTEN_JAX_RETURN_IF_ERROR(decode_attributes(dictionary, attributes));
    Call call;
    const std::int32_t* origin_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(decode_device_call(operands, attributes, call, origin_values));
    const Problem& problem = call.problem;
    if (const Status status = small::check_arrays(problem); status.failed()) return error_of(status);
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("logsumexp", logsumexp, problem, true));
    float* remainder_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(check_remainder("remainder", remainder, problem, remainder_values));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("out", out, problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("out_cotangent", out_cotangent, problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("logsumexp_cotangent", logsumexp_cotangent, problem, true));
    NATTEN_JAX_RETURN_IF_ERROR(check_heads_of_gradients(problem));
    NATTEN_JAX_RETURN_IF_ERROR(check_gradients(operands, {&*query_gradient, &*key_gradient, &*value_gradient,
                                                          &*additional_keys_gradient, &*additional_values_gradient}));
    NATTEN_JAX_RETURN_IF_ERROR(check_array("result statistics", *statistics, xffi::DataType::F32,
                                           {problem.batch, problem.queries(), problem.heads, 4},
                                           "it is four numbers for each query and head"));
    const std::int64_t parts =
        small::additional_parts(problem.queries() * problem.heads_per_kv(), problem.additional_kv);
    NATTEN_JAX_RETURN_IF_ERROR(check_array(
        "result additional_sums", *additional_sums, xffi::DataType::F32,
        {parts, problem.batch, problem.additional_kv, problem.heads_kv, problem.head_dim + problem.head_dim_v},
        "it is what each part of the queries adds to gradients"));
    small::BackwardArrays arrays{};
    arrays.query = query.untyped_data();
    arrays.key = key.untyped_data();
    arrays.value = value.untyped_data();
    arrays.additional_keys = additional_keys.untyped_data();
    arrays.additional_values = additional_values.untyped_data();
    arrays.origins = origin_values;
    arrays.logsumexp = static_cast<const float*>(logsumexp.untyped_data());
    arrays.remainder = remainder_values;
    arrays.out = out.untyped_data();
    arrays.out_cotangent = out_cotangent.untyped_data();
    arrays.logsumexp_cotangent = static_cast<const float*>(logsumexp_cotangent.untyped_data());
    arrays.query_gradient = query_gradient->untyped_data();
    arrays.key_gradient = key_gradient->untyped_data();
    arrays.value_gradient = value_gradient->untyped_data();
    arrays.additional_keys_gradient = additional_keys_gradient->untyped_data();
    arrays.additional_values_gradient = additional_values_gradient->untyped_data();
    arrays.statistics = static_cast<float*>(statistics->untyped_data());
    arrays.additional_sums = static_cast<float*>(additional_sums->untyped_data());
    return error_of(small::run_backward(problem, call.tiles, arrays, stream));
  });
}

XLA_FFI_DEFINE_HANDLER(kSmallBackward, small_backward,
                       bind_problem()
                           .Arg<AnyBuffer>()  // logsumexp
                           .Arg<AnyBuffer>()  // remainder
                           .Arg<AnyBuffer>()  // out
                           .Arg<AnyBuffer>()  // out_cotangent
                           .Arg<AnyBuffer>()  // logsumexp_cotangent
                           .Ret<AnyBuffer>()  // dquery
                           .Ret<AnyBuffer>()  // dkey
                           .Ret<AnyBuffer>()  // dvalue
                           .Ret<AnyBuffer>()  // dadditional_keys
                           .Ret<AnyBuffer>()  // dadditional_values
                           .Ret<AnyBuffer>()  // statistics
                           .Ret<AnyBuffer>()  // additional_sums
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
