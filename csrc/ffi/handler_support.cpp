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

}  // namespace natten_jax::ffi
