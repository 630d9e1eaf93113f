// The handlers of the Hopper forward pass. Operands lie in device memory: their contents are the kernels' to read.
#include <cuda_runtime_api.h>

#include <string>

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

/// The results of both handlers.
struct Results : ForwardResults {
  Result next_tile;
};

/// What a call continues: where its queries begin, and what earlier ones found, whose place the results take.
struct Earlier {
  AnyBuffer first_query, out, logsumexp, remainder;
};

Error check_in_place(const char* name, const AnyBuffer& operand, Result result) {
  if (operand.untyped_data() == result->untyped_data()) return Error::Success();
  return Error::InvalidArgument("natten_jax: the result " + std::string(name) + " must take the place of the operand");
}

Error decode_continuation(const Earlier& earlier, Results results, const xffi::Dictionary& dictionary,
                          const Problem& problem, sm90::Continuation& continuation) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_queries(dictionary, problem, continuation.queries));
  NATTEN_JAX_RETURN_IF_ERROR(check_array("first_query", earlier.first_query, xffi::DataType::S32, {kRank},
                                         "it says where the queries begin that are looked at"));
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

/// Runs a call; `earlier` is null where it continues nothing.
Error run(const ProblemOperands& operands, const Earlier* earlier, Results results, cudaStream_t stream,
          const xffi::Dictionary& dictionary) {
  std::int64_t is_ping_pong = 0, is_persistent = 0;
  Call call;
  NATTEN_JAX_RETURN_IF_ERROR(
      decode_forward(operands, results, dictionary, earlier == nullptr ? 2 : 3, Memory::kDevice, call));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_ping_pong", 1, is_ping_pong));
  NATTEN_JAX_RETURN_IF_ERROR(decode_choice(dictionary, "is_persistent", 1, is_persistent));
  NATTEN_JAX_RETURN_IF_ERROR(
      check_array("result next_tile", *results.next_tile, xffi::DataType::S32, {1}, "it is scratch for one number"));
  sm90::Continuation continuation{};
  if (earlier != nullptr) {
    NATTEN_JAX_RETURN_IF_ERROR(decode_continuation(*earlier, results, dictionary, call.problem, continuation));
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_compute_capability(9, 0));
  return error_of(sm90::run_forward(call.problem, call.tiles, call.arrays, earlier == nullptr ? nullptr : &continuation,
                                    {is_ping_pong == 1, is_persistent == 1},
                                    static_cast<std::int32_t*>(results.next_tile->untyped_data()), stream));
}

Error sm90_forward(const ProblemOperands& operands, Result out, Result logsumexp, Result remainder, Result next_tile,
                   cudaStream_t stream, xffi::Dictionary dictionary) {
  return run(operands, nullptr, {{out, logsumexp, remainder}, next_tile}, stream, dictionary);
}

Error sm90_forward_continued(const ProblemOperands& operands, AnyBuffer first_query, AnyBuffer earlier_out,
                             AnyBuffer earlier_logsumexp, AnyBuffer earlier_remainder, Result out, Result logsumexp,
                             Result remainder, Result next_tile, cudaStream_t stream, xffi::Dictionary dictionary) {
  const Earlier earlier{first_query, earlier_out, earlier_logsumexp, earlier_remainder};
  return run(operands, &earlier, {{out, logsumexp, remainder}, next_tile}, stream, dictionary);
}

XLA_FFI_DEFINE_HANDLER(kSm90Forward, on_problem(sm90_forward),
                       bind_forward()
                           .Ret<AnyBuffer>()  // next_tile
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSm90ForwardContinued, on_problem(sm90_forward_continued),
                       bind_problem()
                           .Arg<AnyBuffer>()  // first_query
                           .Arg<AnyBuffer>()  // earlier_out
                           .Arg<AnyBuffer>()  // earlier_logsumexp
                           .Arg<AnyBuffer>()  // earlier_remainder
                           .Ret<AnyBuffer>()  // out
                           .Ret<AnyBuffer>()  // logsumexp
                           .Ret<AnyBuffer>()  // remainder
                           .Ret<AnyBuffer>()  // next_tile
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> sm90_forward_registrations() {
  return {{"natten_jax_sm90_forward", "CUDA", kSm90Forward},
          {"natten_jax_sm90_forward_continued", "CUDA", kSm90ForwardContinued}};
}

}  // namespace natten_jax::ffi
