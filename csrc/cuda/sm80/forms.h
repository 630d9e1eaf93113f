// Forms (compiled variants) of the portable CUDA kernels, and their limits. This header contains only plain numbers.
// The launch code selects a form from them, and Python reads them in every build, also in builds without CUDA.
#pragma once

#include <cstdint>

namespace natten_jax::sm80 {

inline constexpr std::int64_t kHeadDimStep = 8;
inline constexpr std::int64_t kLargestHeadDim = 256;

/// Bytes of shared memory that a CTA can use on every GPU since Ampere.
inline constexpr int kLeastSharedMemory = 99 << 10;

/// Error message if no form fits.
inline constexpr char kTooLittleSharedMemory[] = "the device has too little shared memory for heads of this width";

/// A form of the forward kernel.
struct ForwardForm {
  int head_dim;  // maximum
  int element_bytes;
  int queries;        // maximum tokens of a query tile
  int keys;           // maximum tokens of a key/value tile
  int shared_memory;  // bytes per CTA that the device must support
};

inline constexpr int kLargestTile = 128;
inline constexpr ForwardForm kWideForm{128, 2, 256, kLargestTile, 226 << 10};
/// Forms of the forward kernel, sorted by element size, then by head dimension, then by tile size. On devices with more
/// shared memory than a form requires, the form may be launched with more stages.
inline constexpr ForwardForm kForwardForms[] = {
    {64, 2, 128, kLargestTile, kLeastSharedMemory},
    {128, 2, 128, kLargestTile, kLeastSharedMemory},
    kWideForm,
    {256, 2, 64, kLargestTile, kLeastSharedMemory},
    {64, 4, 128, kLargestTile, kLeastSharedMemory},
    {128, 4, 64, kLargestTile, kLeastSharedMemory},
    {256, 4, 64, kLargestTile, kLeastSharedMemory},
};
/// Major compute capabilities of GPUs with enough shared memory for all of these forms.
inline constexpr int kWideFormCapabilities[] = {9, 10};

/// A form of the backward kernel. Its tiles have at most kLargestTile tokens.
struct BackwardForm {
  int head_dim;  // maximum
  int element_bytes;
  int keys;           // keys that a CTA processes at a time
  int shared_memory;  // bytes per CTA that the device must support
};

/// Forms of the backward kernel, sorted by element size, then by head dimension, then by shared memory, largest first.
inline constexpr BackwardForm kBackwardForms[] = {
    {64, 2, 128, 96 << 10},  {128, 2, 128, 226 << 10}, {128, 2, 64, 80 << 10},
    {256, 2, 64, 120 << 10}, {256, 2, 32, 84 << 10},   {64, 4, 64, 96 << 10},
    {128, 4, 32, 80 << 10},  {256, 4, 32, 148 << 10},  {256, 4, 16, 80 << 10},
};

/// Smallest head dimension among the forms that support `head_dim` and `element_bytes`; 0 if no form supports them.
template <class Form, int kForms>
constexpr int compiled_head_dim(const Form (&forms)[kForms], std::int64_t head_dim, int element_bytes) {
  for (const Form& form : forms) {
    if (form.element_bytes == element_bytes && head_dim <= form.head_dim) return form.head_dim;
  }
  return 0;
}

/// True if kBackwardForms has a form with these values and at least this `shared_memory`.
constexpr bool has_backward_form(int head_dim, int element_bytes, int keys, int shared_memory) {
  for (const BackwardForm& form : kBackwardForms) {
    if (form.head_dim == head_dim && form.element_bytes == element_bytes && form.keys == keys) {
      return shared_memory <= form.shared_memory;
    }
  }
  return false;
}

}  // namespace natten_jax::sm80
