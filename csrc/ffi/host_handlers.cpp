#include <functional>
#include <string>
#include <utility>

#include "cpu/attention.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

Error decode_host_call(const ProblemOperands& operands, const xffi::Dictionary& dictionary, Call& call) {
  Attributes attributes;
  NATTEN_JAX_RETURN_IF_ERROR(decode_attributes(dictionary, attributes));
  const std::int32_t* origins = nullptr;
  NATTEN_JAX_RETURN_IF_ERROR(decode_origins(operands.origins, origins));
  return decode_problem(operands, attributes, origins != nullptr ? origins : kNoOrigins, call);
}

cpu::Arrays operand_arrays(const ProblemOperands& operands) {
  cpu::Arrays arrays{};
  arrays.query = operands.query.untyped_data();
  arrays.key = operands.key.untyped_data();
  arrays.value = operands.value.untyped_data();
  arrays.additional_keys = operands.additional_keys.untyped_data();
  arrays.additional_values = operands.additional_values.untyped_data();
  return arrays;
}

cpu::Executor executor_of(xffi::ThreadPool& pool) {
  // The calling thread works too.
  return {pool.num_threads() - 1, [&pool](std::function<void()> closure) { pool.Schedule(std::move(closure)); }};
}

Error cpu_forward(AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys,
                  AnyBuffer additional_values, AnyBuffer origins, AnyBuffer scales, Result out, Result logsumexp,
                  Result remainder, xffi::ThreadPool pool, xffi::Dictionary dictionary) {
  return guarded([&]() -> Error {
    const ProblemOperands operands{query, key, value, additional_keys, additional_values, origins, scales};
    Call call;
    NATTEN_JAX_RETURN_IF_ERROR(decode_host_call(operands, dictionary, call));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result out", *out, call.problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result logsumexp", *logsumexp, call.problem, true));
    cpu::Arrays arrays = operand_arrays(operands);
    arrays.out = out->untyped_data();
    arrays.logsumexp = static_cast<float*>(logsumexp->untyped_data());
    NATTEN_JAX_RETURN_IF_ERROR(check_remainder("result remainder", *remainder, call.problem, arrays.remainder));
    return error_of(cpu::run_forward(call.problem, call.tiles, arrays, executor_of(pool)));
  });
}

Error cpu_backward(AnyBuffer query, AnyBuffer key, AnyBuffer value, AnyBuffer additional_keys,
                   AnyBuffer additional_values, AnyBuffer origins, AnyBuffer scales, AnyBuffer logsumexp,
                   AnyBuffer remainder, AnyBuffer out_cotangent, AnyBuffer delta, Result query_gradient,
                   Result key_gradient, Result value_gradient, Result additional_keys_gradient,
                   Result additional_values_gradient, xffi::ThreadPool pool, xffi::Dictionary dictionary) {
  return guarded([&]() -> Error {
    const ProblemOperands operands{query, key, value, additional_keys, additional_values, origins, scales};
    Call call;
    NATTEN_JAX_RETURN_IF_ERROR(decode_host_call(operands, dictionary, call));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("logsumexp", logsumexp, call.problem, true));
    float* saved_remainder = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(check_remainder("remainder", remainder, call.problem, saved_remainder));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("out_cotangent", out_cotangent, call.problem, false));
    NATTEN_JAX_RETURN_IF_ERROR(check_query_array("delta", delta, call.problem, true));
    NATTEN_JAX_RETURN_IF_ERROR(check_heads_of_gradients(call.problem));
    NATTEN_JAX_RETURN_IF_ERROR(check_gradients(operands, {&*query_gradient, &*key_gradient, &*value_gradient,
                                                          &*additional_keys_gradient, &*additional_values_gradient}));
    cpu::Arrays arrays = operand_arrays(operands);
    arrays.saved_logsumexp = static_cast<const float*>(logsumexp.untyped_data());
    arrays.saved_remainder = saved_remainder;
    arrays.out_cotangent = out_cotangent.untyped_data();
    arrays.delta = static_cast<const float*>(delta.untyped_data());
    arrays.query_gradient = query_gradient->untyped_data();
    arrays.key_gradient = key_gradient->untyped_data();
    arrays.value_gradient = value_gradient->untyped_data();
    arrays.additional_keys_gradient = additional_keys_gradient->untyped_data();
    arrays.additional_values_gradient = additional_values_gradient->untyped_data();
    return error_of(cpu::run_backward(call.problem, call.tiles, arrays, executor_of(pool)));
  });
}

XLA_FFI_DEFINE_HANDLER(kCpuForward, cpu_forward,
                       bind_problem()
                           .Ret<AnyBuffer>()  // out
                           .Ret<AnyBuffer>()  // logsumexp
                           .Ret<AnyBuffer>()  // remainder
                           .Ctx<xffi::ThreadPool>()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kCpuBackward, cpu_backward,
                       bind_problem()
                           .Arg<AnyBuffer>()  // logsumexp
                           .Arg<AnyBuffer>()  // remainder
                           .Arg<AnyBuffer>()  // out_cotangent
                           .Arg<AnyBuffer>()  // delta
                           .Ret<AnyBuffer>()  // dquery
                           .Ret<AnyBuffer>()  // dkey
                           .Ret<AnyBuffer>()  // dvalue
                           .Ret<AnyBuffer>()  // dadditional_keys
                           .Ret<AnyBuffer>()  // dadditional_values
                           .Ctx<xffi::ThreadPool>()
                           .Attrs());

}  // namespace

std::vector<Registration> host_registrations() {
  return {
      {"natten_jax_cpu_forward", "cpu", kCpuForward},
      {"natten_jax_cpu_backward", "cpu", kCpuBackward},
  };
}

}  // namespace natten_jax::ffi
