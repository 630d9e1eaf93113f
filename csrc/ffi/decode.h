// From an XLA FFI call to a checked Problem, or to an error that names the argument, its value and the rule.
//
// Nothing that XLA hands over is trusted: callers may bypass the Python layer.
#pragma once

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "xla/ffi/api/ffi.h"

namespace natten_jax::ffi {

namespace xffi = ::xla::ffi;

/// The attributes that every attention target takes, as one value.
struct Attributes {
  Axis axes[kRank];  ///< Local extents and origins are those of the operands: decode_problem fills them in.
  float scale;       ///< Scale of all heads.
  TileShapes tiles;
};

/// The operands that describe a problem.
struct ProblemOperands {
  xffi::AnyBuffer query;
  xffi::AnyBuffer key;
  xffi::AnyBuffer value;
  xffi::AnyBuffer additional_keys;
  xffi::AnyBuffer additional_values;
  xffi::AnyBuffer origins;
  xffi::AnyBuffer scales;
};

/// A call whose arguments obey every rule.
struct Call {
  Problem problem;
  TileShapes tiles;
  Arrays arrays;
};

/// Where the arrays of a call lie. Origins and layouts in the memory of a device are the kernels' to read, and not
/// checked.
enum class Memory { kHost, kDevice };

/// Which element types a target takes: those of more than 8 bits, or 8-bit ones alone.
enum class Elements { kWide, kFloat8 };

/// Decodes and checks the attributes; `further` is how many more the target takes.
xffi::Error decode_attributes(const xffi::Dictionary& dictionary, Attributes& attributes, std::int64_t further = 0);

/// Decodes an integer attribute that lies between 0 and `largest`.
xffi::Error decode_choice(const xffi::Dictionary& dictionary, const char* name, std::int64_t largest,
                          std::int64_t& value);

/// Decodes the attribute `queries`: how many of the local ones a call looks at, in each dimension.
xffi::Error decode_queries(const xffi::Dictionary& dictionary, const Problem& problem, std::int64_t (&queries)[kRank]);

/// Checks the operands against each other and the attributes, and describes the problem.
///
/// Args:
///   operands: the arrays; their contents are not read.
///   attributes: decoded attributes.
///   origins: six values readable by the host, query origin first, or null to leave the origins at zero and
///     unchecked.
///   call: the result; its arrays are those of the operands.
xffi::Error decode_problem(const ProblemOperands& operands, const Attributes& attributes, const std::int32_t* origins,
                           Call& call, Elements elements = Elements::kWide);

/// Decodes the layouts of batch entries that differ; none where the array is empty.
xffi::Error decode_layouts(const xffi::AnyBuffer& layouts, Memory memory, Call& call);

/// Decodes and checks what all calls have: the attributes, of which the target takes `further` ones beside, and the
/// operands.
xffi::Error decode_call(const ProblemOperands& operands, const xffi::Dictionary& dictionary, std::int64_t further,
                        Memory memory, Call& call, Elements elements = Elements::kWide);

/// Element type of the problem's arrays.
xffi::DataType data_type(ElementType type);

/// Checks that an array begins where kernels can load from.
xffi::Error check_alignment(const char* name, const xffi::AnyBuffer& array);

/// The element type of an array, or an error where the kernels know none such.
xffi::Error decode_element_type(const char* name, const xffi::AnyBuffer& array, ElementType& type,
                                Elements elements = Elements::kWide);

/// Checks an array that must look exactly like this; `rule` says why.
xffi::Error check_array(const char* name, const xffi::AnyBuffer& array, xffi::DataType type,
                        std::initializer_list<std::int64_t> shape, const char* rule);

}  // namespace natten_jax::ffi

/// Leaves the calling function with the error of an expression, if it has one.
#define NATTEN_JAX_RETURN_IF_ERROR(expression)                       \
  do {                                                               \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) { \
      return error_;                                                 \
    }                                                                \
  } while (false)
