// The floating-point mode of kernel code.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace natten_jax::cpu {

/// Flushes denormals to zero while it lives. Pool threads and callers may differ in this mode, and results must
/// not depend on which thread computed them.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  FlushDenormals() = default;
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__SSE__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned saved_;
#endif
};

}  // namespace natten_jax::cpu
