#include "ffi/handler_support.h"

#include <algorithm>

namespace natten_jax::ffi {

xffi::Error error_of(const Status& status) {
  const auto error = [&](xffi::ErrorCode code) { return xffi::Error(code, "natten_jax: " + status.sentence()); };
  switch (status.code()) {
    case Status::Code::kDone:
      return xffi::Error::Success();
    case Status::Code::kInvalidArgument:
      return error(xffi::ErrorCode::kInvalidArgument);
    case Status::Code::kResourceExhausted:
      return error(xffi::ErrorCode::kResourceExhausted);
    case Status::Code::kInternal:
      break;
  }
  return error(xffi::ErrorCode::kInternal);
}

xffi::Error check_query_array(const char* name, const xffi::AnyBuffer& array, const Problem& p, bool is_statistic) {
  const std::int64_t x = p.axes[0].query.local_extent;
  const std::int64_t y = p.axes[1].query.local_extent;
  const std::int64_t z = p.axes[2].query.local_extent;
  if (is_statistic) {
    return check_array(name, array, xffi::DataType::F32, {p.batch, x, y, z, p.heads}, "one value per query and head");
  }
  return check_array(name, array, data_type(p.element_type), {p.batch, x, y, z, p.heads, p.head_dim_v},
                     "it has the dtype of query and the width of value");
}

xffi::Error check_remainder(const char* name, const xffi::AnyBuffer& array, const Problem& p, float*& values) {
  values = nullptr;
  if (array.element_count() == 0) {
    return check_array(name, array, xffi::DataType::F32, {0}, "it is empty, or one value per query and head");
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array(name, array, p, true));
  values = static_cast<float*>(array.untyped_data());
  return xffi::Error::Success();
}

xffi::Error check_heads_of_gradients(const Problem& p) {
  if (p.scale.heads == nullptr || p.heads == p.heads_kv) return xffi::Error::Success();
  return xffi::Error::InvalidArgument("natten_jax: query has " + std::to_string(p.heads) + " heads and key has " +
                                      std::to_string(p.heads_kv) +
                                      ", but a backward pass with scales must have as many of both");
}

xffi::Error check_gradients(const ProblemOperands& operands, const std::array<const xffi::AnyBuffer*, 5>& gradients) {
  constexpr const char* kNames[] = {"dquery", "dkey", "dvalue", "dadditional_keys", "dadditional_values"};
  const xffi::AnyBuffer* of[] = {&operands.query, &operands.key, &operands.value, &operands.additional_keys,
                                 &operands.additional_values};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    NATTEN_JAX_RETURN_IF_ERROR(check_alignment((std::string("result ") + kNames[i]).c_str(), *gradients[i]));
    const auto actual = gradients[i]->dimensions(), expected = of[i]->dimensions();
    if (gradients[i]->element_type() != of[i]->element_type() ||
        !std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
      return xffi::Error::InvalidArgument(std::string("natten_jax: result ") + kNames[i] +
                                          " must have the shape and dtype of the operand that it is the gradient of");
    }
  }
  return xffi::Error::Success();
}

}  // namespace natten_jax::ffi
