// Calls the checks of the native handlers as XLA would, but with arguments that XLA never passes. For each call, prints
// the error message or "accepted".
#include <cstdint>
#include <cstdio>
#include <string>

#include "cuda/common/problem_checks.h"
#include "ffi/decode.h"
#include "ffi/handler_support.h"

using namespace natten_jax;
namespace xffi = ::xla::ffi;

namespace {

void say(const xffi::Error& error) {
  std::puts(error.failure() ? error.message().c_str() : "accepted");
}

void say(const Status& status) {
  std::puts(status.failed() ? status.sentence().c_str() : "accepted");
}

alignas(64) char memory[4096];

/// An array of `rank` dimensions that begins `offset` bytes into `memory`.
struct Array {
  std::int64_t extents[6] = {1, 1, 1, 2, 1, 8};
  XLA_FFI_Buffer buffer{};

  explicit Array(int offset, XLA_FFI_DataType type = XLA_FFI_DataType_F16, int rank = 6) {
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = type;
    buffer.data = memory + offset;
    buffer.rank = rank;
    buffer.dims = extents;
  }
  xffi::AnyBuffer any() { return xffi::AnyBuffer(&buffer); }
};

void decode(int query, int key, int value) {
  Array arrays[3] = {Array(query), Array(key), Array(value)}, additional(0, XLA_FFI_DataType_F16, 4),
        origins(0, XLA_FFI_DataType_S32, 2), scales(0, XLA_FFI_DataType_F32, 1);
  scales.extents[0] = 0;
  const std::int64_t none[4] = {1, 0, 1, 8};
  std::copy_n(none, 4, additional.extents);
  ffi::Attributes attributes{};
  for (Axis& axis : attributes.axes) {
    axis.query.extent = axis.kv.extent = 2;
    axis.window = {1, 1, 1, natten_jax::Ends::kShift};
  }
  attributes.scale = 1;
  ffi::Call call{};
  say(ffi::decode_problem({arrays[0].any(), arrays[1].any(), arrays[2].any(), additional.any(), additional.any(),
                           origins.any(), scales.any()},
                          attributes, nullptr, call));
}

void check_gradients(int offset) {
  Array of(0), gradient(offset);
  const xffi::AnyBuffer operand = of.any(), result = gradient.any(), good = of.any();
  say(ffi::check_gradients({operand, operand, operand, operand, operand, operand, operand},
                           {&good, &result, &good, &good, &good}));
}

void check_sizes(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t additional_kv) {
  Problem problem{};
  problem.batch = batch;
  problem.heads = problem.heads_kv = heads;
  problem.additional_kv = additional_kv;
  for (Axis& axis : problem.axes) axis.query.local_extent = axis.kv.local_extent = 1;
  problem.axes[2].query.local_extent = problem.axes[2].kv.local_extent = tokens;
  say(check_token_bytes(problem, 128, 2));
  say(check_rows(problem));
}

}  // namespace

int main() {
  decode(0, 16, 2048);
  decode(2, 0, 0);
  decode(0, 8, 0);
  decode(0, 0, 4);
  check_gradients(32);
  check_gradients(2);
  check_sizes(1, 1, (1 << 23) - 1, 0);
  check_sizes(1, 1, 1 << 23, 0);
  check_sizes(1 << 10, 1 << 10, 1 << 11, 0);
  check_sizes(1, 1, 1 << 11, 1 << 20);
}
