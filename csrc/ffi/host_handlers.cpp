#include <functional>
#include <string>
#include <utility>

#include "cpu/attention.h"
#include "ffi/biases.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"
#include "ffi/handlers.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;
using Result = xffi::Result<AnyBuffer>;

cpu::Executor executor_of(xffi::ThreadPool& pool) {
  // The calling thread also processes items, so use one pool thread less.
  return {pool.num_threads() - 1, [&pool](std::function<void()> closure) { pool.Schedule(std::move(closure)); }};
}

Error cpu_forward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer relative_bias, AnyBuffer key_bias,
                  Result out, Result logsumexp, Result remainder, xffi::ThreadPool pool, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_forward(operands, {out, logsumexp, remainder}, dictionary, 0, Memory::kHost, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_layouts(layouts, Memory::kHost, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_biases(relative_bias, key_bias, call));
  return error_of(cpu::run_forward(call.problem, call.tiles, call.arrays, executor_of(pool)));
}

Error cpu_backward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer relative_bias, AnyBuffer key_bias,
                   AnyBuffer logsumexp, AnyBuffer remainder, AnyBuffer out_cotangent, AnyBuffer delta,
                   Result query_gradient, Result key_gradient, Result value_gradient, Result additional_keys_gradient,
                   Result additional_values_gradient, Result relative_bias_gradient, Result key_bias_gradient,
                   xffi::ThreadPool pool, xffi::Dictionary dictionary) {
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, layouts, {&logsumexp, &remainder, nullptr, &out_cotangent, nullptr, &delta},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      0, Memory::kHost, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_biases(relative_bias, key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_bias_gradients(relative_bias_gradient, key_bias_gradient, call));
  return error_of(cpu::run_backward(call.problem, call.tiles, call.arrays, executor_of(pool)));
}

XLA_FFI_DEFINE_HANDLER(kCpuForward, on_problem(cpu_forward),
                       bind_forward(bind_problem()
                                        .Arg<AnyBuffer>()   // layouts
                                        .Arg<AnyBuffer>()   // relative_bias
                                        .Arg<AnyBuffer>())  // key_bias
                           .Ctx<xffi::ThreadPool>()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kCpuBackward, on_problem(cpu_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // layouts
                                          .Arg<AnyBuffer>()   // relative_bias
                                          .Arg<AnyBuffer>()   // key_bias
                                          .Arg<AnyBuffer>()   // logsumexp
                                          .Arg<AnyBuffer>()   // remainder
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>())  // delta
                           .Ret<AnyBuffer>()                  // drelative_bias
                           .Ret<AnyBuffer>()                  // dkey_bias
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
