// Handler of the benchmark kernels, only in builds with NATTEN_JAX_BENCH.
#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <limits>

#include "bench/fmha_ladder.h"
#include "cuda/common/cuda_status.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"

namespace natten_jax::ffi {
namespace {

using xffi::AnyBuffer;
using xffi::Error;

Error bench_fmha_forward(AnyBuffer query, AnyBuffer key, AnyBuffer value, xffi::Result<AnyBuffer> out,
                         cudaStream_t stream, xffi::Dictionary attributes) {
  return guarded([&]() -> Error {
    std::int64_t rung = 0, tiles = 0, is_causal = 0;
    NATTEN_JAX_RETURN_IF_ERROR(decode_choice(attributes, "rung", 3, rung));
    NATTEN_JAX_RETURN_IF_ERROR(decode_choice(attributes, "tiles", 2, tiles));
    NATTEN_JAX_RETURN_IF_ERROR(decode_choice(attributes, "is_causal", 1, is_causal));
    const auto scale = attributes.get<float>("scale");
    const auto shape = query.dimensions();
    const bool is_bfloat16 = query.element_type() == xffi::DataType::BF16;
    const bool has_type = is_bfloat16 || query.element_type() == xffi::DataType::F16;
    if (rung < 1 || !scale.has_value() || !has_type || shape.size() != 4 || (shape[3] != 64 && shape[3] != 128)) {
      return Error::InvalidArgument(
          "natten_jax: rung must lie between 1 and 3, scale be a float32, and query be a float16 or bfloat16 array "
          "[batch, tokens, heads, head_dim] with head_dim 64 or 128");
    }
    constexpr std::int64_t kLargestGrid = std::numeric_limits<std::uint16_t>::max();
    if (shape[0] < 1 || shape[0] > kLargestGrid || shape[1] < 1 || shape[1] > std::numeric_limits<int>::max() / 2 ||
        shape[2] < 1 || shape[2] > kLargestGrid) {
      return Error::InvalidArgument("natten_jax: an extent of query is 0 or too large");
    }
    const auto type = query.element_type();
    const auto like = {shape[0], shape[1], shape[2], shape[3]};
    constexpr const char* kRule = "it looks like query";
    NATTEN_JAX_RETURN_IF_ERROR(check_array("key", key, type, like, kRule));
    NATTEN_JAX_RETURN_IF_ERROR(check_array("value", value, type, like, kRule));
    NATTEN_JAX_RETURN_IF_ERROR(check_array("result out", *out, type, like, kRule));
    const bench::FmhaParams params{query.untyped_data(),
                                   key.untyped_data(),
                                   value.untyped_data(),
                                   out->untyped_data(),
                                   static_cast<int>(shape[0]),
                                   static_cast<int>(shape[1]),
                                   static_cast<int>(shape[2]),
                                   *scale,
                                   is_causal == 1};
    const auto launch =
        is_bfloat16 ? bench::launch_fmha<ElementType::kBFloat16> : bench::launch_fmha<ElementType::kFloat16>;
    return error_of(status_of(launch(static_cast<bench::Rung>(rung), static_cast<bench::TileSizes>(tiles),
                                     static_cast<int>(shape[3]), params, stream)));
  });
}

XLA_FFI_DEFINE_HANDLER(kBenchFmhaForward, bench_fmha_forward,
                       xffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // query
                           .Arg<AnyBuffer>()  // key
                           .Arg<AnyBuffer>()  // value
                           .Ret<AnyBuffer>()  // out
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Registration> bench_registrations() {
  return {{"natten_jax_bench_fmha_forward", "CUDA", kBenchFmhaForward}};
}

}  // namespace natten_jax::ffi
