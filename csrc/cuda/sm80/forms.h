// Forms in which the portable CUDA kernels are compiled, and their limits. Only plain numbers: the launch code selects
// a form from them, and Python reads them in every build.
#pragma once

#include <cstdint>

namespace natten_jax::sm80 {

inline constexpr std::int64_t kHeadDimStep = 8;
inline constexpr std::int64_t kLargestHeadDim = 256;

/// Maximum bytes of shared memory per CTA that every GPU since Ampere supports.
inline constexpr int kLeastSharedMemory = 99 << 10;

/// Error message if no form fits.
inline constexpr char kTooLittleSharedMemory[] = "the device has too little shared memory for heads of this width";

/// A form of the forward kernel: its maximum head dimension, the bytes of an element, the maximum tokens of its tiles,
/// and the maximum bytes of shared memory of its CTAs.
struct ForwardForm {
  int head_dim;
  int element_bytes;
  int queries;
  int keys;
  int shared_memory;
};

inline constexpr int kLargestTile = 128;
inline constexpr ForwardForm kWideForm{128, 2, 256, kLargestTile, 226 << 10};
/// Sorted by element and head dimension, then by tile size. Forms use more stages on GPUs with enough shared memory.
inline constexpr ForwardForm kForwardForms[] = {
    {64, 2, 128, kLargestTile, kLeastSharedMemory},
    {128, 2, 128, kLargestTile, kLeastSharedMemory},
    kWideForm,
    {256, 2, 64, kLargestTile, kLeastSharedMemory},
    {64, 4, 128, kLargestTile, kLeastSharedMemory},
    {128, 4, 64, kLargestTile, kLeastSharedMemory},
    {256, 4, 64, kLargestTile, kLeastSharedMemory},
};
/// Major compute capabilities that support the shared memory of every form above.
inline constexpr int kWideFormCapabilities[] = {9, 10};

/// A form of the backward kernel: the keys that it processes at a time, and the bytes of shared memory that it needs.
/// Its tiles have at most kLargestTile tokens.
struct BackwardForm {
  int head_dim;
  int element_bytes;
  int keys;
  int shared_memory;
};

/// Sorted by element and head dimension, then by shared memory, largest first.
inline constexpr BackwardForm kBackwardForms[] = {
    {64, 2, 128, 96 << 10},  {128, 2, 128, 226 << 10}, {128, 2, 64, 80 << 10},
    {256, 2, 64, 120 << 10}, {256, 2, 32, 84 << 10},   {64, 4, 64, 96 << 10},
    {128, 4, 32, 80 << 10},  {256, 4, 32, 148 << 10},  {256, 4, 16, 80 << 10},
};

/// Head dimension of the narrowest forms for heads of this width and elements of this size; 0 without such forms.
template <class Form, int kForms>
constexpr int compiled_head_dim(const Form (&forms)[kForms], std::int64_t head_dim, int element_bytes) {
  for (const Form& form : forms) {
    if (form.element_bytes == element_bytes && head_dim <= form.head_dim) return form.head_dim;
  }
  return 0;
}

/// True if the table has a form of the backward kernel.
constexpr bool has_backward_form(int head_dim, int element_bytes, int keys, int shared_memory) {
  for (const BackwardForm& form : kBackwardForms) {
    if (form.head_dim == head_dim && form.element_bytes == element_bytes && form.keys == keys) {
      return shared_memory <= form.shared_memory;
    }
  }
  return false;
}

}  // namespace natten_jax::sm80
