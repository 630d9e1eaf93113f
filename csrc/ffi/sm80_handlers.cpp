// Handlers of the portable CUDA kernels. Operands are in device memory, so only the kernels read their contents.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <limits>
#include <string>

#include "cuda/common/cuda_status.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/sm80/launch.h"
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

Error sm80_forward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer key_bias, Result out, Result logsumexp,
                   Result remainder, cudaStream_t stream, xffi::Dictionary dictionary) {
  std::int64_t is_accurate = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_forward(operands, {out, logsumexp, remainder}, dictionary, 1, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_layouts(layouts, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(sm80::check_arrays(call.problem)));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_accurate", 1, is_accurate));
  return error_of(sm80::run_forward(call.problem, call.tiles, call.arrays, is_accurate == 1, stream));
}

XLA_FFI_DEFINE_HANDLER(kSm80Forward, on_problem(sm80_forward),
                       bind_forward(bind_problem()
                                        .Arg<AnyBuffer>()   // layouts
                                        .Arg<AnyBuffer>())  // key_bias
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

Error sm80_backward(const ProblemOperands& operands, AnyBuffer layouts, AnyBuffer key_bias, AnyBuffer logsumexp,
                    AnyBuffer remainder, AnyBuffer out_cotangent, AnyBuffer delta, Result query_gradient,
                    Result key_gradient, Result value_gradient, Result additional_keys_gradient,
                    Result additional_values_gradient, Result key_bias_gradient, xffi::RemainingRets scratch,
                    cudaStream_t stream, xffi::Dictionary dictionary) {
  std::int64_t is_accurate = 0, kv_splits = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(decode_backward(
      operands, layouts, {&logsumexp, &remainder, nullptr, &out_cotangent, nullptr, &delta},
      {query_gradient, key_gradient, value_gradient, additional_keys_gradient, additional_values_gradient}, dictionary,
      2, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_of_kernels(key_bias, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_key_bias_gradient(key_bias_gradient, call));
  NATTEN_JAX_RETURN_IF_ERROR(error_of(sm80::check_arrays(call.problem)));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_accurate", 1, is_accurate));
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_choice(dictionary, "kv_splits", std::numeric_limits<std::int32_t>::max(), kv_splits));
  const Problem& problem = call.problem;
  // Float32 sums of the query gradient. For float32 arrays, the result itself holds the sums, and this pointer stays
  // null.
  float* sums = nullptr;
  const std::size_t expected = problem.element_type == ElementType::kFloat32 ? 0 : 1;
  if (scratch.size() != expected) {
    return Error::InvalidArgument("natten_jax: the call has " + std::to_string(scratch.size()) +
                                  " scratch results, but must have " + std::to_string(expected));
  }
  sm80::HeadBlock block{problem.batch, problem.heads_kv};
  if (expected == 1) {
    auto buffer = scratch.get<AnyBuffer>(0);
    if (!buffer.has_value()) return buffer.error();
    const auto elements = static_cast<std::int64_t>((*buffer)->element_count());
    NATTEN_JAX_RETURN_IF_ERROR(
        check_array("result scratch", **buffer, xffi::DataType::F32, {elements}, "it is sums of the query gradient"));
    block = sm80::head_block(problem, elements);
    if (block.batch == 0) {
      return Error::InvalidArgument("natten_jax: result scratch has " + std::to_string(elements) +
                                    " elements, but must hold the query gradients of some heads or batch entries");
    }
    sums = static_cast<float*>((*buffer)->untyped_data());
  }
  return error_of(
      sm80::run_backward(problem, call.tiles, call.arrays, sums, block, kv_splits, is_accurate == 1, stream));
}

XLA_FFI_DEFINE_HANDLER(kSm80Backward, on_problem(sm80_backward),
                       bind_gradients(bind_problem()
                                          .Arg<AnyBuffer>()   // layouts
                                          .Arg<AnyBuffer>()   // key_bias
                                          .Arg<AnyBuffer>()   // logsumexp
                                          .Arg<AnyBuffer>()   // remainder
                                          .Arg<AnyBuffer>()   // out_cotangent
                                          .Arg<AnyBuffer>())  // delta
                           .Ret<AnyBuffer>()                  // dkey_bias
                           .RemainingRets()                   // scratch
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

/// Computes delta = sum(out * out_cotangent) - logsumexp_cotangent, one number per query and head. The backward pass
/// subtracts it from the gradients of the query's weights. `out` and `out_cotangent`: [batch, x, y, z, heads,
/// head_dim_v].
Error sm80_delta(AnyBuffer out, AnyBuffer out_cotangent, AnyBuffer logsumexp_cotangent, Result delta,
                 cudaStream_t stream) {
  return guarded([&]() -> Error {
    ElementType type{};
    NATTEN_JAX_RETURN_IF_ERROR(check_outputs(out, out_cotangent, type));
    const float* cotangents = nullptr;
    NATTEN_JAX_RETURN_IF_ERROR(decode_logsumexp_cotangent(logsumexp_cotangent, out, cotangents));
    NATTEN_JAX_RETURN_IF_ERROR(check_statistic_of_outputs("result delta", *delta, out));
    const auto rows = static_cast<std::int64_t>(delta->element_count());
    if (rows == 0) return Error::Success();
    return error_of(
        status_of(launch_delta(type, out.untyped_data(), out_cotangent.untyped_data(), cotangents,
                               static_cast<float*>(delta->untyped_data()), rows, out.dimensions()[5], stream)));
  });
}

XLA_FFI_DEFINE_HANDLER(kSm80Delta, sm80_delta,
                       xffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // out
                           .Arg<AnyBuffer>()  // out_cotangent
                           .Arg<AnyBuffer>()  // logsumexp_cotangent
                           .Ret<AnyBuffer>()  // delta
                           .Ctx<xffi::PlatformStream<cudaStream_t>>(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> sm80_registrations() {
  return {
      {"natten_jax_sm80_forward", "CUDA", kSm80Forward},
      {"natten_jax_sm80_backward", "CUDA", kSm80Backward},
      {"natten_jax_sm80_delta", "CUDA", kSm80Delta},
  };
}

}  // namespace natten_jax::ffi
