#include "ffi/handler_support.h"

namespace natten_jax::ffi {

xffi::Error check_query_array(const char* name, const xffi::AnyBuffer& array, const Problem& p, bool is_statistic) {
  const std::int64_t x = p.dims[0].query.extent;
  const std::int64_t y = p.dims[1].query.extent;
  const std::int64_t z = p.dims[2].query.extent;
  if (is_statistic) {
    return check_array(name, array, xffi::DataType::F32, {p.batch, x, y, z, p.heads}, "one value per query and head");
  }
  return check_array(name, array, data_type(p.element_type), {p.batch, x, y, z, p.heads, p.head_dim_v},
                     "it has the dtype of query and the width of value");
}

xffi::Error check_gradient(const char* name, const xffi::AnyBuffer& gradient, const xffi::AnyBuffer& operand) {
  bool is_equal =
      gradient.element_type() == operand.element_type() && gradient.dimensions().size() == operand.dimensions().size();
  for (std::size_t i = 0; is_equal && i < operand.dimensions().size(); ++i) {
    is_equal = gradient.dimensions()[i] == operand.dimensions()[i];
  }
  if (is_equal) return xffi::Error::Success();
  return xffi::Error::InvalidArgument(std::string("natten_jax: result ") + name +
                                      " must have the shape and dtype of the operand that it is the gradient of");
}

}  // namespace natten_jax::ffi
