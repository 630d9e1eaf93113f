// Decodes an XLA FFI call to a checked Problem, or to an error that names the argument, its value and the rule.
//
// All arguments that the host can read are checked, because callers can bypass the Python layer.
#pragma once

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "xla/ffi/api/ffi.h"

namespace natten_jax::ffi {

namespace xffi = ::xla::ffi;

/// Attributes that every attention target takes.
struct Attributes {
  Axis axes[kRank];  ///< `decode_problem` sets local extents and origins from the operands.
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

/// A call whose arguments passed all checks.
struct Call {
  Problem problem;
  TileShapes tiles;
  Arrays arrays;
};

/// Memory that holds the arrays of a call. Values of origins and layouts are not checked in device memory, because only
/// the kernels can read them there.
enum class Memory { kHost, kDevice };

/// Element types that a target supports: types of more than 8 bits, or the type of 8 bits.
enum class Elements { kWide, kFloat8 };

/// Decodes and checks the attributes. `further`: number of additional attributes in the dictionary, which the target
/// decodes.
xffi::Error decode_attributes(const xffi::Dictionary& dictionary, Attributes& attributes, std::int64_t further = 0);

/// Decodes an integer attribute that lies between 0 and `largest`.
xffi::Error decode_choice(const xffi::Dictionary& dictionary, const char* name, std::int64_t largest,
                          std::int64_t& value);

/// Decodes the attribute `queries`: the number of local queries that a call processes, per dimension.
xffi::Error decode_queries(const xffi::Dictionary& dictionary, const Problem& problem, std::int64_t (&queries)[kRank]);

/// Checks that the operands match each other and the attributes, and describes the problem in `call`.
///
/// Args:
///   operands: the arrays; their contents are not read.
///   attributes: decoded attributes.
///   origins: six numbers in host memory, the query origin first. Null if the host cannot read them. The problem's
///     origins are then zero, and are not checked.
///   call: the result; its pointers refer to the operands.
xffi::Error decode_problem(const ProblemOperands& operands, const Attributes& attributes, const std::int32_t* origins,
                           Call& call, Elements elements = Elements::kWide);

/// Decodes the layouts of batch entries. An empty array means that all entries have the same layout.
xffi::Error decode_layouts(const xffi::AnyBuffer& layouts, Memory memory, Call& call);

/// Decodes and checks the operands and attributes that all targets have. `further`: number of additional attributes in
/// the dictionary, which the target decodes.
xffi::Error decode_call(const ProblemOperands& operands, const xffi::Dictionary& dictionary, std::int64_t further,
                        Memory memory, Call& call, Elements elements = Elements::kWide);

/// Element type of the problem's arrays.
xffi::DataType data_type(ElementType type);

/// Checks that the address of an array has the alignment that the kernels require.
xffi::Error check_alignment(const char* name, const xffi::AnyBuffer& array);

/// Decodes the element type of an array. Returns an error if the kernels do not support it.
xffi::Error decode_element_type(const char* name, const xffi::AnyBuffer& array, ElementType& type,
                                Elements elements = Elements::kWide);

/// Checks the dtype and shape of an array. `rule` explains the required dtype and shape in the error.
xffi::Error check_array(const char* name, const xffi::AnyBuffer& array, xffi::DataType type,
                        std::initializer_list<std::int64_t> shape, const char* rule);

}  // namespace natten_jax::ffi

/// Evaluates an expression. If the result is an error, returns the error from the calling function.
#define NATTEN_JAX_RETURN_IF_ERROR(expression)                       \
  do {                                                               \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) { \
      return error_;                                                 \
    }                                                                \
  } while (false)
