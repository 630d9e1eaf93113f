// Status that a call returns.
#pragma once

#include <string>
#include <utility>

namespace natten_jax {

/// Success, or an error code with a sentence that explains the error.
class Status {
 public:
  enum class Code {
    kDone,
    kInvalidArgument,    ///< The call requests something unsupported.
    kResourceExhausted,  ///< The host lacks memory.
    kInternal,           ///< Something outside the caller's control failed.
  };

  Status() = default;

  static Status invalid_argument(std::string sentence) { return {Code::kInvalidArgument, std::move(sentence)}; }
  static Status resource_exhausted(std::string sentence) { return {Code::kResourceExhausted, std::move(sentence)}; }
  static Status internal(std::string sentence) { return {Code::kInternal, std::move(sentence)}; }

  bool failed() const { return code_ != Code::kDone; }
  Code code() const { return code_; }
  const std::string& sentence() const { return sentence_; }

 private:
  Status(Code code, std::string sentence) : code_(code), sentence_(std::move(sentence)) {}

  Code code_ = Code::kDone;
  std::string sentence_;
};

}  // namespace natten_jax

/// Evaluates an expression. If the resulting status is an error, returns it from the calling function.
#define NATTEN_JAX_RETURN_IF_FAILED(expression)                                        \
  do {                                                                                 \
    if (::natten_jax::Status status_ = (expression); status_.failed()) return status_; \
  } while (false)
