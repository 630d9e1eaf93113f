// The floating-point mode of kernel code: denormal numbers are flushed to zero.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace natten_jax::cpu {

#if defined(__SSE__)
constexpr std::uint64_t kFlushBits = 0x8040;  // FTZ of MXCSR flushes denormal results, DAZ flushes denormal operands.

inline std::uint64_t float_mode() {
  return _mm_getcsr();
}

inline void set_float_mode(std::uint64_t mode) {
  _mm_setcsr(static_cast<unsigned>(mode));
}
#elif defined(__aarch64__)
constexpr std::uint64_t kFlushBits = 1u << 24;  // FPCR.FZ flushes denormal operands and results.

inline std::uint64_t float_mode() {
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}

inline void set_float_mode(std::uint64_t mode) {
  asm volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
constexpr std::uint64_t kFlushBits = 0;

inline std::uint64_t float_mode() {
  return 0;
}

inline void set_float_mode(std::uint64_t) {}
#endif

/// Makes the current thread flush denormal numbers to zero while the object exists. Otherwise, results could depend on
/// the thread that computes them, because threads may have different modes.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(float_mode()) { set_float_mode(saved_ | kFlushBits); }
  ~FlushDenormals() { set_float_mode(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace natten_jax::cpu
