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
  return check_array(name, array, data_type(p.out_type), {p.batch, x, y, z, p.heads, p.head_dim_v},
                     "it has the dtype of query, if that has more than 8 bits, and the width of value");
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

/// Checks the cotangent of the logsumexp, and sets `values` to its numbers, or to null if they are zeros. `array` is
/// null if the target does not take this operand.
xffi::Error check_logsumexp_cotangent(const xffi::AnyBuffer* array, const Problem& p, const float*& values) {
  values = nullptr;
  if (array == nullptr) return xffi::Error::Success();
  float* array_values = nullptr;
  NATTEN_JAX_RETURN_IF_ERROR(check_remainder("logsumexp_cotangent", *array, p, array_values));
  values = array_values;
  return xffi::Error::Success();
}

xffi::Error decode_forward(const ProblemOperands& operands, ForwardResults results, const xffi::Dictionary& dictionary,
                           std::int64_t further, Memory memory, Call& call, Elements elements) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_call(operands, dictionary, further, memory, call, elements));
  if (elements == Elements::kFloat8) {
    NATTEN_JAX_RETURN_IF_ERROR(decode_element_type("result out", *results.out, call.problem.out_type));
  }
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result out", *results.out, call.problem, false));
  NATTEN_JAX_RETURN_IF_ERROR(check_query_array("result logsumexp", *results.logsumexp, call.problem, true));
  call.arrays.out = results.out->untyped_data();
  call.arrays.logsumexp = static_cast<float*>(results.logsumexp->untyped_data());
  return check_remainder("result remainder", *results.remainder, call.problem, call.arrays.remainder);
}

xffi::Error decode_backward(const ProblemOperands& operands, const xffi::AnyBuffer& layouts, const Saved& saved,
                            Gradients gradients, const xffi::Dictionary& dictionary, std::int64_t further,
                            Memory memory, Call& call) {
  NATTEN_JAX_RETURN_IF_ERROR(decode_call(operands, dictionary, further, memory, call));
  const Problem& p = call.problem;
  Arrays& arrays = call.arrays;
  const auto check = [&](const char* name, const xffi::AnyBuffer* array, bool is_statistic) {
    return array == nullptr ? xffi::Error::Success() : check_query_array(name, *array, p, is_statistic);
  };
  NATTEN_JAX_RETURN_IF_ERROR(check("logsumexp", saved.logsumexp, true));
  NATTEN_JAX_RETURN_IF_ERROR(check_remainder("remainder", *saved.remainder, p, arrays.remainder));
  NATTEN_JAX_RETURN_IF_ERROR(check("out", saved.out, false));
  NATTEN_JAX_RETURN_IF_ERROR(check("out_cotangent", saved.out_cotangent, false));
  NATTEN_JAX_RETURN_IF_ERROR(check_logsumexp_cotangent(saved.logsumexp_cotangent, p, arrays.logsumexp_cotangent));
  NATTEN_JAX_RETURN_IF_ERROR(check("delta", saved.delta, true));
  NATTEN_JAX_RETURN_IF_ERROR(check_heads_of_gradients(p));
  NATTEN_JAX_RETURN_IF_ERROR(
      check_gradients(operands, {&*gradients[0], &*gradients[1], &*gradients[2], &*gradients[3], &*gradients[4]}));
  const auto data = [](const xffi::AnyBuffer* array) { return array == nullptr ? nullptr : array->untyped_data(); };
  arrays.logsumexp = static_cast<float*>(data(saved.logsumexp));
  arrays.out = data(saved.out);
  arrays.out_cotangent = data(saved.out_cotangent);
  arrays.delta = static_cast<const float*>(data(saved.delta));
  arrays.query_gradient = gradients[0]->untyped_data();
  arrays.key_gradient = gradients[1]->untyped_data();
  arrays.value_gradient = gradients[2]->untyped_data();
  arrays.additional_keys_gradient = gradients[3]->untyped_data();
  arrays.additional_values_gradient = gradients[4]->untyped_data();
  return decode_layouts(layouts, memory, call);
}

xffi::Error check_heads_of_gradients(const Problem& p) {
  if (p.scale.heads == nullptr || p.heads == p.heads_kv) return xffi::Error::Success();
  return xffi::Error::InvalidArgument("natten_jax: query has " + std::to_string(p.heads) + " heads and key has " +
                                      std::to_string(p.heads_kv) +
                                      ", but a backward pass with scales must have as many of both");
}

xffi::Error check_gradients(const ProblemOperands& operands, const std::array<const xffi::AnyBuffer*, 5>& gradients) {
  constexpr const char* kNames[] = {"dquery", "dkey", "dvalue", "dadditional_keys", "dadditional_values"};
  const xffi::AnyBuffer* inputs[] = {&operands.query, &operands.key, &operands.value, &operands.additional_keys,
                                     &operands.additional_values};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    NATTEN_JAX_RETURN_IF_ERROR(check_alignment((std::string("result ") + kNames[i]).c_str(), *gradients[i]));
    const auto actual = gradients[i]->dimensions(), expected = inputs[i]->dimensions();
    if (gradients[i]->element_type() != inputs[i]->element_type() ||
        !std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
      return xffi::Error::InvalidArgument(std::string("natten_jax: result ") + kNames[i] +
                                          " must have the shape and dtype of the operand that it is the gradient of");
    }
  }
  return xffi::Error::Success();
}

}  // namespace natten_jax::ffi
