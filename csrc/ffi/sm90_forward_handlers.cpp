// The handler of the Hopper forward pass. Operands lie in device memory: their contents are the kernels' to read.
#include <cuda_runtime_api.h>

#include "cuda/sm90/launch.h"
#include "ffi/cuda_support.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

Error sm90_forward(AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys,
                   AnyBuffer additional_values, AnyBuffer origins, Result out, Result logsumexp, Result remainder,
                   Result next_tile, cudaStream_t stream, xffi::Dictionary dictionary) {
  return guarded([&]() -> Error {
    const ProblemOperands operands{query, key, value, additional_keys, additional_values, origins};
    Attributes attributes;
    std::int64_t is_ping_pong = 0, is_persistent = 0;
    NATTEN_JAX_RETURN_IF_ERROR(decode_attributes(dictionary, attributes, 2));
    NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_ping_pong", 1, is_ping_pong));
    NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_persistent", 1, is_persistent));
    Call call;
    const std::int32_t* origin_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(decode_device_call(operands, attributes, call, origin_values));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result out", *out, call.problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result logsumexp", *logsumexp, call.problem, true));
    float* remainder_values = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(check_remainder("result remainder", *remainder, call.problem, remainder_values));
    NATTEN_JAX_RETURN_IF_ERROR(
        check_array("result next_tile", *next_tile, xffi::DataType::S32, {1}, "it is scratch for one number"));
    NATTEN_JAX_RETURN_IF_ERROR(check_compute_capability(9, 0));
    const sm90::Arrays arrays{query.untyped_data(),
                              key.untyped_data(),
                              value.untyped_data(),
                              additional_keys.untyped_data(),
                              additional_values.untyped_data(),
                              origin_values,
                              out->untyped_data(),
                              static_cast<float*>(logsumexp->untyped_data()),
                              remainder_values,
                              static_cast<std::int32_t*>(next_tile->untyped_data())};
    return error_of(
        sm90::run_forward(call.problem, call.tiles, arrays, {is_ping_pong == 1, is_persistent == 1}, stream));
  });
}

XLA_FFI_DEFINE_HANDLER(kSm90Forward, sm90_forward,
                       bind_problem()
                           .Ret<AnyBuffer>()  // out
                           .Ret<AnyBuffer>()  // logsumexp
                           .Ret<AnyBuffer>()  // remainder
                           .Ret<AnyBuffer>()  // next_tile
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> sm90_forward_registrations() {
  return {{"natten_jax_sm90_forward", "CUDA", kSm90Forward}};
}

}  // namespace natten_jax::ffi
